"""Iterations assembled from their ranks: the report, the baseline, the latest timeline. Pure."""
