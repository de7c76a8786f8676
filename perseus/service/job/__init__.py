"""One run of a job as a pure state machine: inputs and the time in, commands out. Start at `machine`."""
