"""What a run of a job draws and can offer, as plain values: for budgets over many jobs."""

from collections.abc import Mapping
from dataclasses import dataclass

from perseus.service.domain.specification import BudgetTerms
from perseus.solver import Frontier


@dataclass(frozen=True, slots=True, eq=False)
class PowerCurveBasis:
    """What a planned run's powers and speeds are made from (`fleet.power.curve`).

    Attributes:
        frontier: of one of its pipelines.
        own_time_s: the iteration time that its policy gives it while no budget asks for less power.
        slowdowns: of the pipelines that are stragglers, how many times longer everything takes.
        overhead_s: what an iteration holds beyond computations.
    """

    frontier: Frontier
    own_time_s: float
    slowdowns: Mapping[int, float]
    overhead_s: float

    def is_same(self, other: "PowerCurveBasis | None") -> bool:
        """Whether it leads to the same curve."""
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
        basis: of its curve; None while it has no plans, or they are not in use.
        terms: what a budget may do to it.
        pace_s: what a budget makes its iterations take now; None if none does.
        power_w: mean over the latest complete iteration, with the gap before it; None if not known.
        iteration_time_s: of that iteration; 0 before the first.
        is_changing: whether that iteration ran, in part at least, under other clocks than are offered now.
        is_in_force: whether all ranks have what they are offered now.
        placement_count: how often a rank came from another host, or with another GPU, than before.
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
"""Of a run that measures nothing."""
