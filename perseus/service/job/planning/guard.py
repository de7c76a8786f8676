"""The guard: checks that iterations take no longer than the plans predict. Part of the state machine.

The prediction is the time that the solver computes for the plan's computations, plus the part of an iteration
outside them (transfers, optimizer), which the stock baseline shows; it is never less than the baseline
itself.

Iteration times are noisy, and a few slow iterations prove nothing. The noise is learned from all iterations
of the job, including those at stock. The prediction is violated if the median of the latest iterations
exceeds it by more than the tolerance, no straggler explains that, and the accumulated evidence passes a
threshold that noise alone would pass once in `FALSE_FREE_ITERATIONS`. The tolerance is at least the possible
error of the baseline, which is the median of a few iterations.

The gaps between iterations have no prediction. Ranks return to stock in a long gap, so an evaluation violates
nothing. But the part by which a gap exceeds the usual gap at stock, as far as low clocks in it can explain
that, counts as time of the iteration: otherwise it would slow training unnoticed.
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
"""Mean number of iterations between false alarms in a job whose predictions hold."""

_BASELINE_ERRORS = 2.0
"""Standard errors by which the baseline may be off."""

_ERROR_OF_MEDIAN = 1.25
"""Standard error of a median over that of a mean."""


@dataclass(frozen=True, slots=True)
class PredictionViolation:
    """The evidence, in seconds of whole iterations of the slowest pipeline, time lost in gaps included.

    `noise` is the standard deviation of iteration times, `tolerance` the excess allowed, both as shares.
    """

    predicted_time_s: float
    noise: float
    tolerance: float
    median_time_s: float
    baseline_time_s: float
    iteration_times_s: tuple[float, ...]
    last_iteration: int


def predicted_time_s(clocks: Sequence[PlannedClocks], frontier: Frontier, baseline_time_s: float) -> float:
    """Return the iteration time of the job that the pipelines' plans together predict."""
    return prediction_of_s(max(some.plan.iteration_time_s for some in clocks), frontier, baseline_time_s)


def prediction_of_s(planned_time_s: float, frontier: Frontier, baseline_time_s: float) -> float:
    """Return the predicted iteration time of the job if the slowest plan takes `planned_time_s`."""
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
        """The share by which iterations may exceed the prediction, given the noise known so far."""
        error = _ERROR_OF_MEDIAN * self._noise.scale / math.sqrt(self._rules.baseline_iterations)
        return max(self._rules.guard_tolerance, math.expm1(_BASELINE_ERRORS * error))

    def learn(self, iteration: JobIteration) -> None:
        """Take any iteration before it is judged: noise does not depend on plans."""
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
        """Take an iteration under plans that predict `predicted_s`; return the violation, if there is one.

        `baseline_gap_time_s` is the usual gap at stock; if it is None (unknown), gaps do not count.
        """
        lost_s = 0.0
        if iteration.versions != self._versions:
            self.restart()
            self._versions = iteration.versions
        elif baseline_gap_time_s is not None:  # a plan's first gap belongs to the previous plan
            lost_s = min(iteration.gap_slowed_time_s, max(0.0, iteration.gap_time_s - baseline_gap_time_s))
        if not iteration.is_regular:
            return None
        time_s = iteration.iteration_time_s + lost_s
        self._times_s.append(time_s)
        tolerance = self.tolerance
        # A time at the tolerance lies halfway between level 0 and the smallest level the test distinguishes.
        excess = math.log(time_s / (predicted_s * (1 + tolerance))) + MIN_LEVEL / 2
        self._test.add(np.array([excess]), self._noise, is_learned=True)
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
        """Discard the evidence gathered so far."""
        self._times_s.clear()
        self._test.restart()
        self._versions = None
