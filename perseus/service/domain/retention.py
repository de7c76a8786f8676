"""How long records of the past are kept, and which are due for deletion."""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from perseus.service.domain.limits import MAX_SETTING

DAY_S = 86_400.0


class Retention(BaseModel):
    """Retention by age and by number.

    The last event of a run is always kept. A run that ended is archived later: only its report, its
    specification and the profiles that other jobs adopt are kept. The ledger's hours are kept even if their
    job is deleted.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    keep_events_days: float = Field(default=90.0, gt=0, le=36_500, description="Days that events are kept.")
    keep_event_count: int = Field(
        default=100_000, ge=1, le=MAX_SETTING, description="Events kept of each run, at most."
    )
    keep_finished_days: float = Field(
        default=90.0, gt=0, le=36_500, description="Days until a run that ended is reduced to its report."
    )
    keep_finished_count: int = Field(
        default=1_000,
        ge=0,
        le=MAX_SETTING,
        description="Runs that ended and are kept in full, at most.",
    )
    keep_telemetry_days: float = Field(
        default=30.0, gt=0, le=36_500, description="Days that the position in an agent's telemetry is kept."
    )
    keep_telemetry_count: int = Field(
        default=100_000, ge=1, le=MAX_SETTING, description="Agents whose position is kept, at most."
    )
    keep_ledger_days: float = Field(
        default=1_100.0,
        gt=0,
        le=36_500,
        description="Days that the ledger is kept, including ended and deleted jobs.",
    )
    keep_budgets_days: float = Field(
        default=90.0, gt=0, le=36_500, description="Days that power budgets are kept after their end."
    )
    keep_budget_count: int = Field(
        default=10_000, ge=1, le=MAX_SETTING, description="Power budgets kept after their end, at most."
    )

    @property
    def event_age_s(self) -> float:
        """How long events are kept, seconds."""
        return self.keep_events_days * DAY_S

    @property
    def telemetry_age_s(self) -> float:
        """How long the position in an agent's telemetry is kept, seconds."""
        return self.keep_telemetry_days * DAY_S

    @property
    def ledger_age_s(self) -> float:
        """How long the ledger's hours are kept, seconds."""
        return self.keep_ledger_days * DAY_S

    def is_run_due(self, finish_time_s: float, later_count: int, now_s: float) -> bool:
        """Return whether to archive a run; `later_count` runs have finished after it."""
        return (
            finish_time_s < now_s - self.keep_finished_days * DAY_S or later_count >= self.keep_finished_count
        )

    def budgets_due(self, over_times_s: Mapping[str, float], now_s: float) -> list[str]:
        """Return the power budgets to delete, given when each ended."""
        latest_first = sorted(over_times_s, key=lambda budget_id: -over_times_s[budget_id])
        return [
            budget_id
            for later_count, budget_id in enumerate(latest_first)
            if over_times_s[budget_id] < now_s - self.keep_budgets_days * DAY_S
            or later_count >= self.keep_budget_count
        ]

    def first_event_kept(self, last_sequence: int) -> int:
        """Return the lowest event sequence to keep, given the last one."""
        return max(1, last_sequence - max(1, self.keep_event_count) + 1)
