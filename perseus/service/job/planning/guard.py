"""The guard: whether iterations keep what their plans promise. Part of the state machine.

A plan promises the time that the solver predicts for its computations, plus what an iteration holds beyond
them (transfers, optimizer), which the stock baseline shows; never less than the baseline itself. Where the
median of the latest iterations exceeds that, and no straggler explains it, the promise is broken.

Nothing is promised of the gaps between iterations, in which ranks are at stock as soon as they are long: an
evaluation breaks no promise. But what a gap takes longer than at stock, and low clocks in it can explain, is
laid to the plans' account: else it would slow training unseen.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from perseus.service.domain.measured import JobIteration
from perseus.service.domain.model import PlannedClocks
from perseus.service.job.planning.operating_point import overhead_s
from perseus.solver import Frontier


@dataclass(frozen=True, slots=True)
class GuardRules:
    """By what share the median of so many iterations may exceed what was promised."""

    tolerance: float = 0.01
    iterations: int = 5


@dataclass(frozen=True, slots=True)
class BrokenPromise:
    """The evidence. Times in seconds, of whole iterations of the slowest pipeline, and what gaps lost."""

    promised_time_s: float
    median_time_s: float
    baseline_time_s: float
    iteration_times_s: tuple[float, ...]
    last_iteration: int


def promised_time_s(clocks: Sequence[PlannedClocks], frontier: Frontier, baseline_time_s: float) -> float:
    """Return what the pipelines' plans together promise for an iteration of the job."""
    more_s = overhead_s(frontier, baseline_time_s)
    return max(baseline_time_s, more_s + max(some.plan.iteration_time_s for some in clocks))


class Guard:
    """Watches the iterations under the plans that are in force."""

    def __init__(self, rules: GuardRules) -> None:
        self._rules = rules
        self._times_s: deque[float] = deque(maxlen=rules.iterations)
        self._versions: tuple[int, ...] | None = None

    def judge(
        self,
        iteration: JobIteration,
        promise_s: float,
        baseline_time_s: float,
        baseline_gap_time_s: float | None = None,
    ) -> BrokenPromise | None:
        """Take an iteration under plans that promise `promise_s`; return the evidence if that is broken.

        `baseline_gap_time_s`: the usual gap at stock; None where it is not known, and then gaps don't count.
        """
        lost_s = 0.0
        if iteration.versions != self._versions:
            self.restart()
            self._versions = iteration.versions
        elif baseline_gap_time_s is not None:  # the gap before a plan's first iteration was another's
            lost_s = min(iteration.gap_slowed_time_s, max(0.0, iteration.gap_time_s - baseline_gap_time_s))
        if not iteration.is_regular:
            return None
        self._times_s.append(iteration.iteration_time_s + lost_s)
        middle_s = median(self._times_s)
        limit_s = promise_s * (1 + self._rules.tolerance)
        if len(self._times_s) < self._rules.iterations or middle_s <= limit_s:
            return None
        evidence = BrokenPromise(
            promise_s, middle_s, baseline_time_s, tuple(self._times_s), iteration.iteration
        )
        self.restart()
        return evidence

    def restart(self) -> None:
        """What is under way counts for nothing."""
        self._times_s.clear()
        self._versions = None
