"""Signals: carbon intensity and price over time, how long values stay valid, and forecasts. Pure."""
