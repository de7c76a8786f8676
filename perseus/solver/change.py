"""Recheck a plan in force when the profiles under it change.

Replaying the plan on the new profiles takes milliseconds and shows whether it still meets its deadline.
Solving again starts from scratch, as every sweep does: with all computations at their slowest, the optimum is
known for any profile.
"""

from dataclasses import dataclass

from perseus.solver.frontier import Frontier
from perseus.solver.pipeline import Pipeline
from perseus.solver.plan import Plan, replay

_GRACE = 1e-9
"""A plan that is late by no more than this share of its deadline is in time: sums of the same
seconds differ in their last digits."""


@dataclass(frozen=True, slots=True)
class Recheck:
    """A plan in force, replayed on new profiles.

    Attributes:
        plan: the same settings, with their new times and energies.
        deadline_s: the predicted iteration time of the plan in force.
    """

    plan: Plan
    deadline_s: float

    @property
    def late_s(self) -> float:
        """By how much the plan now misses its deadline; 0 if it does not."""
        late_s = self.plan.iteration_time_s - self.deadline_s
        return late_s if late_s > _GRACE * self.deadline_s else 0.0

    def excess_energy_j(self, frontier: Frontier) -> float:
        """Return the plan's energy above the new frontier's bound for the same iteration time."""
        return self.plan.energy_j - frontier.bound_energy_j(self.plan.iteration_time_s)


def recheck(plan: Plan, pipeline: Pipeline, deadline_s: float) -> Recheck:
    """Replay a plan in force on a pipeline of the same schedule with new profiles.

    Raises:
        ProfileError: the new profiles lack a setting of the plan.
    """
    return Recheck(replay(pipeline, plan.settings), deadline_s)
