"""A deadline that a plan is made for, and what the relaxed frontier tells of it."""

from dataclasses import dataclass
from enum import Enum

from perseus.solver.graph import Int64Array


class Relaxing(Enum):
    """How a plan may be relaxed again, on local hulls: as far as that does not take too long."""

    FINELY = "finely"
    COARSELY = "coarsely"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Target:
    """A deadline, and what is known of it.

    Attributes:
        deadline_ps: the iteration time to keep.
        relaxed_ps: the events' times in the relaxed plan.
        bound_j: the effective energy that no choice can go below.
        energy_j: the same and what the GPUs draw while they wait.
        relaxing: how it may be relaxed again.
    """

    deadline_ps: int
    relaxed_ps: Int64Array
    bound_j: float
    energy_j: float
    relaxing: Relaxing

    def excess_share(self, effective_j: float) -> float:
        """Return how far an effective energy is above the bound, as a share of the energy."""
        return (effective_j - self.bound_j) / self.energy_j
