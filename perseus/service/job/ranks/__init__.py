"""The ranks of a job: the agents that serve them, and the abilities of their GPUs. Pure."""
