"""Setting a GPU's clock: what is asked for, and what is heard of it. Clocks are MHz, None for stock."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SetClock:
    """Lock the GPU's clock, in place of all that was asked for before."""

    clock_mhz: int


@dataclass(frozen=True, slots=True)
class ResetClock:
    """Back to stock, in place of all that was asked for before."""


@dataclass(frozen=True, slots=True)
class ScheduleClock:
    """Lock the GPU's clock (None: back to stock) at a moment to come, in place of what was scheduled before.

    What is asked for meanwhile takes its place.
    """

    clock_mhz: int | None
    at_s: float


@dataclass(frozen=True, slots=True)
class ClockSet:
    """A set was carried out (MHz, None for stock); in force since `time_s`.

    `due_s`: when it was to begin; `begun_at_s`: when it did, once the set before it was done.
    """

    clock_mhz: int | None
    time_s: float
    begun_at_s: float
    due_s: float
