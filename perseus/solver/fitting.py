"""Fitting what the computations alone don't explain: lags between stages, and fixed-time computations.

Measured iterations take longer than their computations: activations and gradients travel, data is loaded,
the optimizer steps. From iterations under several plans, each with the times that its computations took,
non-negative lags (per stage boundary and direction) and fixed times are found under which the emulated
iteration times match the measured ones.

An emulated iteration time is the longest path, so it is convex and piecewise linear in what is sought: along
the critical path each unknown counts as often as the path passes it. Least squares on these counts, again
and again around the critical paths of the last estimate (Gauss–Newton, damped as by Levenberg and Marquardt:
a step that makes the match worse is shortened).

Measured iterations rarely tell all boundaries apart, and never the directions where an iteration begins and
ends on the same stage: its critical path crosses each boundary as often one way as the other. So each lag is
a share common to all boundaries of its direction plus one of its own, and a weak prior prefers small ones:
what the data do not tell stays common, and half and half.

Where something else than lags makes iterations long (a transfer that waits for another one, a host that is
too slow), lags can still be found that match what was measured, and mean nothing. So each fit is held against
iterations that it has not seen: finer lags are only taken where they foretell these better than coarser ones,
and none at all where even the best foretell them badly. By how much a fit is mistaken is part of it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perseus.solver.computation import Computation, Kind
from perseus.solver.errors import SolverError
from perseus.solver.graph import Dependency
from perseus.solver.plan import critical_path, earliest_finishes_ps
from perseus.solver.profile import PS_PER_S, to_ps
from perseus.solver.schedule import Schedule

FloatArray = NDArray[np.float64]

_ROUND_COUNT = 60
_SETTLED_GAIN = 1e-6
_FIRST_DAMPING = 1e-3

EXPLAINED_WITHIN = 0.02
"""The error, as a share of the iteration time, up to which fitted times explain what was measured."""

_LEAST_FORETOLD = 4
"""Iterations of which one half can be held against what was fitted to the other."""

_WORTH = 0.9
"""Finer lags have to bring the error down to this share of that with coarser ones."""

_PRIOR = 1e-6
"""How much a parameter as long as the iteration weighs against an iteration mistaken by its whole time."""


@dataclass(frozen=True, slots=True)
class MeasuredIteration:
    """What one iteration took.

    Attributes:
        times_s: the time of each computation. A FIXED one that is not among them is sought.
        iteration_time_s: from the first start to the last end.
    """

    times_s: Mapping[Computation, float]
    iteration_time_s: float


@dataclass(frozen=True, slots=True)
class FittedTimes:
    """Lags by (sending stage, receiving stage) and times of FIXED computations, as a pipeline takes them.

    Attributes:
        residuals: of each iteration that was fitted, by what share the emulated one is longer than measured.
        error: the root mean square of this share, of iterations that were not fitted to; of those that were,
            where there are too few.
    """

    activation_lags_s: Mapping[tuple[int, int], float]
    gradient_lags_s: Mapping[tuple[int, int], float]
    fixed_times_s: Mapping[Computation, float]
    residuals: tuple[float, ...] = field(default=(), compare=False)
    error: float = field(default=0.0, compare=False)

    @property
    def explains(self) -> bool:
        """Whether these times explain what was measured; otherwise there are no lags among them."""
        return self.error <= EXPLAINED_WITHIN


def fit_times(schedule: Schedule, iterations: Sequence[MeasuredIteration]) -> FittedTimes:
    """Fit the lags, and the times of the FIXED computations that are not measured. None is negative.

    Where that does not explain the iterations (`FittedTimes.explains`), lags are 0: they would mean nothing.

    Raises:
        SolverError: there is no iteration, a time is impossible, or a computation has none.
    """
    if not iterations:
        raise SolverError("iterations: expected at least one, found none")
    candidates = _fit_coarse_to_fine(schedule, iterations)
    errors = _errors(schedule, iterations, candidates)
    chosen = 0
    for finer in range(1, len(candidates)):
        if errors[finer] <= _WORTH * errors[chosen]:
            chosen = finer
    error = errors[chosen]
    if error > EXPLAINED_WITHIN:
        chosen = 0
    fitted = candidates[chosen]
    return replace(fitted, residuals=tuple(_residuals(schedule, iterations, fitted)), error=error)


def _errors(
    schedule: Schedule, iterations: Sequence[MeasuredIteration], fits: Sequence[FittedTimes]
) -> list[float]:
    """Return by how much each fit, from coarse to fine, is mistaken about iterations unknown to it."""
    if len(iterations) < _LEAST_FORETOLD:
        return [_root_mean_square(_residuals(schedule, iterations, fitted)) for fitted in fits]
    missed: list[list[float]] = [[] for _ in fits]
    halves = iterations[::2], iterations[1::2]
    for seen, unseen in (halves, halves[::-1]):
        for own, fitted in zip(missed, _fit_coarse_to_fine(schedule, seen), strict=True):
            own += _residuals(schedule, unseen, fitted)
    return [_root_mean_square(own) for own in missed]


def _residuals(
    schedule: Schedule, iterations: Sequence[MeasuredIteration], fitted: FittedTimes
) -> list[float]:
    return [
        emulated_iteration_time_s(schedule, one.times_s, fitted) / one.iteration_time_s - 1
        for one in iterations
    ]


def _root_mean_square(shares: Sequence[float]) -> float:
    return math.sqrt(math.fsum(share**2 for share in shares) / len(shares))


def _fit_coarse_to_fine(schedule: Schedule, iterations: Sequence[MeasuredIteration]) -> list[FittedTimes]:
    """Return the fits without any lag, with one lag common to each direction, and with all of them."""
    model = _Model(schedule, iterations)
    matched = model.match(np.zeros(model.parameter_count))
    fits = []
    # From coarse to fine: with all free at once, lags would stand in for fixed times and find no way back.
    for free in model.coarse_to_fine():
        damping = _FIRST_DAMPING
        for _ in range(_ROUND_COUNT if len(free) else 0):
            tried = model.match(model.improve(matched, free, damping))
            if tried.loss < matched.loss:
                gain = 1 - tried.loss / matched.loss
                matched, damping = tried, damping / 4
                if gain < _SETTLED_GAIN:
                    break
            else:
                damping *= 8
        fits.append(model.fitted(matched.parameters))
    return fits


def emulated_iteration_time_s(
    schedule: Schedule, times_s: Mapping[Computation, float], fitted: FittedTimes
) -> float:
    """Return what an iteration takes whose computations take ``times_s``, with the fitted lags and times.

    Raises:
        SolverError: a time is impossible, or a computation has none.
    """
    computations, arcs = _order(schedule)
    known_s = {**fitted.fixed_times_s, **times_s}
    dependencies: list[Dependency] = []
    for earlier, later in arcs:
        sender, receiver = computations[earlier], computations[later]
        lags_s = fitted.activation_lags_s if receiver.kind is Kind.FORWARD else fitted.gradient_lags_s
        lag_s = lags_s.get((sender.stage, receiver.stage), 0.0)
        dependencies.append(Dependency(earlier, later, to_ps(lag_s)))
    durations_ps = [_time_ps(known_s, c) for c in computations]
    return max(earliest_finishes_ps(dependencies, durations_ps)) / PS_PER_S


class _Link(NamedTuple):
    """Where activations (or gradients) travel."""

    is_activation: bool
    sender: int
    receiver: int


class _Match(NamedTuple):
    """How well some parameters explain the iterations, and what is critical under them."""

    parameters: FloatArray
    loss: float
    counts: FloatArray
    """Per iteration and unknown: how often the critical path passes it."""
    rest_s: FloatArray
    """Per iteration: what is measured of the critical path."""


class _Model:
    """The emulated iteration times as a function of parameters.

    Unknown are each sought fixed time and each link's lag. The parameters that they are made of, in units of
    the mean iteration time: each fixed time, the common lag of each direction, each link's own lag.

    Slots say which unknown a computation or an arc takes the time of: 0 for none, k + 1 for unknown k.
    """

    def __init__(self, schedule: Schedule, iterations: Sequence[MeasuredIteration]) -> None:
        self._computations, self._arcs = _order(schedule)
        self._measured_s = np.array([_iteration_time_s(n, one) for n, one in enumerate(iterations)])
        self._unit_s = float(self._measured_s.mean())
        measured = [one.times_s for one in iterations]
        self._fixed = [
            c for c in self._computations if c.kind is Kind.FIXED and not any(c in one for one in measured)
        ]
        sought_s = dict.fromkeys(self._fixed, 0.0)
        self._durations_ps = [
            [_time_ps({**sought_s, **one}, c) for c in self._computations] for one in measured
        ]
        link_of = {arc: self._link(*arc) for arc in self._arcs}
        self._links = sorted({link for link in link_of.values() if link})
        slot_of = {unknown: k + 1 for k, unknown in enumerate((*self._fixed, *self._links))}
        self._computation_slots = [slot_of.get(c, 0) for c in self._computations]
        self._arc_slots = {arc: slot_of[link] if link else 0 for arc, link in link_of.items()}
        common = [[link.is_activation, not link.is_activation] for link in self._links]
        fixed_count, link_count = len(self._fixed), len(self._links)
        # Row by unknown, column by parameter: what it is made of.
        self._made_of = np.zeros((fixed_count + link_count, fixed_count + 2 + link_count))
        self._made_of[:fixed_count, :fixed_count] = np.eye(fixed_count)
        self._made_of[fixed_count:, fixed_count : fixed_count + 2] = np.reshape(common, (-1, 2))
        self._made_of[fixed_count:, fixed_count + 2 :] = np.eye(link_count)

        # A parameter's prior is on all that it could add to an iteration: its length, as often as it occurs.
        occurrences = np.bincount(
            [*self._computation_slots, *self._arc_slots.values()], minlength=len(slot_of) + 1
        )[1:]
        self._prior = _PRIOR * (occurrences[:, None] * self._made_of).max(axis=0, initial=0) ** 2

    @property
    def parameter_count(self) -> int:
        return self._made_of.shape[1]

    def match(self, parameters: FloatArray) -> _Match:
        """Emulate all iterations."""
        unknowns_s = self._made_of @ parameters * self._unit_s
        slots_ps = [0, *(to_ps(unknown_s) for unknown_s in unknowns_s)]
        dependencies = [Dependency(*arc, slots_ps[self._arc_slots[arc]]) for arc in self._arcs]
        counts = np.zeros((len(self._durations_ps), len(slots_ps)))
        rest_s = np.zeros(len(self._durations_ps))
        for n, measured_ps in enumerate(self._durations_ps):
            durations_ps = [measured_ps[i] + slots_ps[slot] for i, slot in enumerate(self._computation_slots)]
            path = critical_path(dependencies, durations_ps)
            slots = [self._computation_slots[i] for i in path]
            slots += [self._arc_slots[arc] for arc in pairwise(path)]
            counts[n] = np.bincount(slots, minlength=len(slots_ps))
            rest_s[n] = sum(measured_ps[i] for i in path) / PS_PER_S
        counts = counts[:, 1:]
        errors = (rest_s + counts @ unknowns_s) / self._measured_s - 1
        return _Match(parameters, float(errors @ errors + self._prior @ parameters**2), counts, rest_s)

    def coarse_to_fine(self) -> Iterator[NDArray[np.intp]]:
        """Yield which parameters to fit: the fixed times, then the common lags too, then all."""
        for count in (len(self._fixed), len(self._fixed) + 2, self.parameter_count):
            yield np.arange(count)

    def improve(self, match: _Match, free: NDArray[np.intp], damping: float) -> FloatArray:
        """Return the best parameters while the critical paths stay, not far from those of the match."""
        rows = (match.counts @ self._made_of * self._unit_s / self._measured_s[:, None])[:, free]
        gram = rows.T @ rows + np.diag(self._prior[free])
        held = damping * np.diag(gram)
        projected = rows.T @ (1 - match.rest_s / self._measured_s) + held * match.parameters[free]
        parameters = match.parameters.copy()
        parameters[free] = _non_negative_solution(gram + np.diag(held), projected)
        return parameters

    def fitted(self, parameters: FloatArray) -> FittedTimes:
        """Say what the parameters mean."""
        unknowns_s = (self._made_of @ parameters * self._unit_s).tolist()
        lags_s = dict(zip(self._links, unknowns_s[len(self._fixed) :], strict=True))
        return FittedTimes(
            activation_lags_s={link[1:]: lag_s for link, lag_s in lags_s.items() if link.is_activation},
            gradient_lags_s={link[1:]: lag_s for link, lag_s in lags_s.items() if not link.is_activation},
            fixed_times_s=dict(zip(self._fixed, unknowns_s, strict=False)),
        )

    def _link(self, earlier: int, later: int) -> _Link | None:
        sender, receiver = self._computations[earlier], self._computations[later]
        if sender.stage == receiver.stage:
            return None
        return _Link(receiver.kind is Kind.FORWARD, sender.stage, receiver.stage)


def _order(schedule: Schedule) -> tuple[list[Computation], list[tuple[int, int]]]:
    """Return the computations, each after all that it waits for, and the sorted arcs between them."""
    arcs = [pair for order in schedule.orders for pair in pairwise(order)] + list(schedule.dependencies)
    sorter: TopologicalSorter[Computation] = TopologicalSorter(dict.fromkeys(schedule.computations, ()))
    for earlier, later in arcs:
        sorter.add(later, earlier)
    computations = list(sorter.static_order())
    index_of = {c: i for i, c in enumerate(computations)}
    return computations, sorted((index_of[earlier], index_of[later]) for earlier, later in arcs)


def _iteration_time_s(n: int, iteration: MeasuredIteration) -> float:
    time_s = iteration.iteration_time_s
    if not (math.isfinite(time_s) and time_s > 0):
        raise SolverError(f"iteration {n}: expected a positive, finite iteration_time_s, found {time_s}")
    return time_s


def _time_ps(times_s: Mapping[Computation, float], c: Computation) -> int:
    time_s = times_s.get(c)
    if time_s is None or not (math.isfinite(time_s) and time_s >= 0):
        found = "none" if time_s is None else time_s
        raise SolverError(f"{c}: expected a finite time of 0 s or more, found {found}", computation=c)
    return to_ps(time_s)


def _non_negative_solution(gram: FloatArray, projected: FloatArray) -> FloatArray:
    """Return the x ≥ 0 that minimises x·gram·x / 2 − projected·x (Lawson and Hanson's active set).

    ``gram`` is positive definite.
    """
    solution = np.zeros(len(projected))
    free = np.zeros(len(projected), dtype=bool)
    tolerance = 1e-12 * np.abs(projected).max()
    # Each set of free ones comes once, and in practice each joins once or twice. Rounding could make one that
    # gains next to nothing come and go for ever.
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
            # Go towards the target until the first of them reaches 0, and hold it there.
            shares = solution[negative] / (solution[negative] - target[negative])
            first = np.flatnonzero(negative)[shares.argmin()]
            solution = solution + shares.min() * (target - solution)
            solution[first] = 0.0
            free &= solution > 0
    return solution
