"""How long what has ended is kept, and what is due to go."""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from perseus.service.domain.limits import MAX_SETTING

DAY_S = 86_400.0


class Retention(BaseModel):
    """What is kept: by age, and by number.

    The last event of a run always stays. Runs that have ended are archived: only the report, the
    specification and the profiles that other jobs adopt stay of them. The ledger's hours are kept whatever
    became of their jobs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    keep_events_days: float = Field(default=90.0, gt=0, le=36_500, description="Days that events are kept.")
    keep_event_count: int = Field(
        default=100_000, ge=1, le=MAX_SETTING, description="Events kept of each run, at most."
    )
    keep_finished_days: float = Field(
        default=90.0, gt=0, le=36_500, description="Days before only the report is left of a run that ended."
    )
    keep_finished_count: int = Field(
        default=1_000,
        ge=0,
        le=MAX_SETTING,
        description="Runs that ended and of which more is kept than the report, at most.",
    )
    keep_telemetry_days: float = Field(
        default=30.0, gt=0, le=36_500, description="Days that it is known what telemetry an agent has sent."
    )
    keep_telemetry_count: int = Field(
        default=100_000, ge=1, le=MAX_SETTING, description="Agents of which that is known, at most."
    )
    keep_ledger_days: float = Field(
        default=1_100.0,
        gt=0,
        le=36_500,
        description="Days that the ledger is kept, of ended and deleted jobs, too.",
    )
    keep_budgets_days: float = Field(
        default=90.0, gt=0, le=36_500, description="Days that power budgets are kept that have ended."
    )
    keep_budget_count: int = Field(
        default=10_000, ge=1, le=MAX_SETTING, description="Power budgets kept that have ended, at most."
    )

    @property
    def event_age_s(self) -> float:
        """How long events are kept."""
        return self.keep_events_days * DAY_S

    @property
    def telemetry_age_s(self) -> float:
        """How long it is known how far the telemetry of an agent was taken."""
        return self.keep_telemetry_days * DAY_S

    @property
    def ledger_age_s(self) -> float:
        """How long the ledger's hours are kept."""
        return self.keep_ledger_days * DAY_S

    def is_run_due(self, finish_time_s: float, later_count: int, now_s: float) -> bool:
        """Tell whether a run is to be archived; `later_count` runs have finished after it."""
        return (
            finish_time_s < now_s - self.keep_finished_days * DAY_S or later_count >= self.keep_finished_count
        )

    def budgets_due(self, over_times_s: Mapping[str, float], now_s: float) -> list[str]:
        """Return which of the power budgets that were over at these times are to go."""
        latest_first = sorted(over_times_s, key=lambda budget_id: -over_times_s[budget_id])
        return [
            budget_id
            for later_count, budget_id in enumerate(latest_first)
            if over_times_s[budget_id] < now_s - self.keep_budgets_days * DAY_S
            or later_count >= self.keep_budget_count
        ]

    def first_event_kept(self, last_sequence: int) -> int:
        """Return the lowest sequence that a run may keep by number, its last one being this."""
        return max(1, last_sequence - max(1, self.keep_event_count) + 1)
