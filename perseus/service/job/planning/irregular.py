"""Whether iterations that are not as registered are slow under plans. Part of the state machine.

Such an iteration runs at stock from the first mark that differs, and from its begin if those before it
differed, too; but what precedes ran as planned. What it takes at stock is only known where some ran at stock.
So they are held against those, and against what the plans promise, whichever is longer. A job whose latest
iterations are mostly irregular, and take longer than that, has no use for its plans: stock is no slower.

Medians decide, not evidence as with the guard. Evidence is for a level and its noise, and these iterations
have neither: they are a mixture of evaluations, ramps and whatever else, of which few were seen. An error is
cheap, too: it is no broken promise and costs no time, only what plans would have saved until regular
iterations bring them back.
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
        # Of iterations under the same plans: the time of each that was irregular, 0 of the others.
        self._times_s: deque[float] = deque(maxlen=rules.guard_iterations)
        self._versions: tuple[int, ...] | None = None
        self._stock_times_s: deque[float] = deque(maxlen=_KEPT)

    def take_stock(self, iteration: JobIteration) -> None:
        """Take an iteration at stock."""
        if not iteration.is_regular:
            self._stock_times_s.append(iteration.iteration_time_s)

    def judge(self, iteration: JobIteration, predicted_s: float) -> float | None:
        """Take one under plans; return the median time of the irregular ones if the plans have to go."""
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
        """What is under way counts for nothing; what was seen at stock stays."""
        self._times_s.clear()
        self._versions = None
