"""The guard: whether iterations keep what their plans promise. Part of the state machine.

A plan promises the time that the solver predicts for its computations, plus what an iteration holds beyond
them (transfers, optimizer), which the stock baseline shows; never less than the baseline itself.

Iterations jump, and a few slow ones are no proof. How much they jump is learned from all of the job's, at
stock already. The promise is broken where the median of the latest iterations exceeds it by more than the
tolerance, no straggler explains that, and evidence has added up that jumps alone would give once in
`FALSE_FREE_ITERATIONS`. The tolerance is no less than what the baseline, the median of a few iterations, may
be off itself.

Nothing is promised of the gaps between iterations, in which ranks are at stock as soon as they are long: an
evaluation breaks no promise. But what a gap takes longer than at stock, and low clocks in it can explain, is
laid to the plans' account: else it would slow training unseen.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from perseus.service.domain.measured import JobIteration
from perseus.service.domain.model import PlannedClocks
from perseus.service.job.planning.operating_point import overhead_s
from perseus.service.job.rules import Rules
from perseus.service.job.statistics.noise import Noise
from perseus.service.job.statistics.sequential_test import MIN_LEVEL, SequentialTest
from perseus.solver import Frontier

FALSE_FREE_ITERATIONS = 10_000
"""Iterations of a job that keeps its promises in which at most one counts as broken, on average."""

_BASELINE_ERRORS = 2.0
"""Standard errors that the baseline may be off."""

_ERROR_OF_MEDIAN = 1.25
"""Standard error of a median over that of a mean."""


@dataclass(frozen=True, slots=True)
class PredictionViolation:
    """The evidence. Times in seconds, of whole iterations of the slowest pipeline, and what gaps lost.

    `noise`: the standard deviation of iterations, and `tolerance` what was allowed, both as shares.
    """

    predicted_time_s: float
    noise: float
    tolerance: float
    median_time_s: float
    baseline_time_s: float
    iteration_times_s: tuple[float, ...]
    last_iteration: int


def predicted_time_s(clocks: Sequence[PlannedClocks], frontier: Frontier, baseline_time_s: float) -> float:
    """Return what the pipelines' plans together promise for an iteration of the job."""
    return prediction_of_s(max(some.plan.iteration_time_s for some in clocks), frontier, baseline_time_s)


def prediction_of_s(planned_time_s: float, frontier: Frontier, baseline_time_s: float) -> float:
    """Return what is promised where the slowest of the plans takes so long by itself."""
    return max(baseline_time_s, overhead_s(frontier, baseline_time_s) + planned_time_s)


class Guard:
    """Watches the iterations under the plans that are in force."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._times_s: deque[float] = deque(maxlen=rules.guard_iterations)
        self._versions: tuple[int, ...] | None = None
        self._noise = Noise(1)
        self._learned_versions: tuple[int, ...] | None = None
        self._test = SequentialTest(1, FALSE_FREE_ITERATIONS, FALSE_FREE_ITERATIONS)

    @property
    def tolerance(self) -> float:
        """By what share iterations may exceed the promise, now that so much is known of them."""
        error = _ERROR_OF_MEDIAN * self._noise.scale / math.sqrt(self._rules.baseline_iterations)
        return max(self._rules.guard_tolerance, math.expm1(_BASELINE_ERRORS * error))

    def learn(self, iteration: JobIteration) -> None:
        """Take any iteration, before it is judged: how much they jump is no matter of plans."""
        if not iteration.is_regular or iteration.versions is None:
            return
        log_time = np.log([iteration.iteration_time_s])
        if iteration.versions == self._learned_versions:
            self._noise.add(log_time)
            return
        self._learned_versions = iteration.versions
        self._noise.restart()
        self._noise.set_level(0, float(log_time[0]))

    def judge(
        self,
        iteration: JobIteration,
        predicted_s: float,
        baseline_time_s: float,
        baseline_gap_time_s: float | None = None,
    ) -> PredictionViolation | None:
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
        time_s = iteration.iteration_time_s + lost_s
        self._times_s.append(time_s)
        tolerance = self.tolerance
        # What exceeds the promise by the tolerance is halfway from 0 to the least level that is told from it.
        excess = math.log(time_s / (predicted_s * (1 + tolerance))) + MIN_LEVEL / 2
        self._test.add(np.array([excess]), self._noise)
        middle_s = median(self._times_s)
        is_shown = self._test.evidence_above()[0] >= self._test.threshold_above
        is_exceeded = len(self._times_s) == self._rules.guard_iterations and middle_s > predicted_s * (
            1 + tolerance
        )
        if not (is_shown and is_exceeded):
            return None
        violation = PredictionViolation(
            predicted_time_s=predicted_s,
            noise=self._noise.scale,
            tolerance=tolerance,
            median_time_s=middle_s,
            baseline_time_s=baseline_time_s,
            iteration_times_s=tuple(self._times_s),
            last_iteration=iteration.iteration,
        )
        self.restart()
        return violation

    def restart(self) -> None:
        """What is under way counts for nothing."""
        self._times_s.clear()
        self._test.restart()
        self._versions = None
