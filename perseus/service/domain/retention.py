"""How long what has ended is kept, and what is due to go."""

from collections.abc import Mapping
from dataclasses import dataclass

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Retention:
    """What is kept: by age, and by number.

    Attributes:
        event_age_s, event_count: events, the latter of each run. The last event of a run always stays.
        finished_age_s, finished_count: runs that have ended, before they are archived: only the report,
            the specification and the profiles that other jobs adopt stay of them.
        telemetry_age_s, telemetry_count: how far the telemetry of agents was taken, by instance.
        ledger_age_s: the ledger's hours, whatever became of their jobs.
        budget_age_s, budget_count: power budgets that have ended, or were cancelled.
    """

    event_age_s: float = 90 * DAY_S
    event_count: int = 100_000
    finished_age_s: float = 90 * DAY_S
    finished_count: int = 1_000
    telemetry_age_s: float = 30 * DAY_S
    telemetry_count: int = 100_000
    ledger_age_s: float = 1_100 * DAY_S
    budget_age_s: float = 90 * DAY_S
    budget_count: int = 10_000

    def is_run_due(self, finish_time_s: float, later_count: int, now_s: float) -> bool:
        """Tell whether a run is to be archived; `later_count` runs have finished after it."""
        return finish_time_s < now_s - self.finished_age_s or later_count >= self.finished_count

    def budgets_due(self, over_times_s: Mapping[str, float], now_s: float) -> list[str]:
        """Return which of the power budgets that were over at these times are to go."""
        latest_first = sorted(over_times_s, key=lambda budget_id: -over_times_s[budget_id])
        return [
            budget_id
            for later_count, budget_id in enumerate(latest_first)
            if over_times_s[budget_id] < now_s - self.budget_age_s or later_count >= self.budget_count
        ]

    def first_event_kept(self, last_sequence: int) -> int:
        """Return the lowest sequence that a run may keep by number, its last one being this."""
        return max(1, last_sequence - max(1, self.event_count) + 1)
