"""Iterations under plans beside iterations at stock in the same minutes: what surely differs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from perseus.service.domain.student_t import interval_factor


@dataclass(frozen=True, slots=True)
class Pair:
    """A block of iterations at stock, and equally many under plans before and after it.

    `planned_energy_j` and `stock_energy_j` are means of an iteration, 0 if unknown.
    """

    before_s: tuple[float, ...]
    stock_s: tuple[float, ...]
    after_s: tuple[float, ...]
    planned_energy_j: float
    stock_energy_j: float
    last_iteration: int

    @property
    def planned_time_s(self) -> float:
        """Mean of the iterations under plans."""
        return fmean(self.before_s + self.after_s)

    @property
    def stock_time_s(self) -> float:
        """Mean of those at stock."""
        return fmean(self.stock_s)

    def min_ratio(self, confidence: float) -> float:
        """Return what the ratio of the times surely exceeds, from the scatter within this pair.

        That knows nothing of what changes from minute to minute: so the faster one of both sides counts.
        """
        sides = (self.before_s, self.stock_s, self.after_s)
        freedom = sum(len(times_s) - 1 for times_s in sides)
        if not freedom:
            return 0.0
        squares = math.fsum((time_s - fmean(times_s)) ** 2 for times_s in sides for time_s in times_s)
        error_s = math.sqrt(squares / freedom * (1 / len(self.stock_s) + 1 / len(self.before_s)))
        planned_s = min(fmean(self.before_s), fmean(self.after_s))
        return (planned_s - interval_factor(freedom, confidence) * error_s) / self.stock_time_s


@dataclass(frozen=True, slots=True)
class PairSums:
    """Sums over pairs of means: `planned` of iterations under plans, `stock` of those at stock beside them.

    Plans against stock is the ratio of the sums. What drifts slowly is in both means of a pair alike, and
    what varies from pair to pair is in the ratio's error, to first order: the scatter of planned - ratio ×
    stock.
    """

    count: int = 0
    planned: float = 0.0
    stock: float = 0.0
    planned_square: float = 0.0
    stock_square: float = 0.0
    product: float = 0.0

    def with_pair(self, planned: float, stock: float) -> "PairSums":
        """Return the sums with one more pair."""
        return PairSums(
            self.count + 1,
            self.planned + planned,
            self.stock + stock,
            self.planned_square + planned**2,
            self.stock_square + stock**2,
            self.product + planned * stock,
        )

    @property
    def ratio(self) -> float:
        """Plans over stock; needs a pair."""
        return self.planned / self.stock

    @property
    def ratio_se(self) -> float | None:
        """Standard error of the ratio; None for fewer than two pairs."""
        if self.count < 2:
            return None
        ratio = self.ratio
        squares = self.planned_square - 2 * ratio * self.product + ratio**2 * self.stock_square
        return math.sqrt(max(0.0, squares) * self.count / (self.count - 1)) / self.stock

    def ratio_margin(self, confidence: float = 0.95) -> float | None:
        """Return half the ratio's interval; None for fewer than two pairs."""
        se = self.ratio_se
        return None if se is None else interval_factor(self.count - 1, confidence) * se


NO_PAIRS = PairSums()


Figures = tuple[float, float, float]
"""Time, energy (0 if unknown) and relative work of an iteration."""


def pair_of(
    before: Sequence[Figures], stock: Sequence[Figures], after: Sequence[Figures], last_iteration: int
) -> Pair:
    """Return the pair of iterations, each as it would be at the mean of their works."""
    mean_work = fmean(work for *_, work in (*before, *stock, *after))

    def times_s(side: Sequence[Figures]) -> tuple[float, ...]:
        return tuple(time_s * mean_work / work for time_s, _, work in side)

    planned_j, stock_j = (
        [energy_j * mean_work / work for _, energy_j, work in side] for side in ((*before, *after), stock)
    )
    is_known = all(planned_j) and all(stock_j)
    return Pair(
        times_s(before),
        times_s(stock),
        times_s(after),
        fmean(planned_j) if is_known else 0.0,
        fmean(stock_j) if is_known else 0.0,
        last_iteration,
    )
