"""Many plans of one pipeline, compact and quick to look up: columns, one row per plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise, repeat

import numpy as np
from numpy.typing import NDArray

from perseus.solver.columns import Columns
from perseus.solver.computation import Computation, Kind
from perseus.solver.graph import EventGraph
from perseus.solver.pipeline import Pipeline
from perseus.solver.plan import Plan, PlannedComputation
from perseus.solver.setting import further_of
from perseus.solver.waiting import below_searched_j

_PLANNED = partial(tuple.__new__, PlannedComputation)


@dataclass(frozen=True, slots=True, eq=False)
class PlanTable:
    """Plans over the same computations.

    Attributes:
        computations: stage by stage, as in every plan.
        stage_sizes: computations per stage.
        iteration_times_s, effective_energies_j: one per plan.
        blocking_power_w: of all GPUs together at stock, the same for all plans.
        clocks_mhz, starts_s, durations_s: one row per plan, one column per computation.
        further: the same for further settings; None if there are none.
    """

    computations: Sequence[Computation]
    stage_sizes: Sequence[int]
    iteration_times_s: Sequence[float]
    effective_energies_j: Sequence[float]
    blocking_power_w: float
    clocks_mhz: NDArray[np.int32]
    starts_s: NDArray[np.float64]
    durations_s: NDArray[np.float64]
    further: NDArray[np.object_] | None = None

    def plan(self, row: int) -> Plan:
        """Return one of the plans."""
        fields = zip(
            self.computations,
            self.clocks_mhz[row].tolist(),
            self.starts_s[row].tolist(),
            self.durations_s[row].tolist(),
            repeat((), len(self.computations)) if self.further is None else self.further[row],
            strict=True,
        )
        # The same as calling PlannedComputation, at half the cost: look-ups must be fast.
        planned = tuple(map(_PLANNED, fields))
        ends = accumulate(self.stage_sizes, initial=0)
        return Plan(
            iteration_time_s=self.iteration_times_s[row],
            effective_energy_j=self.effective_energies_j[row],
            blocking_power_w=self.blocking_power_w,
            stages=tuple(planned[begin:end] for begin, end in pairwise(ends)),
        )


class PlanTableRecorder:
    """Records plans of one pipeline one by one, so that callers need not keep them."""

    def __init__(self, example: Plan) -> None:
        self._example = example
        self._iteration_times_s: list[float] = []
        self._effective_energies_j: list[float] = []
        self._clocks_mhz: list[NDArray[np.int32]] = []
        self._starts_s: list[NDArray[np.float64]] = []
        self._durations_s: list[NDArray[np.float64]] = []

    def record(self, plan: Plan) -> None:
        """Add a plan."""
        planned = list(chain.from_iterable(plan.stages))
        self._iteration_times_s.append(plan.iteration_time_s)
        self._effective_energies_j.append(plan.effective_energy_j)
        self._clocks_mhz.append(np.array([p.clock_mhz for p in planned], dtype=np.int32))
        self._starts_s.append(np.array([p.start_s for p in planned], dtype=np.float64))
        self._durations_s.append(np.array([p.duration_s for p in planned], dtype=np.float64))

    def finish(self) -> PlanTable:
        """Return the table of all recorded plans."""
        return PlanTable(
            computations=tuple(p.computation for p in chain.from_iterable(self._example.stages)),
            stage_sizes=tuple(map(len, self._example.stages)),
            iteration_times_s=tuple(self._iteration_times_s),
            effective_energies_j=tuple(self._effective_energies_j),
            blocking_power_w=self._example.blocking_power_w,
            clocks_mhz=np.array(self._clocks_mhz),
            starts_s=np.array(self._starts_s),
            durations_s=np.array(self._durations_s),
        )


def tabulate(
    pipeline: Pipeline, graph: EventGraph, columns: Columns, choices: NDArray[np.int16]
) -> PlanTable:
    """Return the plans of choices, one row each; all computations start as early as they can."""
    chosen = columns.to_columns(choices)
    finishes_ps = columns.earliest_finishes_ps(columns.times_ps[chosen])[columns.row_of]
    chosen = chosen[columns.row_of]
    durations_ps = columns.times_ps[chosen]
    ps_per_s = graph.scale.ps_per_s
    clocks_mhz = np.array([option.clock_mhz for some in graph.options for option in some], dtype=np.int32)
    further = np.fromiter((further_of(option.setting) for some in graph.options for option in some), object)
    stages: list[list[int]] = [[] for _ in pipeline.blocking_power_w]
    for index, computation in enumerate(graph.computations):
        if computation.kind is not Kind.FIXED:
            stages[computation.stage].append(index)
    order = np.array(list(chain.from_iterable(stages)), dtype=np.int64)
    effective_j = columns.energies_j[chosen].sum(axis=0) / graph.scale.energy
    planned_mhz = np.ascontiguousarray(clocks_mhz[chosen[order]].T)
    starts_s = np.ascontiguousarray(((finishes_ps - durations_ps)[order] / ps_per_s).T)
    durations_s = np.ascontiguousarray((durations_ps[order] / ps_per_s).T)
    if pipeline.blocking_powers_w:
        ends = accumulate(map(len, stages), initial=0)
        for stage, own in enumerate(slice(*pair) for pair in pairwise(ends)):
            figures = planned_mhz[:, own], starts_s[:, own], durations_s[:, own]
            effective_j -= below_searched_j(pipeline, stage, *figures)
    return PlanTable(
        computations=tuple(graph.computations[index] for index in order.tolist()),
        stage_sizes=tuple(map(len, stages)),
        iteration_times_s=tuple((finishes_ps.max(axis=0) / ps_per_s).tolist()),
        effective_energies_j=tuple(effective_j.tolist()),
        blocking_power_w=sum(pipeline.stock_blocking_power_w),
        clocks_mhz=planned_mhz,
        starts_s=starts_s,
        durations_s=durations_s,
        further=further[chosen[order]].T if any(further) else None,
    )
