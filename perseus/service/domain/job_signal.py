"""What a run that follows a signal wants and can do, as plain values: for whoever paces it."""

from dataclasses import dataclass

from perseus.service.domain.signals import SignalRule, SignalTarget
from perseus.solver import Frontier


@dataclass(frozen=True, slots=True, eq=False)
class SpeedCurveBasis:
    """What a planned run's paces are made from (`fleet.pacing.curve`).

    Attributes:
        frontier: of one of its pipelines.
        full_time_s: the iteration time of no slowdown, on the frontier's scale.
        overhead_s: what an iteration holds beyond computations.
    """

    frontier: Frontier
    full_time_s: float
    overhead_s: float = 0.0

    def is_same(self, other: "SpeedCurveBasis | None") -> bool:
        """Whether it leads to the same paces."""
        return (
            other is not None
            and self.frontier is other.frontier
            and (self.full_time_s, self.overhead_s) == (other.full_time_s, other.overhead_s)
        )


@dataclass(frozen=True, slots=True)
class JobSignal:
    """A run that follows a signal, at one moment.

    Attributes:
        rule: what its policy wants.
        pacing: what it was told last, and how far it is; None before anything was.
        basis: of its paces; None while it has no plans.
    """

    rule: SignalRule
    signal_target: SignalTarget | None
    basis: SpeedCurveBasis | None
