"""Finds the slow pipelines of a job. Pure."""
