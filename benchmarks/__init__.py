"""What is timed or measured at length: one module per benchmark, run with ``python -m benchmarks.<name>``."""
