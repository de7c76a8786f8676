"""GPUs that are made up, for the demo, the tests and benchmarks: each a physical model that processes share.

physics     how long work takes, and what power it draws, at a clock
dynamics    how a GPU's state moves through time
gpu         one GPU, in a file that trainer and agent share
"""
