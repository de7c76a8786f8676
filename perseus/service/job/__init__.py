"""One job's life, as a pure state machine: inputs and the time in, commands out. Begin at `machine`."""
