"""Agent process and its supervisor: restore records on disk, and restoring GPUs from them."""
