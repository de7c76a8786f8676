"""Iterations put together from their ranks: the report, the baseline, the latest timeline. Pure."""
