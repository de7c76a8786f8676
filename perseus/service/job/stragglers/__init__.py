"""Which pipelines are slow. Pure."""
