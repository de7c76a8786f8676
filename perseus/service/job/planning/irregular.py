"""Detects plans that make irregular iterations slow. Part of the state machine.

An irregular iteration runs at stock from the first mark that differs, and from its start if the iterations
before it were irregular, too; the part before that runs as planned. Its time at stock is known only if some
ran at stock. So irregular iterations are compared with those, or with the plans' prediction, whichever is
longer. A job whose latest iterations are mostly irregular and take longer than that gains nothing from its
plans.

The decision uses medians rather than the guard's sequential test. That test assumes a level and its noise,
and irregular iterations have neither: they are a mixture of evaluations, ramps and the like, and few were
seen. An error is also cheap: it is no prediction violation and costs no time, only the savings that plans
would bring until regular iterations restore them.
"""

from collections import deque
from statistics import median

from perseus.service.domain.measured import JobIteration
from perseus.service.job.rules import Rules

_KEPT = 20


class IrregularWatch:
    """Watches the irregular iterations of a job."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        # The iterations under the same plans: the time of each irregular one, 0 for the others.
        self._times_s: deque[float] = deque(maxlen=rules.guard_iterations)
        self._versions: tuple[int, ...] | None = None
        self._stock_times_s: deque[float] = deque(maxlen=_KEPT)

    def take_stock(self, iteration: JobIteration) -> None:
        """Take an iteration at stock."""
        if not iteration.is_regular:
            self._stock_times_s.append(iteration.iteration_time_s)

    def judge(self, iteration: JobIteration, predicted_s: float) -> float | None:
        """Take an iteration under plans; return the median irregular time if the plans have to go."""
        if iteration.versions != self._versions:
            self.restart()
            self._versions = iteration.versions
        self._times_s.append(0.0 if iteration.is_regular else iteration.iteration_time_s)
        irregular_s = [time_s for time_s in self._times_s if time_s]
        if (
            len(self._times_s) < self._rules.guard_iterations
            or 2 * len(irregular_s) <= self._rules.guard_iterations
        ):
            return None
        expected_s = max([predicted_s, *([median(self._stock_times_s)] if self._stock_times_s else [])])
        found_s = median(irregular_s)
        return found_s if found_s > expected_s * (1 + self._rules.guard_tolerance) else None

    def restart(self) -> None:
        """Discard the iterations under plans; those at stock are kept."""
        self._times_s.clear()
        self._versions = None
