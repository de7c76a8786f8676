"""The cost of profiling so far, and whether it uses up the budget. Part of the state machine.

Every iteration of the job counts that did not run at stock as offered, and so does the time of iterations
that were not reported.
"""

import math
from dataclasses import replace

from perseus.service.domain.measured import JobIteration
from perseus.service.domain.model import StockIteration
from perseus.service.domain.profiling import ProfilingBudget, ProfilingCost, ProfilingLimit
from perseus.service.domain.records import Counters, JobRecord


class BudgetTracker:
    """Tracks the spent part of a budget: the counters' `profiling_cost`."""

    def __init__(self, record: JobRecord, counters: Counters, budget: ProfilingBudget) -> None:
        self._record = record
        self._counters = counters
        self._budget = budget
        # The cost that `limit` was last computed for, and the result.
        self._judged_cost: ProfilingCost | None = None
        self._limit: ProfilingLimit | None = None
        # The part of the time since the latest iteration that already counts.
        self._silent_s = self._silent_extra_s = 0.0

    @property
    def cost(self) -> ProfilingCost:
        """The cost of profiling since it began or its budget was renewed."""
        return self._counters.profiling_cost

    @property
    def limit(self) -> ProfilingLimit | None:
        """The part of the budget that is used up, if any."""
        if self.cost is not self._judged_cost:
            self._judged_cost, self._limit = self.cost, self._budget.used_up(self.cost)
        return self._limit

    def renew(self) -> None:
        """Start again with a full budget."""
        self._record.earlier_profiling_cost = self._record.earlier_profiling_cost.plus(self.cost)
        self._counters.profiling_cost = ProfilingCost()
        self.end_gap()

    def take_iteration(self, iteration: JobIteration, baseline: StockIteration) -> float:
        """Count an iteration of profiling; return by how much it exceeded stock's time."""
        extra_s = max(0.0, iteration.iteration_time_s - baseline.time_s)
        energy_j = math.fsum(iteration.pipeline_energy_j)
        self._counters.profiling_cost = ProfilingCost(
            iteration_count=self.cost.iteration_count + 1,
            time_s=self.cost.time_s + iteration.iteration_time_s,
            extra_time_s=self.cost.extra_time_s + extra_s,
            energy_j=self.cost.energy_j + energy_j,
            extra_energy_j=self.cost.extra_energy_j
            + (energy_j - baseline.energy_j if baseline.energy_j else 0.0),
        )
        return extra_s

    def take_silence(self, time_s: float, baseline_time_s: float) -> None:
        """Count a time without reported iterations, under clocks that were held until now."""
        self._take_unknown(time_s, max(0.0, time_s - baseline_time_s))

    def take_gap(self, iteration: JobIteration, time_s: float, baseline_time_s: float) -> None:
        """Count the unreported iterations before this one, which came `time_s` after the last."""
        unknown_s = max(0.0, time_s - iteration.iteration_time_s)
        extra_s = max(0.0, unknown_s - iteration.skipped_count * baseline_time_s)
        # Part of it may already have been counted as silence.
        self._take_unknown(max(0.0, unknown_s - self._silent_s), max(0.0, extra_s - self._silent_extra_s))

    def _take_unknown(self, time_s: float, extra_s: float) -> None:
        self._silent_s += time_s
        self._silent_extra_s += extra_s
        self._counters.profiling_cost = replace(
            self.cost, time_s=self.cost.time_s + time_s, extra_time_s=self.cost.extra_time_s + extra_s
        )

    def end_gap(self) -> None:
        """Forget the silence counted so far, as an iteration was reported."""
        self._silent_s = self._silent_extra_s = 0.0
