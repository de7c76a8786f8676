"""Who serves the ranks of a job, and what their GPUs can do. Pure."""
