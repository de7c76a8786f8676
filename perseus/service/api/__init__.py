"""The gRPC surface: one thin adapter per service, translation, statuses, what waits to be sent."""
