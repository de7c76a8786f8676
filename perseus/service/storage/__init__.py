"""The coordinator's durable state: the abstract store, and its engines."""
