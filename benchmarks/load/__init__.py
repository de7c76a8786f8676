"""A load of agents for a coordinator, in its own process, which `benchmarks.coordinator_load` starts."""
