"""Plans that keep their iteration time although computations vary.

A plan on mean times leaves no slack. Where a computation then takes longer than its mean, because of longer
sequences, busier experts or the machine, it delays the iteration, and at a low clock more so than at stock:
with microbatches that vary by 10 %, plans meant to be as fast as stock were 3 to 6 % slower (emulated).

So plans are replayed on iterations as they were seen (`Variation`). While the mean of these takes longer than
is allowed, the computations that are critical in them get higher clocks, those first that gain the most time
for their energy.

What is allowed beyond stock is what was planned beyond it: the mean at stock varies, too, and its excess over
the stock iteration of mean times is no plan's fault. Plans fit the iterations that were seen better than
others, so a standard error is kept as a reserve.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from perseus.solver.columns import Columns, earliest_of
from perseus.solver.graph import EventGraph, Int64Array
from perseus.solver.pipeline import Pipeline
from perseus.solver.plan import Plan, fastest_clock_plan, replay

FloatArray = NDArray[np.float64]

_NEGLIGIBLE = 0.003

_STEP_SHARE = 0.5
"""Share of the excess that one step removes if nothing else becomes critical."""


@dataclass(frozen=True, slots=True, eq=False)
class Variation:
    """How computations varied, in iterations that were seen.

    Attributes:
        factors: shape (iterations, pipelines, computations): each computation's time relative to the mean of
            its kind at its clock. Computations are in the order of `Schedule.computations`. The pipelines of
            an iteration wait for each other.
    """

    factors: NDArray[np.float32]

    @property
    def spread(self) -> float:
        """The standard deviation of the factors."""
        return float(self.factors.std())

    @property
    def is_negligible(self) -> bool:
        """Whether plans on mean times hold: within 0.2 %."""
        return self.spread <= _NEGLIGIBLE


def hastened(
    pipeline: Pipeline,
    graph: EventGraph,
    plan: Plan,
    variation: Variation,
    deadline_s: float,
    *,
    in_runs: bool,
) -> Plan:
    """Return the plan, or one whose iterations take at most `deadline_s` on average, as far as clocks allow.

    The `iteration_time_s` of such a plan is that mean, on the scale of mean times. `in_runs`: consecutive
    computations with the same clock keep a common one, as GPUs with a set latency need it. `graph` is the
    event graph of `pipeline`.
    """
    return _Search(pipeline, graph, variation).hastened(plan, deadline_s, in_runs=in_runs)


class _Search:
    """Clocks of one pipeline's computations; rows as in `Columns`, one column per pipeline and iteration."""

    def __init__(self, pipeline: Pipeline, graph: EventGraph, variation: Variation) -> None:
        self._pipeline = pipeline
        self._columns = Columns(graph)
        self._computations = [graph.computations[i] for i in self._columns.computation_of.tolist()]
        place_of = {c: place for place, c in enumerate(pipeline.schedule.computations)}
        factors = variation.factors[:, :, [place_of[c] for c in self._computations]]
        self._iteration_count, self._pipeline_count, _ = factors.shape
        self._factors: FloatArray = factors.reshape(-1, len(self._computations)).T.astype(np.float64)
        self._clocks: list[list[int]] = []
        """By row, all clocks, rising; none for a computation of fixed time."""
        self._times_ps: list[list[int]] = []
        self._energies_j: list[list[float]] = []
        for c in self._computations:
            measured = sorted(
                pipeline.profiles.get((c.stage, c.chunk, c.kind), ()), key=lambda m: m.clock_mhz
            )
            power_w = pipeline.blocking_power_w[c.stage]
            self._clocks.append([m.clock_mhz for m in measured])
            to_ps = pipeline.scale.to_ps
            self._times_ps.append(
                [max(1, to_ps(m.time_s)) for m in measured] or [to_ps(pipeline.fixed_times_s[c])]
            )
            self._energies_j.append([m.energy_j - power_w * m.time_s for m in measured] or [0.0])

    def hastened(self, plan: Plan, deadline_s: float, *, in_runs: bool) -> Plan:
        stock = fastest_clock_plan(self._pipeline)
        to_ps = self._pipeline.scale.to_ps
        at_stock_ps = self._times_of_iterations_ps(self._chosen(stock))
        allowed_ps = to_ps(deadline_s) - to_ps(stock.iteration_time_s)
        chosen, groups = self._chosen(plan), self._groups(plan, in_runs=in_runs)
        while True:
            beyond_ps = self._times_of_iterations_ps(chosen) - at_stock_ps
            missed_ps = float(beyond_ps.mean()) + _error_ps(beyond_ps) - allowed_ps
            raised = self._raised(chosen, groups, missed_ps) if missed_ps > 0 else None
            if raised is None:
                break
            chosen = raised
        if chosen == self._chosen(plan):
            return plan
        places = zip(self._computations, self._clocks, chosen, strict=True)
        found = replay(self._pipeline, {c: clocks[k] for c, clocks, k in places if clocks})
        mean_s = stock.iteration_time_s + self._pipeline.scale.to_s(round(float(beyond_ps.mean())))
        return replace(found, iteration_time_s=max(found.iteration_time_s, mean_s))

    def _chosen(self, plan: Plan) -> list[int]:
        """Return by row the index of the plan's clock."""
        clock_of = plan.clocks_mhz
        return [
            clocks.index(clock_of[c]) if clocks else 0
            for c, clocks in zip(self._computations, self._clocks, strict=True)
        ]

    def _groups(self, plan: Plan, *, in_runs: bool) -> list[list[int]]:
        """Return the rows that keep a common clock."""
        row_of = {c: row for row, c in enumerate(self._computations)}
        if not in_runs:
            return [[row_of[planned.computation]] for stage in plan.stages for planned in stage]
        return [
            [row_of[planned.computation] for planned in run]
            for stage in plan.stages
            for _, run in groupby(stage, key=lambda planned: planned.clock_mhz)
        ]

    def _durations_ps(self, chosen: Sequence[int]) -> Int64Array:
        times_ps = np.array([times[k] for times, k in zip(self._times_ps, chosen, strict=True)])
        return (times_ps[:, None] * self._factors).astype(np.int64)

    def _by_iteration(self, durations_ps: Int64Array) -> Int64Array:
        """Return each pipeline's time, shape (iterations, pipelines)."""
        times_ps: Int64Array = self._columns.earliest_finishes_ps(durations_ps).max(axis=0)
        return times_ps.reshape(self._iteration_count, self._pipeline_count)

    def _times_of_iterations_ps(self, chosen: Sequence[int]) -> Int64Array:
        """Return how long each iteration takes: as its slowest pipeline."""
        times_ps: Int64Array = self._by_iteration(self._durations_ps(chosen)).max(axis=1)
        return times_ps

    def _raised(
        self, chosen: Sequence[int], groups: Sequence[list[int]], excess_ps: float
    ) -> list[int] | None:
        """Return the choice with some critical groups at higher clocks; None if none gets faster."""
        shares = self._critical_shares(self._durations_ps(chosen)).tolist()
        critical = (group for group in groups if any(shares[row] for row in group))
        steps = [step for group in critical if (step := self._step(chosen, group, shares)) is not None]
        if not steps:
            return None
        found, wanted_ps = [*chosen], _STEP_SHARE * excess_ps
        for _, gain_ps, raised in sorted(steps, key=itemgetter(0, 1)):
            for row, k in raised.items():
                found[row] = k
            wanted_ps -= gain_ps
            if wanted_ps <= 0:
                break
        return found

    def _step(
        self, chosen: Sequence[int], group: Sequence[int], shares: Sequence[float]
    ) -> tuple[float, float, dict[int, int]] | None:
        """Return a group's energy per time gained, that time, and its choice, at its next useful clock."""
        clocks = [self._clocks[row] for row in group]
        for clock_mhz in clocks[0][chosen[group[0]] + 1 :]:
            if any(clock_mhz not in own for own in clocks):
                continue
            gain_ps = cost_j = 0.0
            raised = {row: own.index(clock_mhz) for row, own in zip(group, clocks, strict=True)}
            for row, k in raised.items():
                gain_ps += shares[row] * (self._times_ps[row][chosen[row]] - self._times_ps[row][k])
                cost_j += self._energies_j[row][k] - self._energies_j[row][chosen[row]]
            if gain_ps > 0:
                return cost_j / gain_ps, gain_ps, raised
        return None

    def _critical_shares(self, durations_ps: Int64Array) -> FloatArray:
        """Return by row how much the mean iteration gets shorter per time that its computation does."""
        columns, count = self._columns, self._iteration_count
        slowest = self._by_iteration(durations_ps).argmax(axis=1) + self._pipeline_count * np.arange(count)
        durations_ps, factors = durations_ps[:, slowest], self._factors[:, slowest]
        finishes_ps = columns.earliest_finishes_ps(durations_ps)
        starts_ps = np.empty_like(finishes_ps)
        starts_ps[-1] = finishes_ps.max(axis=0)
        critical = np.empty(durations_ps.shape, dtype=bool)
        for level in reversed(columns.levels):
            rows = level.rows
            latest_ps = earliest_of(starts_ps, level.after)
            critical[rows] = latest_ps == finishes_ps[rows]
            starts_ps[rows] = latest_ps - durations_ps[rows]
        shares: FloatArray = (critical * factors).mean(axis=1)
        return shares


def _error_ps(times_ps: Int64Array) -> float:
    """Return the standard error of the mean; 0 for a single one."""
    return float(times_ps.std(ddof=1)) / len(times_ps) ** 0.5 if len(times_ps) > 1 else 0.0
