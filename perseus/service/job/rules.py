"""What the operator sets for all jobs of a coordinator."""

import math
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from perseus.service.domain.limits import MAX_SETTING

if TYPE_CHECKING:  # settings are read where no solver is installed
    from perseus.service.domain.profiling import ProfilingBudget


class Rules(BaseModel):
    """How long silence may last, how much is measured, how well, and what plans may exceed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lease_s: float = Field(
        default=30.0,
        ge=0.1,
        le=3600,
        description="How long plans outlive the last word between agent and coordinator, seconds.",
    )
    baseline_iterations: int = Field(
        default=5, ge=1, le=1000, description="Iterations of the stock baseline."
    )
    profile_iterations: int = Field(
        default=3,
        ge=1,
        le=1000,
        description="Iterations measured at a clock; noisier ones than others get more, clean ones fewer.",
    )
    profile_accuracy_percent: float = Field(
        default=0.3, gt=0, le=100, description="Profile until plans can change by no more energy than this."
    )
    profile_clocks: int = Field(default=12, ge=2, le=1000, description="Clocks measured per stage, at most.")
    profile_budget_iterations: int = Field(
        default=1000, ge=1, le=MAX_SETTING, description="Iterations that profiling may take."
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
        description="Back to stock when iterations surely exceed the plan by this much.",
    )
    guard_iterations: int = Field(
        default=5, ge=1, le=1000, description="Iterations of which the median has to exceed it, at least."
    )

    @property
    def profile_accuracy(self) -> float:
        """By what share the plan's energy may still change when profiling ends."""
        return self.profile_accuracy_percent / 100

    @property
    def guard_tolerance(self) -> float:
        """By what share the median of iterations may exceed what was promised, at least."""
        return self.guard_tolerance_percent / 100

    @property
    def profiling_budget(self) -> "ProfilingBudget":
        """What all rounds of profiling may take together."""
        from perseus.service.domain.profiling import ProfilingBudget

        return ProfilingBudget(
            iteration_count=self.profile_budget_iterations,
            time_s=self.profile_budget_s,
            extra_time_s=self.profile_budget_extra_s,
            extra_energy_j=self.profile_budget_j,
        )
