"""Many plans of one pipeline, in little room and quickly looked up: columns, one row a plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import numpy as np
from numpy.typing import NDArray

from perseus.solver.computation import Computation
from perseus.solver.plan import Plan, PlannedComputation


@dataclass(frozen=True, slots=True, eq=False)
class PlanTable:
    """Plans over the same computations.

    Attributes:
        computations: stage by stage, as in every plan.
        stage_sizes: how many of them belong to each stage.
        iteration_times_s, effective_energies_j: one a plan.
        blocking_power_w: of all GPUs together, the same for all plans.
        clocks_mhz, starts_s, durations_s: a row a plan, a column a computation.
    """

    computations: Sequence[Computation]
    stage_sizes: Sequence[int]
    iteration_times_s: Sequence[float]
    effective_energies_j: Sequence[float]
    blocking_power_w: float
    clocks_mhz: NDArray[np.int32]
    starts_s: NDArray[np.float64]
    durations_s: NDArray[np.float64]

    def plan(self, row: int) -> Plan:
        """Return one of the plans."""
        planned = tuple(
            map(
                PlannedComputation,
                self.computations,
                self.clocks_mhz[row].tolist(),
                self.starts_s[row].tolist(),
                self.durations_s[row].tolist(),
            )
        )
        ends = accumulate(self.stage_sizes, initial=0)
        return Plan(
            iteration_time_s=self.iteration_times_s[row],
            effective_energy_j=self.effective_energies_j[row],
            blocking_power_w=self.blocking_power_w,
            stages=tuple(planned[begin:end] for begin, end in pairwise(ends)),
        )


class PlanTableRecorder:
    """Takes plans down one by one, so that none of them need be kept; all are of the same pipeline."""

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
        """Return all that was recorded."""
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
