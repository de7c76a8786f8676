"""The relaxed problem that allows mixtures of plans; an allocation rounds its solution.

A job that runs one plan for a share of the time and another for the rest has, on average, the weighted means
of both powers and both speeds. So mixing is linear, and mixtures fill the convex hull of a job's points. With
one feed, the best mixture takes the hulls' pieces by falling slope (weighted speed per watt) as long as there
is power: greedy is exact, and at most one job is left between two plans. With several feeds it is a linear
program, solved by HiGHS; at a vertex, no more jobs are between plans than there are feeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Choices:
    """A job's points as arrays.

    Attributes:
        loss: `[K]`, weighted loss of speed of each point.
        power_w: `[K, F]`, power of each point on each feed.
    """

    loss: Floats
    power_w: Floats


@dataclass(frozen=True, slots=True)
class Relaxed:
    """The best mixture.

    Attributes:
        shares: per job, the points that it mixes, each with its share of time.
        loss: the total weighted loss: no choice of one point per job that keeps the limits loses less.
    """

    shares: tuple[tuple[tuple[int, float], ...], ...]
    loss: float


def lower_hull(power_w: Floats, loss: Floats) -> list[int]:
    """Return the points of the lower hull of loss over power, by rising power and falling loss.

    It begins with the point of least power and ends with the point of least loss.
    """
    kept: list[int] = []
    for index in np.lexsort((loss, power_w)).tolist():
        if kept and loss[index] >= loss[kept[-1]]:
            continue
        while len(kept) >= 2 and _is_above(kept[-2], kept[-1], index, power_w, loss):
            kept.pop()
        kept.append(index)
    return kept


def _is_above(first: int, middle: int, last: int, power_w: Floats, loss: Floats) -> bool:
    """Return whether the middle point is on or above the line between the others."""
    rise = (loss[middle] - loss[first]) * (power_w[last] - power_w[first])
    return bool(rise >= (loss[last] - loss[first]) * (power_w[middle] - power_w[first]))


def relax_one_feed(jobs: Sequence[Choices], limit_w: float) -> Relaxed:
    """Return the best mixture under one limit, which all jobs at their least power must be able to keep."""
    hulls = [lower_hull(job.power_w[:, 0], job.loss) for job in jobs]
    left_w = limit_w - sum(job.power_w[hull[0], 0] for job, hull in zip(jobs, hulls, strict=True))
    pieces = sorted(
        (
            (job.loss[after] - job.loss[before]) / (job.power_w[after, 0] - job.power_w[before, 0]),
            number,
            position,
        )
        for number, (job, hull) in enumerate(zip(jobs, hulls, strict=True))
        for position, (before, after) in enumerate(pairwise(hull))
    )
    shares: list[tuple[tuple[int, float], ...]] = [((hull[0], 1.0),) for hull in hulls]
    for _, number, position in pieces:
        before, after = hulls[number][position : position + 2]
        needed_w = jobs[number].power_w[after, 0] - jobs[number].power_w[before, 0]
        if needed_w > left_w:
            share = max(0.0, left_w / needed_w)
            if share:
                shares[number] = ((before, 1 - share), (after, share))
            break
        shares[number] = ((after, 1.0),)
        left_w -= needed_w
    return Relaxed(tuple(shares), _loss(jobs, shares))


def relax(jobs: Sequence[Choices], limits_w: Floats) -> Relaxed | None:
    """Return the best mixture under several limits `[F]`; None if no mixture keeps them."""
    model = _Model(jobs, limits_w)
    values = model.minimise(np.concatenate([job.loss for job in jobs]))
    if values is None:
        return None
    shares = [
        tuple((index, float(share)) for index, share in enumerate(own) if share > 1e-9)
        for own in model.by_job(values)
    ]
    return Relaxed(tuple(shares), _loss(jobs, shares))


def min_excess_w(jobs: Sequence[Choices], limits_w: Floats) -> Floats:
    """Return the excess over each limit `[F]` that minimises the sum over the feeds."""
    values = _Model(jobs, limits_w, with_excess=True).minimise(None)
    assert values is not None  # a large enough excess makes any choice feasible
    excess_w: Floats = np.maximum(0.0, values[-len(limits_w) :]) * _scale_w(limits_w)
    return excess_w


def _loss(jobs: Sequence[Choices], shares: Sequence[Sequence[tuple[int, float]]]) -> float:
    return float(sum(share * job.loss[k] for job, own in zip(jobs, shares, strict=True) for k, share in own))


def _scale_w(limits_w: Floats) -> Floats:
    """Return the watts that count as 1 in the program, whose tolerances are absolute."""
    return np.maximum(limits_w, 1.0)


class _Model:
    """The linear program: a column per job's point, a row per job (shares add up to 1) and per feed."""

    def __init__(self, jobs: Sequence[Choices], limits_w: Floats, *, with_excess: bool = False) -> None:
        self._sizes = [len(job.loss) for job in jobs]
        self._feed_count = len(limits_w) if with_excess else 0
        power = np.concatenate([job.power_w for job in jobs]) / _scale_w(limits_w)
        owner = np.repeat(np.arange(len(jobs)), self._sizes)
        starts, rows, values = [0], [], []
        for job, drawn in zip(owner.tolist(), power, strict=True):
            feeds = np.flatnonzero(drawn)
            rows += [job, *(len(jobs) + feeds).tolist()]
            values += [1.0, *drawn[feeds].tolist()]
            starts.append(len(rows))
        for feed in range(self._feed_count):
            rows.append(len(jobs) + feed)
            values.append(-1.0)
            starts.append(len(rows))
        self._columns = starts, rows, values
        self._row_lower = np.concatenate([np.ones(len(jobs)), np.full(len(limits_w), -np.inf)])
        self._row_upper = np.concatenate([np.ones(len(jobs)), limits_w / _scale_w(limits_w)])

    def by_job(self, values: Floats) -> list[Floats]:
        """Return the values of each job's columns."""
        return np.split(values[: sum(self._sizes)], np.cumsum(self._sizes)[:-1])

    def minimise(self, loss: Floats | None) -> Floats | None:
        """Return the columns' values of least loss, or least excess; None if infeasible."""
        import highspy  # importing takes a tenth of a second, and most coordinators have at most one feed

        starts, rows, values = self._columns
        column_count = len(starts) - 1
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = column_count, len(self._row_lower)
        excess_cost = np.ones(self._feed_count)
        program.col_cost_ = np.concatenate(
            [np.zeros(sum(self._sizes)) if loss is None else loss, excess_cost if loss is None else []]
        )
        program.col_lower_ = np.zeros(column_count)
        program.col_upper_ = np.full(column_count, np.inf)
        program.row_lower_, program.row_upper_ = self._row_lower, self._row_upper
        program.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        program.a_matrix_.start_ = np.array(starts)
        program.a_matrix_.index_ = np.array(rows)
        program.a_matrix_.value_ = np.array(values)
        solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("threads", 1)  # as all others: the first one decides for the process
        solver.passModel(program)
        solver.run()
        if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        return np.array(solver.getSolution().col_value)
