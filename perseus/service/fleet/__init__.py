"""What concerns many jobs at once. Pure."""
