"""A load of agents for one coordinator, from a process of its own; `benchmarks.coordinator_load` starts it."""
