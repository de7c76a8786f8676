"""The coordinator: jobs, their ranks and plans, stragglers, storage, and the gRPC API."""
