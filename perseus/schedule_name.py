"""The names of schedules, shared by command line, agents, coordinator and solver."""

import enum


class ScheduleName(enum.StrEnum):
    """Schedules known by name, as operators write them; the contract's `ScheduleName` has the members' names.

    :mod:`perseus.solver.named_schedules` defines them.
    """

    GPIPE = "gpipe"
    ONE_FORWARD_ONE_BACKWARD = "1f1b"
    INTERLEAVED_ONE_FORWARD_ONE_BACKWARD = "interleaved-1f1b"
    EARLY_RECOMPUTATION = "early-recomputation"
    ZERO_BUBBLE_H1 = "zb-h1"
    ZERO_BUBBLE_V = "zbv"
    DUAL_PIPE_V = "dualpipev"
