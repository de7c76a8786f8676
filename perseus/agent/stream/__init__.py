"""Agent process: the gRPC stream to the coordinator, and what is said on it."""
