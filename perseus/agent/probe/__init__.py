"""Training process: the probe, and the code that framework hooks share. Standard library; torch on demand."""
