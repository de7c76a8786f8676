"""The gRPC API: one thin adapter per service, message translation, statuses, and agents' outboxes."""
