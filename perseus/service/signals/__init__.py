"""Sources of signals."""
