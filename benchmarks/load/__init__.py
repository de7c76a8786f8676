"""A load of agents for a coordinator, in a process of its own; `benchmarks.coordinator_load` starts it."""
