"""Solving in worker processes: a pool for jobs, fair and with retries, and one for API requests."""
