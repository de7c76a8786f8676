"""Both processes: the local protocol between a trainer's probe and the agent. Standard library only."""
