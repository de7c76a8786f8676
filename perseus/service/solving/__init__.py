"""Solving in worker processes: a pool for jobs, fair and patient, and one for callers, who may leave."""
