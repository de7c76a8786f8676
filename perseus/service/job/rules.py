"""The operator's settings for all jobs of a coordinator."""

import math
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from perseus.service.domain.limits import MAX_SETTING

if TYPE_CHECKING:  # settings are also read where no solver is installed
    from perseus.service.domain.profiling import ProfilingBudget


class Rules(BaseModel):
    """Leases, amounts and accuracies of measurements, and the tolerance of the guard."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lease_s: float = Field(
        default=30.0,
        ge=0.1,
        le=3600,
        description="How long plans stay in force after the last message from the other side, seconds.",
    )
    baseline_iterations: int = Field(
        default=5, ge=1, le=1000, description="Iterations of the stock baseline."
    )
    profile_iterations: int = Field(
        default=3,
        ge=1,
        le=1000,
        description="Iterations measured per clock; a noisier clock gets more, a cleaner one fewer. Those "
        "under 0.5 s count in part.",
    )
    profile_accuracy_percent: float = Field(
        default=0.3,
        gt=0,
        le=100,
        description="Profile until the plan's energy can change by no more than this.",
    )
    profile_clocks: int = Field(
        default=12, ge=2, le=1000, description="Maximum number of clocks measured per stage."
    )
    profile_budget_iterations: int = Field(
        default=30_000, ge=1, le=MAX_SETTING, description="Iterations that profiling may take."
    )
    profile_budget_s: float = Field(default=math.inf, gt=0, description="Seconds that profiling may take.")
    profile_budget_extra_s: float = Field(
        default=360.0, gt=0, description="Seconds that profiling may take beyond stock."
    )
    profile_budget_j: float = Field(
        default=math.inf, gt=0, description="Joules that profiling may take beyond stock."
    )
    guard_tolerance_percent: float = Field(
        default=1.0,
        gt=0,
        le=1000,
        description="Withdraw plans that are surely slower than promised by this much, beside stock; make "
        "none whose measurements need a margin of three times as much.",
    )
    guard_iterations: int = Field(
        default=5,
        ge=1,
        le=1000,
        description="Iterations in which a cap of clocks, or irregular iterations, have to last.",
    )

    @property
    def profile_accuracy(self) -> float:
        """The share by which the plan's energy may still change when profiling ends."""
        return self.profile_accuracy_percent / 100

    @property
    def guard_tolerance(self) -> float:
        """The share by which iterations may exceed what is promised."""
        return self.guard_tolerance_percent / 100

    @property
    def max_margin(self) -> float:
        """The share of an iteration's time that plans may leave for noisy measurements."""
        return 3 * self.guard_tolerance

    @property
    def profiling_budget(self) -> "ProfilingBudget":
        """The total budget of all rounds of profiling."""
        from perseus.service.domain.profiling import ProfilingBudget

        return ProfilingBudget(
            iteration_count=self.profile_budget_iterations,
            time_s=self.profile_budget_s,
            extra_time_s=self.profile_budget_extra_s,
            extra_energy_j=self.profile_budget_j,
        )
