"""Training process: the probe, and what the framework hooks share. Standard library; torch when asked."""
