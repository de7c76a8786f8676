"""How large a figure may be: wide, but finite, so that no sum or product of figures overflows.

They are of whole stages, of many GPUs each; an iteration has a limit of its own (see `sweep`).
"""

MAX_CLOCK_MHZ = 100_000
MAX_TIME_S = 1e6
"""Of one computation or lag; no less than a picosecond, unless it is 0."""
MIN_ENERGY_J = 1e-12
MAX_ENERGY_J = 1e15
"""Of one computation of a stage."""
MAX_POWER_W = 1e10
"""Of a stage that waits."""
