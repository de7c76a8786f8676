"""The rule, progress and speeds of a run that follows a signal, as plain values: the input of its targets."""

from dataclasses import dataclass

from perseus.service.domain.signals import SignalRule, SignalTarget
from perseus.solver import Frontier


@dataclass(frozen=True, slots=True, eq=False)
class SpeedCurveBasis:
    """The basis of a planned run's speed curve (`fleet.signal_targets.from_frontier`).

    Attributes:
        frontier: of one of its pipelines.
        full_time_s: the iteration time of no slowdown, on the frontier's scale.
        overhead_s: the time in an iteration outside computations.
    """

    frontier: Frontier
    full_time_s: float
    overhead_s: float = 0.0

    def is_same(self, other: "SpeedCurveBasis | None") -> bool:
        """Return whether it leads to the same curve."""
        return (
            other is not None
            and self.frontier is other.frontier
            and (self.full_time_s, self.overhead_s) == (other.full_time_s, other.overhead_s)
        )


@dataclass(frozen=True, slots=True)
class JobSignal:
    """A run that follows a signal, at one moment.

    Attributes:
        rule: of its policy.
        signal_target: the latest target, and the progress; None before the first target.
        basis: of its speed curve; None while it has no plans.
    """

    rule: SignalRule
    signal_target: SignalTarget | None
    basis: SpeedCurveBasis | None
