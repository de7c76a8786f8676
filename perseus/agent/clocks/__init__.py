"""Agent process, pure: decides when to set which clock."""
