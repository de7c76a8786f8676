"""Days of jobs, budgets and signals in seconds, by the code that decides for real jobs."""
