"""How long records of the past are kept, and which are due for deletion."""

from typing import Any

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
    def ledger_age_s(self) -> float:
        """How long the ledger's hours are kept, seconds."""
        return self.keep_ledger_days * DAY_S

    def is_run_due(self, finish_time_s: Any, later_count: Any, now_s: float) -> Any:
        """Return whether to archive a run; `later_count` runs have finished after it.

        This and the other rules return a condition if they are given columns.
        """
        max_age_s = self.keep_finished_days * DAY_S
        return (finish_time_s < now_s - max_age_s) | (later_count >= self.keep_finished_count)

    def is_telemetry_due(self, write_time_s: Any, later_count: Any, now_s: float) -> Any:
        """Return whether to delete the position in an agent's telemetry; `later_count` are later."""
        max_age_s = self.keep_telemetry_days * DAY_S
        return (write_time_s < now_s - max_age_s) | (later_count >= self.keep_telemetry_count)

    def is_budget_due(self, over_time_s: Any, later_count: Any, now_s: float) -> Any:
        """Return whether to delete a power budget that has ended; `later_count` have ended after it."""
        max_age_s = self.keep_budgets_days * DAY_S
        return (over_time_s < now_s - max_age_s) | (later_count >= self.keep_budget_count)

    def first_event_kept(self, last_sequence: Any) -> Any:
        """Return the lowest event sequence to keep, given the last one; below 1 if all are kept."""
        return last_sequence - self.keep_event_count + 1
