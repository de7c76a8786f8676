"""Agent process: the gRPC stream to the coordinator and its messages."""
