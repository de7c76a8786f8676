"""Agent process, pure: when to set which clock."""
