"""The evidence of events, as values with units: one class for each message of the contract.

An event type has evidence of one class, or none; `EVIDENCE` says which. To give a type evidence, write its
class, enter it there and in `Evidence`, and translate it in `service/api/translate_events.py`. The store
keeps the fields by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from perseus.service.domain.model import (
    EventType,
    FaultyPart,
    GpuErrorReason,
    JobState,
    RankState,
    RefusalReason,
)
from perseus.service.domain.profiling import ClockGivenUpReason, ProfilingCost, ProfilingLimit
from perseus.service.domain.specification import Coordinates, OperatingPolicy, Parallelism
from perseus.service.domain.stall import Stall
from perseus.solver import Kind


@dataclass(frozen=True, slots=True)
class Registered:
    """A job was registered."""

    parallelism: Parallelism


@dataclass(frozen=True, slots=True)
class StateChanged:
    """A job's state changed; `reason` is for people."""

    before: JobState
    after: JobState
    reason: str


@dataclass(frozen=True, slots=True)
class RankChanged:
    """A rank joined, was disconnected, lost or finished; `reason` is for people."""

    rank: Coordinates
    state: RankState
    instance_id: str
    hostname: str
    gpu_uuid: str
    reason: str


@dataclass(frozen=True, slots=True)
class StagePower:
    """Power of a stage's GPUs together."""

    stage: int
    power_w: float


@dataclass(frozen=True, slots=True)
class ClockProfiled:
    """A clock of every stage was measured.

    `clocks_mhz`: what each stage held for `iteration_count` iterations, STOCK_MHZ for stock.
    `blocking_powers`: of those stages that told it.
    """

    clocks_mhz: tuple[int, ...]
    iteration_count: int
    blocking_powers: tuple[StagePower, ...]


@dataclass(frozen=True, slots=True)
class ClockGivenUp:
    """A stage could not be measured at a clock. `disturbed_pipelines` were slow, and did not count.

    `rank` is the first, in order, that the reason holds for; None with DISTURBED.
    """

    stage: int
    clock_mhz: int
    iteration_count: int
    disturbed_pipelines: tuple[int, ...]
    reason: ClockGivenUpReason
    rank: Coordinates | None


@dataclass(frozen=True, slots=True)
class ProfileAdopted:
    """What another run has measured is used for these stages; `clock_count`: of the stage with the fewest."""

    stages: tuple[int, ...]
    clock_count: int
    source_job_id: str
    source_run_number: int


@dataclass(frozen=True, slots=True)
class ProfilingEnded:
    """Profiling has ended; `limit` is what is used up, None if that is not why."""

    is_enough: bool
    limit: ProfilingLimit | None
    cost: ProfilingCost


@dataclass(frozen=True, slots=True)
class Solved:
    """The frontier was solved. Energies are of one pipeline's iteration, points are realised plans.

    `latency_cost_percent`: what the GPUs' set latency adds to the energy at T_min, by prediction.
    `confidence`: the probability with which plans keep their iteration times; 0 where no errors are known.
    For that, times have a margin, which has a price.
    """

    t_min_s: float
    t_star_s: float
    t_slow_s: float
    baseline_energy_j: float
    t_min_energy_j: float
    point_count: int
    transfer_lag_s: float
    set_latency_s: float = 0.0
    latency_cost_percent: float = 0.0
    confidence: float = 0.0
    margin_time_percent: float = 0.0
    margin_energy_percent: float = 0.0


@dataclass(frozen=True, slots=True)
class SolveFailed:
    """Solving failed; `cause` is for people."""

    cause: str


@dataclass(frozen=True, slots=True)
class SolveRetried:
    """Solving begins again after `delay_s`: `crash_count` processes have died over the problem so far."""

    cause: str
    crash_count: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class PlannedIteration:
    """What a plan predicts for a pipeline's iteration."""

    iteration_time_s: float
    energy_j: float


@dataclass(frozen=True, slots=True)
class PipelineClocks:
    """Clocks of a pipeline, offered or in force on all its ranks.

    They are a plan, or one clock for each stage (`held_clocks_mhz`), or without either stock.
    """

    pipeline: int
    version: int
    changed_stages: tuple[int, ...]
    start_iteration: int
    held_clocks_mhz: tuple[int, ...] | None = None
    plan: PlannedIteration | None = None


@dataclass(frozen=True, slots=True)
class PlanRefused:
    """A rank refused an offer; `iteration` is the highest that it had begun, -1 if none."""

    rank: Coordinates
    version: int
    start_iteration: int
    iteration: int
    reason: RefusalReason
    refused_clocks_mhz: tuple[int, ...]
    agent_message: str


@dataclass(frozen=True, slots=True)
class StragglerReported:
    """A straggler was reported, by its iteration time or its factor of T_min.

    `target_time_s` is T', 0 before the job is solved.
    """

    pipeline: int
    iteration_time_s: float | None
    slowdown_factor: float | None
    target_time_s: float


@dataclass(frozen=True, slots=True)
class StragglerCleared:
    """A reported straggler was cleared. Its factor as detected counts from now on; None if it is none."""

    pipeline: int
    detected_slowdown_factor: float | None


@dataclass(frozen=True, slots=True)
class StragglerFinding:
    """What speaks for or against a straggler: the detector's Finding, and whether a report overrides it."""

    pipeline: int
    slowdown_factor: float
    waited_factor: float
    iteration: int
    iteration_count: int
    span_s: float
    planned_span_s: float
    excess: float
    noise: float
    limit: float
    slowest_stage: int
    stage_ratio: float
    clock_event_reasons: int
    is_overridden: bool


@dataclass(frozen=True, slots=True)
class PolicySet:
    """The operating policy was set."""

    policy: OperatingPolicy


@dataclass(frozen=True, slots=True)
class RankGpuError:
    """A rank's GPU, or the way to it, refused or failed to do something."""

    rank: Coordinates
    gpu_uuid: str
    reason: GpuErrorReason
    agent_message: str


@dataclass(frozen=True, slots=True)
class PromiseBroken:
    """Iterations took longer than the plans in force promised.

    `plan_versions`: each pipeline's, or a single one where all have the same.
    """

    promised_time_s: float
    median_time_s: float
    baseline_time_s: float
    iteration_times_s: tuple[float, ...]
    last_iteration: int
    plan_versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProfileCorrected:
    """Computations take other times than the plans were made with; named are those that differ most.

    `ratio` is measured over planned time; `corrected_count` counts places (stage, clock, chunk and kind).
    """

    stage: int
    clock_mhz: int
    chunk: int
    kind: Kind
    ratio: float
    corrected_count: int


@dataclass(frozen=True, slots=True)
class BaselineRequested:
    """The stock baseline is measured again; the one so far."""

    baseline_time_s: float


@dataclass(frozen=True, slots=True)
class Quarantined:
    """The coordinator failed at a part of the job, which was in a state; `error` is for people."""

    part: FaultyPart
    error: str
    before: JobState


@dataclass(frozen=True, slots=True)
class EventsDropped:
    """Agents cause more events than the job's budget allows; `dropped_count` so far in this flood.

    Told when the first is dropped, and again when the flood is over.
    """

    dropped_count: int
    is_over: bool


@dataclass(frozen=True, slots=True)
class ClockCapped:
    """A rank's GPU reached `clock_mhz`, where its stage was planned with more; `clock_event_reasons`: why.

    Its stage is planned without higher ones for `hold_s`.
    """

    rank: Coordinates
    clock_mhz: int
    planned_clock_mhz: int
    clock_event_reasons: int
    hold_s: float


@dataclass(frozen=True, slots=True)
class GpuLimitsChanged:
    """Somebody has changed a GPU's power limit (0: unknown) or workload power profiles."""

    rank: Coordinates
    before_power_limit_w: float
    power_limit_w: float
    before_workload_power_profiles: tuple[int, ...]
    workload_power_profiles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MeasurementsUnexplained:
    """No time that transfers could take explains how much longer a plan's iterations take than promised.

    What was measured of the plan and of stock, and what the model says of them; `residual_s` is what remains
    of the difference. `transfer_lag_s`: what a transfer between stages takes in the model.
    """

    median_time_s: float
    baseline_time_s: float
    predicted_time_s: float
    predicted_baseline_time_s: float
    residual_s: float
    transfer_lag_s: float


@dataclass(frozen=True, slots=True)
class BudgetPaced:
    """A power budget says how long iterations are to take; None where the job's own policy counts."""

    iteration_time_s: float | None
    before_iteration_time_s: float | None
    is_urgent: bool


Evidence = (
    Registered
    | StateChanged
    | RankChanged
    | ClockProfiled
    | ClockGivenUp
    | ProfileAdopted
    | ProfilingEnded
    | Solved
    | SolveFailed
    | SolveRetried
    | PipelineClocks
    | PlanRefused
    | StragglerReported
    | StragglerCleared
    | StragglerFinding
    | PolicySet
    | RankGpuError
    | PromiseBroken
    | ProfileCorrected
    | BaselineRequested
    | Quarantined
    | EventsDropped
    | ClockCapped
    | GpuLimitsChanged
    | MeasurementsUnexplained
    | BudgetPaced
    | Stall
)

EVIDENCE: Mapping[EventType, type[Evidence]] = {
    EventType.REGISTERED: Registered,
    EventType.STATE_CHANGED: StateChanged,
    EventType.RANK_CHANGED: RankChanged,
    EventType.CLOCK_PROFILED: ClockProfiled,
    EventType.CLOCK_GIVEN_UP: ClockGivenUp,
    EventType.PROFILE_ADOPTED: ProfileAdopted,
    EventType.PROFILING_ENDED: ProfilingEnded,
    EventType.SOLVED: Solved,
    EventType.SOLVE_FAILED: SolveFailed,
    EventType.SOLVE_RETRIED: SolveRetried,
    EventType.PLAN_OFFERED: PipelineClocks,
    EventType.PLAN_IN_FORCE: PipelineClocks,
    EventType.PLAN_REFUSED: PlanRefused,
    EventType.STRAGGLER_REPORTED: StragglerReported,
    EventType.STRAGGLER_CLEARED: StragglerCleared,
    EventType.STRAGGLER_DETECTED: StragglerFinding,
    EventType.STRAGGLER_WITHDRAWN: StragglerFinding,
    EventType.POLICY_SET: PolicySet,
    EventType.GPU_ERROR: RankGpuError,
    EventType.PROMISE_BROKEN: PromiseBroken,
    EventType.PROFILE_CORRECTED: ProfileCorrected,
    EventType.BASELINE_REQUESTED: BaselineRequested,
    EventType.QUARANTINED: Quarantined,
    EventType.EVENTS_DROPPED: EventsDropped,
    EventType.CLOCK_CAPPED: ClockCapped,
    EventType.GPU_LIMITS_CHANGED: GpuLimitsChanged,
    EventType.MEASUREMENTS_UNEXPLAINED: MeasurementsUnexplained,
    EventType.BUDGET_PACED: BudgetPaced,
    EventType.STALLED: Stall,
    EventType.STALL_ENDED: Stall,
}
"""The class of each type's evidence; a type that is not here has none."""
