"""A signal: a time series of carbon intensity or price, where each value is valid until the next one.

Sources fail. A value without a successor stays valid for a while (the grid's emissions don't jump). After
that the signal is unknown, and jobs that follow it run as if there were none.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from perseus.service.domain.bounds import check_range
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.ledger import MAX_INTENSITY_G_PER_KWH
from perseus.service.domain.signals import HOUR_S, MAX_SIGNAL_TIME_S, SignalKind

Floats = NDArray[np.float64]

MAX_VALUE = 1e6
"""Bound on any signal's magnitude: prices are negative at times."""


@dataclass(frozen=True, slots=True)
class Signal:
    """The known values of a signal.

    Attributes:
        kind: what it measures.
        times_s: when each value becomes valid, since 1970, rising.
        values: per kWh, one for each time: gCO2, or the operator's currency.
        valid_s: how long the last value is meant to apply: usually the time between two values.
        stale_s: how long it stays valid beyond that.

    Raises:
        InvalidFieldError: there is no value, one is out of range, or times do not rise.
    """

    kind: SignalKind
    times_s: Sequence[float]
    values: Sequence[float]
    valid_s: float = HOUR_S
    stale_s: float = 3 * HOUR_S

    def __post_init__(self) -> None:
        if len(self.times_s) != len(self.values) or not self.values:
            raise InvalidFieldError(
                field="values", expected="one for each time, at least one", found=len(self.values)
            )
        is_carbon = self.kind is SignalKind.CARBON
        minimum, maximum = (0.0, MAX_INTENSITY_G_PER_KWH) if is_carbon else (-MAX_VALUE, MAX_VALUE)
        before_s = -1.0
        for index, (time_s, value) in enumerate(zip(self.times_s, self.values, strict=True)):
            check_range(f"times_s[{index}]", time_s, 0, MAX_SIGNAL_TIME_S)
            check_range(f"values[{index}]", value, minimum, maximum)
            if time_s <= before_s:
                expected = f"after the one before, {before_s:g}"
                raise InvalidFieldError(field=f"times_s[{index}]", expected=expected, found=f"{time_s:g}")
            before_s = time_s
        check_range("valid_s", self.valid_s, 1, MAX_SIGNAL_TIME_S)
        check_range("stale_s", self.stale_s, 0, MAX_SIGNAL_TIME_S)

    def value_at(self, now_s: float) -> float | None:
        """Return the value valid at a time; None before the first, or if the previous one is too old."""
        index = bisect_right(self.times_s, now_s) - 1
        if index < 0 or now_s >= self.times_s[index] + self.valid_s + self.stale_s:
            return None
        return self.values[index]

    def until(self, now_s: float) -> "Signal | None":
        """Return the values known at a time; None if there were none.

        Each value is a mean over its hour, and so is known only when that is over.
        """
        count = bisect_right(self.times_s, now_s - self.valid_s)
        if not count:
            return None
        return Signal(self.kind, self.times_s[:count], self.values[:count], self.valid_s, self.stale_s)

    def hourly(self, end_s: float) -> tuple[float, Floats]:
        """Return the signal resampled to whole hours up to a time: the first hour's time, and values `[N]`.

        An hour has the mean of the values valid in it; hours without any are interpolated.
        """
        first_s = HOUR_S * math.ceil(self.times_s[0] / HOUR_S)
        last_s = min(end_s, self.known_end_s)
        count = max(0, int((last_s - first_s) // HOUR_S))
        means = self.means(first_s + HOUR_S * np.arange(count + 1, dtype=np.float64))
        is_known = ~np.isnan(means)
        hours = np.arange(count)
        if not is_known.any():
            return first_s, np.empty(0)
        return first_s, np.interp(hours, hours[is_known], means[is_known])

    @property
    def known_end_s(self) -> float:
        """When the last value stops applying, staleness aside."""
        return self.times_s[-1] + self.valid_s

    def means(self, edges_s: Floats) -> Floats:
        """Return the mean value `[N]` between each two edges `[N + 1]`; NaN where no value is valid."""
        begins_s, values = np.asarray(self.times_s, float), np.asarray(self.values, float)
        ends_s = np.minimum(np.append(begins_s[1:], np.inf), begins_s + self.valid_s + self.stale_s)
        # The integrals of value and of validity up to each time are piecewise linear.
        knots_s = np.stack([begins_s, ends_s], axis=1).ravel()
        lengths_s = ends_s - begins_s
        sums = np.repeat(np.cumsum(values * lengths_s), 2)
        sums[::2] -= values * lengths_s
        known_s = np.repeat(np.cumsum(lengths_s), 2)
        known_s[::2] -= lengths_s
        between = np.diff(np.interp(edges_s, knots_s, sums))
        between_s = np.diff(np.interp(edges_s, knots_s, known_s))
        means: Floats = np.full(len(between), np.nan)
        np.divide(between, between_s, out=means, where=between_s > 1e-6)
        return means

    def after(self, before: "Signal | None", since_s: float) -> "Signal":
        """Prepend an earlier signal's values from before this one's first, back to a time.

        Earlier forecasts for the times that this signal covers are dropped.
        """
        if before is None:
            return self
        first, end = bisect_left(before.times_s, since_s), bisect_left(before.times_s, self.times_s[0])
        return replace(
            self,
            times_s=(*before.times_s[first:end], *self.times_s),
            values=(*before.values[first:end], *self.values),
        )
