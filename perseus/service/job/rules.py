"""What the operator sets for all jobs of a coordinator."""

from dataclasses import dataclass, field

from perseus.service.job.planning.guard import GuardRules
from perseus.service.job.profiling.profiler import ProfilingRules


@dataclass(frozen=True, slots=True)
class Rules:
    """How long silence may last, and how much is measured, how well."""

    lease_s: float = 30.0
    baseline_iterations: int = 5
    profiling: ProfilingRules = field(default_factory=ProfilingRules)
    guard: GuardRules = field(default_factory=GuardRules)
