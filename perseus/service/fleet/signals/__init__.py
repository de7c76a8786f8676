"""Signals: carbon intensity and price over time, how long what is known counts, and what may come. Pure."""
