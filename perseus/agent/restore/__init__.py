"""Agent process and its supervisor: what is to be restored, on disk, and bringing GPUs back."""
