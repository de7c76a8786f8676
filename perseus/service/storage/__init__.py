"""What outlives the coordinator: the abstract store, and its engines."""
