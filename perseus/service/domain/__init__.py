"""Plain values that all rooms of the service share. Pure; knows the solver's values and nobody else."""
