"""Benchmarks, one per module: run one with ``python -m benchmarks.<name>``."""
