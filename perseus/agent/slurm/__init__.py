"""A node's part in a Slurm job: its prolog grants GPUs, its epilog revokes them and awaits stock."""
