"""Agent process, pure: which user of the node may have which GPU and which job."""
