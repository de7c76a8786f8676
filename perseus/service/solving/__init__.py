"""Solving in worker processes: a lane for jobs, fair and patient, and one for callers, who may leave."""
