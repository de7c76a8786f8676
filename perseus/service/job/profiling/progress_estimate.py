"""The speed of profiling, and an upper bound for its remaining time. Part of the state machine."""

import math

from perseus.service.domain.profiling import ProfilingBudget, ProfilingCost, ProfilingProgress


class ProgressEstimate:
    """Counts rounds and their time since profiling began or was resumed."""

    def __init__(self, budget: ProfilingBudget) -> None:
        self._budget = budget
        self._tried_count = 0
        self._max_count = 0
        self._round_count = 0
        self._begun_s: float | None = None
        self._ended_s = 0.0

    def restart(self) -> None:
        """Start again with nothing known."""
        self._round_count = 0
        self._begun_s = None

    def begin_round(self, cost: ProfilingCost, tried_count: int, max_count: int) -> None:
        """Begin a round after `tried_count` clocks of a stage were tried, of at most `max_count`."""
        self._tried_count, self._max_count = tried_count, max_count
        if self._begun_s is None:
            self._begun_s = self._ended_s = cost.time_s

    def end_round(self, cost: ProfilingCost) -> None:
        """End a round."""
        self._round_count += 1
        self._ended_s = cost.time_s

    def progress(self, cost: ProfilingCost) -> ProfilingProgress:
        """Return the progress so far."""
        return ProfilingProgress(self._tried_count, self._max_count, self._remaining_s(cost))

    def _remaining_s(self, cost: ProfilingCost) -> float | None:
        if not self._round_count or self._begun_s is None:
            return None
        round_s = (self._ended_s - self._begun_s) / self._round_count
        rounds_s = (self._max_count - self._tried_count) * round_s - (cost.time_s - self._ended_s)
        return max(0.0, min(rounds_s, self._budget_s(cost)))

    def _budget_s(self, cost: ProfilingCost) -> float:
        """Return how long the budget lasts at the rate of its use so far."""
        budget = self._budget
        used_up_s = [budget.time_s - cost.time_s]
        for used, maximum in (
            (float(cost.iteration_count), budget.iteration_count),
            (cost.extra_time_s, budget.extra_time_s),
            (cost.extra_energy_j, budget.extra_energy_j),
        ):
            if used > 0 and math.isfinite(maximum):
                used_up_s.append(cost.time_s * (maximum - used) / used)
        return min(used_up_s)
