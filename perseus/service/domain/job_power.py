"""A run's power and its operating points, as plain values: the input of budgets over many jobs."""

from collections.abc import Mapping
from dataclasses import dataclass

from perseus.service.domain.specification import BudgetTerms
from perseus.solver import Frontier


@dataclass(frozen=True, slots=True, eq=False)
class PowerCurveBasis:
    """The basis of a planned run's powers and speeds (`fleet.power.curve`).

    Attributes:
        frontier: of one of its pipelines.
        own_time_s: the iteration time of its policy while no budget asks for less power.
        slowdowns: by straggling pipeline, how many times longer everything takes.
        overhead_s: the time in an iteration outside computations.
    """

    frontier: Frontier
    own_time_s: float
    slowdowns: Mapping[int, float]
    overhead_s: float

    def is_same(self, other: "PowerCurveBasis | None") -> bool:
        """Return whether it leads to the same curve."""
        return (
            other is not None
            and self.frontier is other.frontier
            and (self.own_time_s, self.slowdowns, self.overhead_s)
            == (other.own_time_s, other.slowdowns, other.overhead_s)
        )


@dataclass(frozen=True, slots=True)
class JobPower:
    """A run's power at one moment.

    Attributes:
        basis: of its power curve; None while it has no plans, or they are not in use.
        terms: what a budget may do to it.
        target_time_s: the iteration time that a budget asks for now; None if none does.
        power_w: mean over the latest complete iteration, with the gap before it; None if unknown.
        iteration_time_s: of that iteration; 0 before the first.
        is_changing: whether part of that iteration ran under clocks other than those offered now.
        is_in_force: whether the clocks offered now are in force on all ranks.
        placement_count: how often a rank joined from another host, or with another GPU, than before.
    """

    basis: PowerCurveBasis | None
    terms: BudgetTerms
    target_time_s: float | None = None
    power_w: float | None = None
    iteration_time_s: float = 0.0
    is_changing: bool = False
    is_in_force: bool = False
    placement_count: int = 0


NO_POWER = JobPower(None, BudgetTerms())
"""The power of a run without measurements."""
