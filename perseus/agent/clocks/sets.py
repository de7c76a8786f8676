"""Setting a GPU's clock: requests and completions. Clocks are MHz, None for stock."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SetClock:
    """Lock the GPU's clock; replaces all earlier requests."""

    clock_mhz: int


@dataclass(frozen=True, slots=True)
class ResetClock:
    """Return to stock; replaces all earlier requests."""


@dataclass(frozen=True, slots=True)
class ScheduleClock:
    """Lock the GPU's clock (None: return to stock) at a future moment; replaces earlier schedules.

    A request in the meantime replaces it.
    """

    clock_mhz: int | None
    at_s: float


@dataclass(frozen=True, slots=True)
class RepeatSet:
    """Lock the clock that was set last once more: another client has changed it."""


@dataclass(frozen=True, slots=True)
class ClockSet:
    """A completed set (MHz, None for stock); in force since `time_s`.

    `due_s`: its intended begin; `begun_at_s`: its actual one, after the previous set was done.
    """

    clock_mhz: int | None
    time_s: float
    begun_at_s: float
    due_s: float
