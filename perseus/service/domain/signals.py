"""Signals of carbon intensity and price: a job's rule, and its progress under that rule."""

import enum
import math
from dataclasses import dataclass, replace

import numpy as np

from perseus.service.domain.bounds import MAX_COUNT, check_range
from perseus.service.domain.errors import InvalidFieldError

HOUR_S = 3600.0
MAX_SIGNAL_TIME_S = 1e11
"""Since 1970: three thousand years."""

MAX_EXTRA_TIME_PERCENT = 1000.0
MIN_HORIZON_S = HOUR_S
MAX_HORIZON_S = 366 * 24 * HOUR_S


class SignalKind(enum.Enum):
    """What a signal measures, per kilowatt-hour."""

    CARBON = "carbon"
    """gCO2."""
    PRICE = "price"
    """The operator's currency."""


@dataclass(frozen=True, slots=True)
class ExtraTime:
    """Extra time relative to full speed, over consecutive horizons."""

    percent: float
    horizon_s: float


@dataclass(frozen=True, slots=True)
class WorkUntil:
    """A number of iterations until a time of the wall clock."""

    iteration_count: int
    end_s: float


@dataclass(frozen=True, slots=True)
class SignalRule:
    """Minimise signal × energy within the available time: one of `extra_time` and `work_until`."""

    kind: SignalKind
    extra_time: ExtraTime | None = None
    work_until: WorkUntil | None = None

    def __str__(self) -> str:
        what = "least carbon" if self.kind is SignalKind.CARBON else "least cost"
        if self.work_until is not None:
            end = np.datetime64(math.floor(self.work_until.end_s), "s")
            return f"{what}: {self.work_until.iteration_count} iterations until {end}Z"
        assert self.extra_time is not None
        return f"{what} within {self.extra_time.percent:g} % more time over {self.extra_time.horizon_s:g} s"

    def check(self) -> None:
        """Refuse impossible figures.

        Raises:
            InvalidFieldError: names the figure.
        """
        field = f"policy.least_{'carbon' if self.kind is SignalKind.CARBON else 'cost'}"
        if (self.extra_time is None) == (self.work_until is None):
            raise InvalidFieldError(
                field=f"{field}.time", expected="extra_time or work_until", found="neither"
            )
        if self.extra_time is not None:
            check_range(f"{field}.extra_time.percent", self.extra_time.percent, 0, MAX_EXTRA_TIME_PERCENT)
            horizon_s = self.extra_time.horizon_s
            check_range(f"{field}.extra_time.horizon_s", horizon_s, MIN_HORIZON_S, MAX_HORIZON_S)
        if self.work_until is not None:
            work = self.work_until
            check_range(f"{field}.work_until.iteration_count", work.iteration_count, 1, MAX_COUNT)
            check_range(f"{field}.work_until.end_time", work.end_s, 0, MAX_SIGNAL_TIME_S)


@dataclass(frozen=True, slots=True)
class WorkWindow:
    """Work to be done from a time of the wall clock until another one.

    Attributes:
        begin_s: when it begins, since 1970.
        end_s: when the work must be done.
        iteration_count: the work.

    Raises:
        InvalidFieldError: it ends before it begins, or there is no work.
    """

    begin_s: float
    end_s: float
    iteration_count: float

    @classmethod
    def within_extra_time(cls, begin_s: float, extra_time: ExtraTime, full_speed: float) -> "WorkWindow":
        """Return a window of one horizon, whose work leaves the extra time at full speed (iterations/s)."""
        work = full_speed * extra_time.horizon_s / (1 + extra_time.percent / 100)
        return cls(begin_s, begin_s + extra_time.horizon_s, work)

    def __post_init__(self) -> None:
        if not self.begin_s < self.end_s < math.inf:
            raise InvalidFieldError(field="end_s", expected=f"after {self.begin_s:g}", found=self.end_s)
        if not 0 < self.iteration_count < math.inf:
            raise InvalidFieldError(
                field="iteration_count", expected="a finite number above 0", found=self.iteration_count
            )


class SignalTargetState(enum.Enum):
    """How a job follows its signal now."""

    FOLLOWING = "following"
    """It runs as slowly as the signal makes worthwhile."""
    NO_SIGNAL = "no_signal"
    """The signal is unknown: no slowdown."""
    LATE = "late"
    """The work can't be done in time any more: no slowdown."""
    DONE = "done"
    """The work is done, or its time is over: no slowdown."""


@dataclass(frozen=True, slots=True)
class SignalTarget:
    """How a job follows its signal, and its progress.

    Attributes:
        window: the work, and the time for it.
        state: how it follows the signal.
        target_time_s: the target iteration time, on the frontier's scale; None for no slowdown.
        value: of the signal when the target was set, per kWh; None if unknown.
        done_count: measured iterations since the window began; in a job's record, until the target was set.
    """

    window: WorkWindow
    state: SignalTargetState
    target_time_s: float | None = None
    value: float | None = None
    done_count: int = 0

    def after(self, iteration_count: int) -> "SignalTarget":
        """Return it with so many more iterations done."""
        return replace(self, done_count=self.done_count + iteration_count)
