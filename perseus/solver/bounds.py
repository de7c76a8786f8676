"""Bounds on input values: wide, but finite, so that no sum or product overflows.

They apply to whole stages of many GPUs each; an iteration has its own limit (see `sweep`).
"""

MAX_CLOCK_MHZ = 100_000
MAX_TIME_S = 1e6
"""For one computation or lag."""
MIN_TIME_S = 1e-12
"""For one computation."""
MIN_ENERGY_J = 1e-12
MAX_ENERGY_J = 1e15
"""For one computation of a stage."""
MAX_LAYER_COUNT = 10_000
"""For one chunk of a stage: above any known model."""
MAX_POWER_W = 1e10
"""For a waiting stage."""
