"""Collects the iterations under one plan, for energy estimates from the counter. Pure.

A `Sampler` lives as long as a plan is in force; it receives the finished iterations and requests estimates
when they are due. `estimate` regresses the counter's windows (`energy.regression`) on them.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise
from statistics import fmean, median

import numpy as np

from perseus.agent.energy.counter import CounterChange
from perseus.agent.energy.regression import (
    Estimate,
    NotDetermined,
    PowerFit,
    Span,
    computation_energy_j,
    cumulative_energy_j,
    estimate_power,
    typical_duration_s,
)
from perseus.agent.link.computation import Computation, Kind
from perseus.agent.rank.messages import EnergyEstimate, EnergySample
from perseus.gpu import ClockEventReason
from perseus.work_exponent import WorkExponent

# Nothing is marked between iterations. A gap of at most this length holds no significant work and counts as
# waiting; the content of a longer one is unknown.
_NEGLIGIBLE_GAP_S = 0.001
# Multiple of the median gap up to which a gap holds the same as the others (an optimizer step, say).
_TYPICAL_GAP = 2.0
# An estimate is refreshed when the plan has been in force for this share longer than at the previous one.
_REFRESH_SHARE = 0.125
# And after this many more iterations in any case, because a plan's energy may change while it is in force.
_MAX_REFRESH = 1000
# Iterations from which on their means say more than single computations do, of which each has its own work.
_MIN_ITERATIONS = 4
# Memory limit if the counter hardly ever moves.
_MAX_PARTS = 32_768
# A smaller power is invalid.
_MIN_BLOCKING_W = 1e-3
# Most kinds of computations whose joint information is reported.
_MAX_JOINT_KEYS = 64

# Kind, chunk and clock (MHz, None for stock).
Key = tuple[Kind, int, int | None]


class _Other(Enum):
    """What else gets a power of its own, which is not reported."""

    GAP = auto()
    OFF_CLOCK_WAIT = auto()


@dataclass(frozen=True, slots=True)
class FinishedComputation:
    """A computation with both its edges. `is_pure`: the clock did not change while it ran.

    `waits_s`: (begin, end) of its waits for other ranks, in order of time.
    """

    computation: Computation
    begin_s: float
    end_s: float
    clock_mhz: int | None
    is_pure: bool
    waits_s: tuple[tuple[float, float], ...] = ()

    @property
    def duration_s(self) -> float:
        """Its computing time."""
        return max(0.0, sum(until_s - since_s for since_s, until_s in self.parts_s))

    @property
    def parts_s(self) -> list[tuple[float, float]]:
        """The (begin, end) of its computing parts."""
        if not self.waits_s:  # as nearly always, and estimates ask for thousands
            return [(self.begin_s, self.end_s)]
        edges_s = [self.begin_s, *(edge_s for wait_s in self.waits_s for edge_s in wait_s), self.end_s]
        return list(zip(edges_s[::2], edges_s[1::2], strict=True))

    @property
    def key(self) -> Key:
        """The key of which it is a sample."""
        return self.computation.kind, self.computation.chunk, self.clock_mhz


@dataclass(frozen=True, slots=True)
class FinishedIteration:
    """An iteration with both its edges. `is_regular`: it held the registered computations, all complete.

    `off_clock_s`: (begin, end) of waits at another clock than the plan's only one, in order of time. `work`:
    as stated or counted, 0 if unknown.
    """

    begin_s: float
    end_s: float
    computations: tuple[FinishedComputation, ...]
    is_regular: bool
    off_clock_s: tuple[tuple[float, float], ...] = ()
    work: float = 0.0

    @property
    def part_count(self) -> int:
        """The number of its computing parts."""
        computing = sum(1 + len(computation.waits_s) for computation in self.computations)
        return computing + len(self.off_clock_s)


@dataclass(frozen=True, slots=True)
class EstimateRequest:
    """The input of an energy estimate: at least one regular iteration, and the counter's changes.

    `clocks_mhz`: those of the plan; empty if unknown.
    """

    plan_version: int
    iterations: tuple[FinishedIteration, ...]
    changes: tuple[CounterChange, ...]
    clocks_mhz: frozenset[int | None] = frozenset()


class Sampler:
    """The finished iterations under one plan, in the order in which they ran."""

    def __init__(self, plan_version: int, clocks_mhz: Iterable[int | None] = ()) -> None:
        self.plan_version = plan_version
        self._clocks_mhz = frozenset(clocks_mhz)
        self._iterations: deque[FinishedIteration] = deque()
        self._part_count = 0
        self._iteration_count = 0
        self._estimated_count = 0

    def add(self, iteration: FinishedIteration) -> None:
        """Add the next finished iteration."""
        self._iterations.append(iteration)
        self._iteration_count += 1
        self._part_count += iteration.part_count
        while self._part_count > _MAX_PARTS or len(self._iterations) > _MAX_PARTS:
            self._forget_oldest()

    def estimate_request(self, changes: Sequence[CounterChange]) -> EstimateRequest | None:
        """Return a request for an estimate from the counter's changes, if one is due.

        Iterations that ended before the first change are dropped: the caller bounds memory by its changes.
        """
        if not changes:
            while len(self._iterations) > 1:
                self._forget_oldest()  # all future changes come later
            return None
        while self._iterations and self._iterations[0].end_s < changes[0].time_s:
            self._forget_oldest()
        refresh = min(self._estimated_count * _REFRESH_SHARE, _MAX_REFRESH)
        if self._iteration_count < self._estimated_count + refresh:
            return None
        self._estimated_count = self._iteration_count
        if not any(iteration.is_regular for iteration in self._iterations):
            return None
        return EstimateRequest(self.plan_version, tuple(self._iterations), tuple(changes), self._clocks_mhz)

    def _forget_oldest(self) -> None:
        self._part_count -= self._iterations.popleft().part_count


def estimate(request: EstimateRequest) -> EnergyEstimate | None:
    """Estimate the iterations' energy from the counter's windows, if there are enough of them."""
    regular = [iteration for iteration in request.iterations if iteration.is_regular]
    computations = [computation for iteration in regular for computation in iteration.computations]
    fit = _fit(request, regular)
    if isinstance(fit, NotDetermined):
        return None
    durations_s: dict[Key, list[float]] = {}
    for each in computations:
        if each.is_pure:
            durations_s.setdefault(each.key, []).append(each.duration_s)
    counts = {key: len(some) for key, some in durations_s.items()}
    work = fmean(iteration.work for iteration in regular) if all(each.work for each in regular) else 0.0
    if work and len(regular) >= _MIN_ITERATIONS:
        durations_s = _at_mean_work(regular, work)
    blocking = fit.blocking_power_w
    if blocking is not None and blocking.value < _MIN_BLOCKING_W:
        blocking = None  # few windows may yield impossible values
    typical_s = {key: typical_duration_s(some) for key, some in durations_s.items()}
    at_clock = {key: some for key, some in typical_s.items() if request.clocks_mhz == {key[2]}}
    if at_clock and None not in request.clocks_mhz:
        typical_s = at_clock  # until it was set, short computations of an iteration ran at stock
    determined = [key for key in fit.power_w if key in typical_s and typical_s[key].value > 0]
    undetermined: list[Key] = []
    information: tuple[float, ...] = ()
    information_vector: tuple[float, ...] = ()
    is_one_clock = len({clock_mhz for _, _, clock_mhz in typical_s}) == 1
    if (
        is_one_clock
        and len(typical_s) <= _MAX_JOINT_KEYS
        and all(some.value > 0 for some in typical_s.values())
    ):
        undetermined = [key for key in typical_s if key not in fit.power_w]
        joint = fit.joint.of([*determined, *undetermined])
        information = tuple(joint.matrix[np.tril_indices(len(joint.vector))].tolist())
        information_vector = tuple(joint.vector.tolist())
    return EnergyEstimate(
        plan_version=request.plan_version,
        iteration_count=len(regular),
        samples=tuple(_sample(key, counts[key], typical_s[key], fit.power_w[key]) for key in determined),
        blocking_power_w=blocking.value if blocking else None,
        blocking_power_se_w=blocking.standard_error if blocking else 0.0,
        window_count=fit.window_count,
        discarded_window_count=fit.dropped_window_count,
        undetermined=tuple(
            _sample(key, counts[key], typical_s[key], Estimate(0.0, 0.0)) for key in undetermined
        ),
        power_information=information,
        power_information_vector=information_vector,
        work=work,
    )


def _at_mean_work(regular: Sequence[FinishedIteration], work: float) -> dict[Key, list[float]]:
    """Return each kind's mean duration in every iteration, as it would be at the mean work.

    Only an iteration's whole work is known, so its computations count together. How durations follow it is
    their regression on it: some models' do, others' inputs vary and their durations do not.
    """
    means_s: dict[Key, list[tuple[float, float]]] = {}
    for iteration in regular:
        own_s: dict[Key, list[float]] = {}
        for each in iteration.computations:
            if each.is_pure and each.duration_s > 0:
                own_s.setdefault(each.key, []).append(each.duration_s)
        for key, some in own_s.items():
            means_s.setdefault(key, []).append((iteration.work, fmean(some)))
    exponent = WorkExponent()
    for points in means_s.values():
        exponent.begin_group()
        for point in points:
            exponent.add(*point)
    return {
        key: [mean_s * (work / its_work) ** exponent.value for its_work, mean_s in points]
        for key, points in means_s.items()
    }


def _fit(
    request: EstimateRequest, regular: Sequence[FinishedIteration]
) -> PowerFit[Key | _Other] | NotDetermined:
    """Regress the counter's windows on the pure ones of the regular iterations' computations.

    After its last computation a GPU waits at stock, so these waits have a power of their own. What it does in
    the gaps between iterations is unknown. If hardly any window is without a gap, typical gaps get a power of
    their own, too.
    """
    computations = [computation for iteration in regular for computation in iteration.computations]
    pure = [computation for computation in computations if computation.is_pure]
    spans: list[Span[Key | _Other]] = [Span(each.key, *part_s) for each in pure for part_s in each.parts_s]
    waits_s = [wait_s for iteration in regular for wait_s in iteration.off_clock_s]
    if waits_s:
        spans += [Span(_Other.OFF_CLOCK_WAIT, *wait_s) for wait_s in waits_s]
        spans.sort(key=lambda span: span.begin_s)
    unknown = [(each.begin_s, each.end_s) for each in computations if not each.is_pure]
    unknown += [(each.begin_s, each.end_s) for each in request.iterations if not each.is_regular]
    gaps_s = [
        (before.end_s, after.begin_s)
        for before, after in pairwise(request.iterations)
        if after.begin_s - before.end_s > _NEGLIGIBLE_GAP_S
    ]
    begin_s, end_s = request.iterations[0].begin_s, request.iterations[-1].end_s
    fit = estimate_power(request.changes, spans, begin_s=begin_s, end_s=end_s, unknown=[*unknown, *gaps_s])
    if not gaps_s or fit.window_count >= fit.dropped_window_count:
        return fit
    longest_s = _TYPICAL_GAP * median(until_s - since_s for since_s, until_s in gaps_s)
    for since_s, until_s in gaps_s:
        if until_s - since_s <= longest_s:
            spans.append(Span(_Other.GAP, since_s, until_s))
        else:
            unknown.append((since_s, until_s))
    spans.sort(key=lambda span: span.begin_s)
    through = estimate_power(request.changes, spans, begin_s=begin_s, end_s=end_s, unknown=unknown)
    return through if through.window_count > fit.window_count else fit


def _sample(key: Key, count: int, duration_s: Estimate, power_w: Estimate) -> EnergySample:
    kind, chunk, clock_mhz = key
    energy_j = computation_energy_j(power_w, duration_s)
    return EnergySample(
        kind=kind,
        chunk=chunk,
        clock_mhz=clock_mhz,
        computation_count=count,
        time_s=duration_s.value,
        time_se_s=duration_s.standard_error,
        energy_j=energy_j.value,
        energy_se_j=energy_j.standard_error,
    )


def energy_at_j(changes: Sequence[CounterChange], time_s: float) -> float | None:
    """Return the counter's value at a moment, extrapolated beyond the last change at the last window's power.

    None before the first change, and without a window.
    """
    energy_j = cumulative_energy_j(changes, time_s)
    if energy_j is not None or len(changes) < 2 or time_s < changes[-1].time_s:
        return energy_j
    before, last = changes[-2:]
    power_w = (last.energy_j - before.energy_j) / (last.time_s - before.time_s)
    return last.energy_j + power_w * (time_s - last.time_s)


def throttling(changes: Sequence[CounterChange], begin_s: float, end_s: float) -> tuple[int, int]:
    """Return the reasons (`ClockEventReason`) for which the GPU was throttled between two moments.

    The second value is the highest clock that it reached under throttling, MHz; 0 if it was not throttled.

    Both come from the counter's windows, so throttling up to one window before or after counts, too.
    """
    reasons = clock_mhz = 0
    for before, change in pairwise(changes):
        if before.time_s < end_s and change.time_s > begin_s:
            reasons |= change.clock_event_reasons
            clock_mhz = max(clock_mhz, change.capped_clock_mhz)
    return reasons & ClockEventReason.THROTTLED, clock_mhz
