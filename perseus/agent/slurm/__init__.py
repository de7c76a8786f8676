"""A node's part in a Slurm job: what its prolog and epilog tell the agent, and make sure of."""
