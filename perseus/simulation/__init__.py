"""Simulates days of jobs, budgets and signals in seconds, with the code that controls real jobs."""
