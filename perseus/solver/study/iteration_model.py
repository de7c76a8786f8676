"""Emulated iteration times as a function of lags and fixed times, and the parameters that match best.

An emulated iteration time is the longest path, so it is convex and piecewise linear in the unknowns: along
the critical path each unknown counts as often as the path passes it. The fit repeats least squares on these
counts around the critical paths of the last estimate (Gauss–Newton, damped as by Levenberg and Marquardt: a
step that makes the match worse is shortened).

Least squares of such times have local minima. Where light stages hide short lags, the gradient does not show
that long ones would match: fixed times take their place, and from there lags never grow. So one lag common to
all is first tried over its whole range, and the search also begins at each of its local optima, and at the
points reached from there by changing one boundary's lag after the other.

Measured iterations rarely identify all boundaries separately, and never the directions if an iteration begins
and ends on the same stage: its critical path crosses each boundary equally often in both directions. So each
lag is a share common to all boundaries of its direction plus an individual one, and a weak prior prefers
small ones: shares that the data do not determine stay common, and equal in both directions.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perseus.solver.computation import Computation, Kind
from perseus.solver.errors import SolverError
from perseus.solver.pipeline import MAX_TOTAL_TIME_S
from perseus.solver.scale import Scale
from perseus.solver.schedule import Schedule
from perseus.solver.study.critical_paths import CriticalPaths, Int64Array, Link
from perseus.solver.study.transfers import Transfers

FloatArray = NDArray[np.float64]

IN_PS = Scale()
"""Fits count in picoseconds."""

_ROUND_COUNT = 60
_SETTLED_GAIN = 1e-6
_FIRST_DAMPING = 1e-3

_PRIOR = 1e-6
"""Weight of a parameter as long as the iteration, against an iteration time in error by its whole length."""

_SCAN_COUNT = 24
"""Number of common lags to try, up to one with which iterations are too long without fixed times."""

_LAG_GRID = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5)
"""Lags to try for a boundary, as shares of the longest one."""

_WORTH_A_STEP = 0.99
"""A step on the lag grid has to reduce the loss to this share."""

_DESCENT_COUNT = 4
"""Number of end points of the descents from which the search starts, best first."""

_MAX_BATCH_SIZE = 2_000_000
"""Number of computations' times that are emulated together: 16 MB."""


class Estimate(NamedTuple):
    """Lags by link, the sought fixed times, and their loss: the sum of squared relative errors."""

    lags_s: Mapping[Link, float]
    fixed_times_s: Mapping[Computation, float]
    loss: float


class Match(NamedTuple):
    """The fit of some parameters to the iterations, and the critical paths under them."""

    parameters: FloatArray
    loss: float
    counts: FloatArray
    """Per iteration and unknown: how often the critical path passes it."""
    rest_s: FloatArray
    """Per iteration: the measured part of the critical path."""


class IterationModel:
    """The emulated iteration times as a function of parameters, with one kind of transfers.

    The unknowns are each sought fixed time and each link's lag. They are sums of the parameters, in units of
    the mean iteration time: each fixed time, the common lag of each direction, each link's own lag.

    ``times_s`` are the iterations' computation times. FIXED computations that are in none of them are sought.

    Raises:
        ScheduleError: transfers that occupy their stages would deadlock.
        SolverError: a time is impossible, or a computation has none.
    """

    def __init__(
        self,
        schedule: Schedule,
        times_s: Sequence[Mapping[Computation, float]],
        measured_s: Sequence[float],
        transfers: Transfers,
    ) -> None:
        self._paths = CriticalPaths(schedule, transfers)
        self._measured_s = np.array(measured_s)
        self._unit_s = float(self._measured_s.mean())
        computations = self._paths.computations
        self._sought = [
            row
            for row, c in enumerate(computations)
            if c.kind is Kind.FIXED and not any(c in one for one in times_s)
        ]
        sought_s = {computations[row]: 0.0 for row in self._sought}
        self._durations_ps = durations_ps(computations, [{**sought_s, **one} for one in times_s])
        links = self._paths.links
        common = [[link.is_activation, not link.is_activation] for link in links]
        fixed_count, link_count = len(self._sought), len(links)
        # Row by unknown, column by parameter: which parameters add up to it.
        self._made_of = np.zeros((fixed_count + link_count, fixed_count + 2 + link_count))
        self._made_of[:fixed_count, :fixed_count] = np.eye(fixed_count)
        self._made_of[fixed_count:, fixed_count : fixed_count + 2] = np.reshape(common, (-1, 2))
        self._made_of[fixed_count:, fixed_count + 2 :] = np.eye(link_count)

        # A parameter's prior is on the most that it could add to an iteration: its length times its
        # occurrences.
        occurrences = np.concatenate((np.ones(fixed_count), self._paths.occurrence_counts))
        self._prior = _PRIOR * (occurrences[:, None] * self._made_of).max(axis=0, initial=0) ** 2

    def coarse_to_fine(self) -> list[Estimate]:
        """Return the estimates without any lag, with one common lag per direction, and with all lags."""
        fixed_count, all_count = len(self._sought), self._made_of.shape[1]
        none = self.improved(self.match(np.zeros(all_count)), fixed_count)
        # With all free at once, lags would replace fixed times and not recover.
        common = [self.improved(start, fixed_count + 2) for start in (none, *self._scan())]
        fine = [self.improved(start, all_count) for start in (*common, *self._descend())]
        best = [min(some, key=lambda match: match.loss) for some in (common, fine)]
        return [self._estimate(match) for match in (none, *best)]

    # -------------------------------------------------------------- starting points

    def _scan(self) -> list[Match]:
        """Return matches of one lag for all transfers, at its local optima."""
        lags = np.linspace(0.0, self._longest_lag, _SCAN_COUNT + 1)
        losses = self._screen(np.repeat(lags[:, None], len(self._paths.links), axis=1))
        beside = np.concatenate(([np.inf], losses, [np.inf]))
        is_better = (losses < beside[:-2]) & (losses < beside[2:])
        common = np.concatenate((np.zeros(len(self._sought)), np.ones(2), np.zeros(len(self._paths.links))))
        return [self.match(lag * common) for lag in lags[is_better] if lag]

    def _descend(self) -> list[Match]:
        """Return matches that changing a single boundary's lag can't improve.

        The descent begins with one lag for all. Each step changes the lag that helps most: a boundary's lag
        in both directions, or in one, because of two transfers that occupy their stages together only the
        longer one counts.
        """
        boundaries = [tuple(sorted(link[1:])) for link in self._paths.links]
        is_of = np.array([[own == one for own in boundaries] for one in sorted(set(boundaries))])
        if len(is_of) < 2:
            return []
        is_of = np.concatenate((is_of, np.eye(len(boundaries), dtype=bool)))
        lag_grid_ps = self._longest_lag * np.array(_LAG_GRID)
        ends = []
        for lags in np.repeat(lag_grid_ps[:, None], len(boundaries), axis=1):
            loss = self._screen(lags[None])[0]
            while True:
                tried = np.where(is_of[:, None, :], lag_grid_ps[None, :, None], lags).reshape(-1, len(lags))
                losses = self._screen(tried)
                if losses.min() >= _WORTH_A_STEP * loss:
                    break
                loss, lags = losses.min(), tried[losses.argmin()]
            ends.append((loss, *lags.tolist()))
        none_common = np.zeros(len(self._sought) + 2)
        return [
            self.match(np.concatenate((none_common, lags))) for _, *lags in sorted(set(ends))[:_DESCENT_COUNT]
        ]

    @cached_property
    def _longest_lag(self) -> float:
        """The lag, in mean iteration times, with which iterations are too long without fixed times."""
        longest = 1 / len(self._paths.computations)
        while (
            len(self._paths.links)
            and self._lengths_s(np.full((1, len(self._paths.links)), longest)).mean() < self._unit_s
        ):
            longest *= 2
        return longest

    def _screen(self, lags: FloatArray) -> FloatArray:
        """Return the losses of some lags (one row each) with the best fixed time, treating it as critical."""
        shares = self._lengths_s(lags) / self._measured_s
        if self._sought:
            weights = 1 / self._measured_s
            shares += np.maximum(0.0, (1 - shares) @ weights / (weights @ weights))[:, None] * weights
        losses: FloatArray = ((shares - 1) ** 2).sum(axis=1)
        return losses

    def _lengths_s(self, lags: FloatArray) -> FloatArray:
        """Return the iteration times with some lags (one row each) and sought times of 0."""
        count = len(self._measured_s)
        at_once = max(1, _MAX_BATCH_SIZE // self._durations_ps.size)
        some = [lags[n : n + at_once] for n in range(0, len(lags), at_once)]
        lengths_ps = [
            self._paths.lengths_ps(
                np.tile(self._durations_ps, len(rows)),
                np.rint(rows * (self._unit_s * IN_PS.ps_per_s)).astype(np.int64).T.repeat(count, axis=1),
            )
            for rows in some
        ]
        lengths_s: FloatArray = np.concatenate(lengths_ps).reshape(-1, count) / IN_PS.ps_per_s
        return lengths_s

    # -------------------------------------------------------------- refinement

    def match(self, parameters: FloatArray) -> Match:
        """Emulate all iterations with these parameters."""
        unknowns_s = self._made_of @ parameters * self._unit_s
        unknowns_ps = np.array([IN_PS.to_ps(unknown_s) for unknown_s in unknowns_s.tolist()], np.int64)
        fixed_count = len(self._sought)
        self._durations_ps[self._sought] = unknowns_ps[:fixed_count, None]
        path = self._paths.critical(self._durations_ps, unknowns_ps[fixed_count:], self._sought)
        self._durations_ps[self._sought] = 0
        counts = np.concatenate((path.sought_counts, path.link_counts), axis=1)
        rest_s = (path.lengths_ps - counts @ unknowns_ps) / IN_PS.ps_per_s
        errors = (rest_s + counts @ unknowns_s) / self._measured_s - 1
        loss = float(errors @ errors + self._prior @ parameters**2)
        return Match(parameters, loss, counts.astype(np.float64), rest_s)

    def improved(self, match: Match, free_count: int) -> Match:
        """Return the best match found from this one, with the first ``free_count`` parameters free."""
        damping = _FIRST_DAMPING
        for _ in range(_ROUND_COUNT if free_count else 0):
            tried = self.match(self._step(match, free_count, damping))
            if tried.loss < match.loss:
                gain = 1 - tried.loss / match.loss
                match, damping = tried, damping / 4
                if gain < _SETTLED_GAIN:
                    break
            else:
                damping *= 8
        return match

    def _step(self, match: Match, free_count: int, damping: float) -> FloatArray:
        """Return the best parameters for unchanged critical paths, near those of the match."""
        rows = (match.counts @ self._made_of * self._unit_s / self._measured_s[:, None])[:, :free_count]
        gram = rows.T @ rows + np.diag(self._prior[:free_count])
        held = damping * np.diag(gram)
        projected = rows.T @ (1 - match.rest_s / self._measured_s) + held * match.parameters[:free_count]
        parameters = match.parameters.copy()
        parameters[:free_count] = non_negative_solution(gram + np.diag(held), projected)
        return parameters

    def _estimate(self, match: Match) -> Estimate:
        """Convert parameters to lags and fixed times."""
        unknowns_s = (self._made_of @ match.parameters * self._unit_s).tolist()
        sought = [self._paths.computations[row] for row in self._sought]
        lags_s = dict(zip(self._paths.links, unknowns_s[len(sought) :], strict=True))
        return Estimate(lags_s, dict(zip(sought, unknowns_s, strict=False)), match.loss)


def durations_ps(
    computations: Sequence[Computation], times_s: Sequence[Mapping[Computation, float]]
) -> Int64Array:
    """Return the times in ps: one row per computation, one column per iteration.

    Raises:
        SolverError: a time is impossible, a computation has none, or all take longer than MAX_TOTAL_TIME_S.
    """
    rows = [[_time_ps(one, c) for one in times_s] for c in computations]
    for total_ps in map(sum, zip(*rows, strict=True)):
        if total_ps > MAX_TOTAL_TIME_S * IN_PS.ps_per_s:
            raise SolverError(
                f"times_s: expected computations of at most {MAX_TOTAL_TIME_S:g} s together, "
                f"found {total_ps / IN_PS.ps_per_s:g} s"
            )
    return np.array(rows, np.int64)


def _time_ps(times_s: Mapping[Computation, float], c: Computation) -> int:
    time_s = times_s.get(c)
    if time_s is None or not (math.isfinite(time_s) and time_s >= 0):
        found = "none" if time_s is None else time_s
        raise SolverError(f"{c}: expected a finite time of 0 s or more, found {found}", computation=c)
    return IN_PS.to_ps(time_s)


def non_negative_solution(gram: FloatArray, projected: FloatArray) -> FloatArray:
    """Return the x ≥ 0 that minimises x·gram·x / 2 − projected·x (Lawson and Hanson's active set).

    ``gram`` is positive definite.
    """
    solution = np.zeros(len(projected))
    free = np.zeros(len(projected), dtype=bool)
    tolerance = 1e-12 * np.abs(projected).max()
    # No set of free ones repeats, and in practice each joins once or twice. Rounding could make one that
    # gains next to nothing join and leave forever.
    for _ in range(10 * len(projected)):
        gains = np.where(free, -np.inf, projected - gram @ solution)
        best = int(gains.argmax())
        if gains[best] <= tolerance:
            break
        free[best] = True
        while True:
            target = np.zeros(len(projected))
            target[free] = np.linalg.solve(gram[np.ix_(free, free)], projected[free])
            negative = free & (target < 0)
            if not negative.any():
                solution = target
                break
            # Move towards the target until the first of them reaches 0, and hold it there.
            shares = solution[negative] / (solution[negative] - target[negative])
            first = np.flatnonzero(negative)[shares.argmin()]
            solution = solution + shares.min() * (target - solution)
            solution[first] = 0.0
            free &= solution > 0
    return solution
