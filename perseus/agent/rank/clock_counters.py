"""Counters of how well a rank's clocks followed a plan, per computation. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from perseus.agent.clocks.keeper import ClockKeeper, is_higher
from perseus.agent.rank.messages import ClockStatistics


@dataclass(slots=True)
class ClockCounters:
    """Counters since a plan came into force. They leave out FIXED computations, whose time no clock changes.

    `late_raise_count`: computations that began below their clock; `missed_count`: those never at it.
    """

    set_count: int = 0
    computation_count: int = 0
    late_raise_count: int = 0
    missed_count: int = 0
    computation_time_s: float = 0.0
    on_clock_time_s: float = 0.0

    def add(self, planned_mhz: int | None, clocks: Sequence[tuple[int | None, float]], end_s: float) -> None:
        """Count a finished computation.

        `clocks`: (clock, start time) pairs, first the one at its begin, then those that came into force.
        """
        ends_s = [*(begin_s for _, begin_s in clocks[1:]), end_s]
        on_clock_s = [
            until_s - since_s
            for (clock_mhz, since_s), until_s in zip(clocks, ends_s, strict=True)
            if clock_mhz == planned_mhz
        ]
        first_mhz, begin_s = clocks[0]
        self.computation_count += 1
        self.late_raise_count += is_higher(planned_mhz, first_mhz)
        self.missed_count += not on_clock_s
        self.computation_time_s += end_s - begin_s
        self.on_clock_time_s += sum(on_clock_s)

    def statistics(self, plan_version: int, keeper: ClockKeeper) -> ClockStatistics:
        """Return the statistics for the coordinator, including those of the `keeper`'s predictions."""
        return ClockStatistics(
            plan_version=plan_version,
            set_count=self.set_count,
            computation_count=self.computation_count,
            late_raise_count=self.late_raise_count,
            missed_count=self.missed_count,
            computation_time_s=self.computation_time_s,
            on_clock_time_s=self.on_clock_time_s,
            set_latency_s=keeper.lead.latency_s,
            margin_s=keeper.lead.margin_s,
            prediction_error_s=keeper.prediction_error_s,
            set_latency_count=keeper.lead.set_count,
        )
