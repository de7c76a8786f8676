"""Emulated GPUs for the demo, the tests and benchmarks: each a physical model that processes share.

physics     time and power of work at a clock
dynamics    the evolution of a GPU's state over time
gpu         one GPU, in a file that trainer and agent share
"""
