"""A run of a job as others may see it, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass

from perseus.service.domain.figures import JobFigures
from perseus.service.domain.model import JobState, NoSlowdown, RankState, StockIteration
from perseus.service.domain.profiling import ProfilingBudget, ProfilingCost, ProfilingProgress
from perseus.service.domain.signals import SignalPacing
from perseus.service.domain.specification import JobSpec, OperatingPolicy, Parallelism
from perseus.service.domain.stall import Stall


@dataclass(frozen=True, slots=True)
class JobDetails:
    """What of a job grows with its size; its ranks are asked for by themselves."""

    spec: JobSpec
    """As it was registered: with the policy to begin with."""
    straggler_times_s: Mapping[int, float]
    """T' by pipeline; 0 before the frontier is known."""
    detected_stragglers: frozenset[int]
    """The pipelines among them that nobody reported."""
    planned_iteration_time_s: tuple[float, ...]
    """By pipeline; empty before the job is planned."""


@dataclass(frozen=True, slots=True)
class JobView:
    """A run of a job as others may see it: what costs the same for every job, and the rest if it is wanted.

    Times of the frontier and of plans are 0 before they are known.
    """

    job_id: str
    run_number: int
    state: JobState
    state_reason: str
    stall: Stall | None
    """Why it does not get on, if it does not."""
    epoch: str
    parallelism: Parallelism
    rank_counts: Mapping[RankState, int]
    policy: OperatingPolicy
    """The one in force."""
    baseline: StockIteration | None
    profiled_clock_count: int
    """Clocks measured of the stage with the fewest."""
    profiling_cost: ProfilingCost
    profiling_budget: ProfilingBudget
    profiling_progress: ProfilingProgress | None
    """While it is in PROFILING."""
    t_min_s: float
    t_star_s: float
    t_slow_s: float
    no_slowdown: NoSlowdown | None
    """What is not slower than stock; None before the frontier is known."""
    min_planned_time_s: float
    max_planned_time_s: float
    straggler_count: int
    set_latency_s: float
    """That plans are made with; 0 before it is known."""
    latency_cost_percent: float
    """What it adds to the energy at T_min, by prediction."""
    create_time_s: float
    """When it was registered, on the wall clock."""
    finish_time_s: float | None
    """When it finished, on the wall clock."""
    last_event_sequence: int
    """Number of the last event that this shows."""
    figures: JobFigures
    """What was measured lately."""
    budget_time_s: float | None = None
    """What a power budget makes its iterations take, on the frontier's scale; None if none holds it back."""
    signal_pacing: SignalPacing | None = None
    """How it runs by a signal; None where it does not, or was not told yet."""
    has_baseline_timeline: bool = False
    """Whether an iteration of the stock baseline can be looked at."""
    labels: tuple[tuple[str, str], ...] = ()
    """What it is to whoever runs it, by key."""
    details: JobDetails | None = None
