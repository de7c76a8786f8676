"""Translation between the contract's jobs and reports, and the coordinator's values.

`…_from_proto` checks what types can't express (a missing message, an unknown enum) and raises
InvalidFieldError with the field's name.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import TypeVar

from perseus.service.api.translate_problems import (
    schedule_spec_from_proto,
)
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.measured import Period, Saving
from perseus.service.domain.messages import (
    NUMBERS,
    coordinates_to_proto,
    foreign_clock_to_proto,
    saving_to_proto,
    time_from_proto,
    time_to_proto,
)
from perseus.service.domain.model import (
    EventFilter,
    JobState,
    Rank,
    RankFilter,
    RankState,
    Straggler,
)
from perseus.service.domain.signals import (
    ExtraTime,
    SignalKind,
    SignalRule,
    WorkUntil,
)
from perseus.service.domain.specification import (
    MAX_CHUNK_COUNT,
    BudgetTerms,
    Coordinates,
    Deadline,
    JobSpec,
    OperatingPolicy,
    Parallelism,
)
from perseus.service.domain.telemetry import ClockStatistics
from perseus.v1 import (
    clock_statistics_pb2,
    event_pb2,
    job_pb2,
    job_service_pb2,
    rank_pb2,
)

T = TypeVar("T")
State = TypeVar("State", JobState, RankState)


def spec_from_proto(message: job_pb2.JobSpec) -> JobSpec:
    """Return the specification, its parts present but its values not yet checked (`JobSpec.check`).

    Raises:
        InvalidFieldError: a part is missing, or has an unknown enum.
    """
    if not message.HasField("parallelism"):
        raise InvalidFieldError(field="parallelism", expected="the layout of the ranks", found="none")
    for stage, work in enumerate(message.stage_work):
        if len(work.layer_counts) > MAX_CHUNK_COUNT:
            name, expected = f"stage_work[{stage}].layer_counts", f"at most {MAX_CHUNK_COUNT}"
            raise InvalidFieldError(field=name, expected=expected, found=len(work.layer_counts))
    counts = message.parallelism
    return JobSpec(
        job_id=message.job_id,
        parallelism=Parallelism(counts.pipeline_count, counts.stage_count, counts.tensor_count),
        schedule=schedule_spec_from_proto(message.schedule),
        policy=policy_from_proto(message.policy) if message.HasField("policy") else OperatingPolicy(),
        stage_work=_unless_empty(work.fingerprint for work in message.stage_work),
        stage_layers=_unless_empty(tuple(work.layer_counts) for work in message.stage_work),
    )


def _unless_empty(of_stages: Iterable[T]) -> tuple[T, ...]:
    """Return the values of the stages; none if all are empty, as it was specified without them."""
    values = tuple(of_stages)
    return values if any(values) else ()


def policy_from_proto(message: job_pb2.OperatingPolicy) -> OperatingPolicy:
    """Return the policy; no rule means no slowdown.

    Raises:
        InvalidFieldError: a time is invalid.
    """
    terms = None
    if message.HasField("budget_terms"):
        terms = BudgetTerms(message.budget_terms.tolerance_percent, message.budget_terms.weight)
    match message.WhichOneof("rule"):
        case "deadline":
            deadline = Deadline(message.deadline.iteration_count, message.deadline.time_s)
            return OperatingPolicy(deadline=deadline, budget_terms=terms)
        case "max_average_power_w":
            return OperatingPolicy(max_average_power_w=message.max_average_power_w, budget_terms=terms)
        case "least_carbon":
            rule = _signal_rule(SignalKind.CARBON, message.least_carbon)
            return OperatingPolicy(signal=rule, budget_terms=terms)
        case "least_cost":
            rule = _signal_rule(SignalKind.PRICE, message.least_cost)
            return OperatingPolicy(signal=rule, budget_terms=terms)
    return OperatingPolicy(message.max_slowdown_percent, budget_terms=terms)


def _signal_rule(kind: SignalKind, message: job_pb2.LeastSignal) -> SignalRule:
    match message.WhichOneof("time"):
        case "extra_time":
            return SignalRule(kind, ExtraTime(message.extra_time.percent, message.extra_time.horizon_s))
        case "work_until":
            work = message.work_until
            if not work.HasField("end_time"):
                raise InvalidFieldError(field="work_until.end_time", expected="a time", found="none")
            end_s = time_from_proto("work_until.end_time", work.end_time)
            return SignalRule(kind, work_until=WorkUntil(work.iteration_count, end_s))
    return SignalRule(kind)


def straggler_from_proto(message: job_service_pb2.ReportStragglerRequest) -> Straggler:
    """Return the reported straggler."""
    slowness = message.WhichOneof("slowness")
    return Straggler(
        pipeline=message.pipeline,
        iteration_time_s=message.iteration_time_s if slowness == "iteration_time_s" else None,
        slowdown_factor=message.slowdown_factor if slowness == "slowdown_factor" else None,
    )


def is_full(view: int, *, default: bool) -> bool:
    """Return whether the view asks for a job's details; the default where it is unspecified.

    Raises:
        InvalidFieldError: an unknown view.
    """
    known: dict[int, bool] = {
        job_pb2.JOB_VIEW_UNSPECIFIED: default,
        job_pb2.JOB_VIEW_SUMMARY: False,
        job_pb2.JOB_VIEW_FULL: True,
    }
    if view not in known:
        raise InvalidFieldError(field="view", expected="a known view", found=view)
    return known[view]


def job_states_from_proto(states: Iterable[int]) -> frozenset[JobState]:
    """Return the states of a filter.

    Raises:
        InvalidFieldError: one of them is unknown.
    """
    return _states_from_proto(states, JobState)


def rank_filter_from_proto(message: job_service_pb2.ListRanksRequest) -> RankFilter:
    """Return the filter of ranks, not yet checked against the job.

    Raises:
        InvalidFieldError: a state is unknown.
    """
    return RankFilter(
        states=_states_from_proto(message.states, RankState),
        pipeline=message.pipeline if message.HasField("pipeline") else None,
        stage=message.stage if message.HasField("stage") else None,
    )


def event_filter_from_proto(message: job_service_pb2.ListJobEventsRequest) -> EventFilter:
    """Return the filter of events.

    Raises:
        InvalidFieldError: a type is unknown, or a time is invalid.
    """
    for index, number in enumerate(message.types):
        if number not in event_pb2.JobEventType.values() or not number:
            raise InvalidFieldError(field=f"types[{index}]", expected="a known type of event", found=number)
    return EventFilter(
        types=frozenset(message.types),
        start_time_s=time_from_proto("start_time", message.start_time)
        if message.HasField("start_time")
        else None,
        end_time_s=time_from_proto("end_time", message.end_time) if message.HasField("end_time") else None,
        is_latest_first=message.latest_first,
    )


def coordinates_from_proto(message: rank_pb2.RankCoordinates) -> Coordinates:
    """Return a rank's coordinates, not yet checked against its job."""
    return _coordinates(message.pipeline, message.stage, message.tensor)


_coordinates = lru_cache(maxsize=8192)(Coordinates)
"""Every batch has some; making them takes several times as long."""


def rank_to_proto(rank: Rank) -> rank_pb2.Rank:
    """Return a rank."""
    return rank_pb2.Rank(
        coordinates=coordinates_to_proto(rank.coordinates),
        state=NUMBERS[rank.state],
        hostname=rank.hostname,
        gpu_uuid=rank.gpu.uuid if rank.gpu else "",
        gpu_model=rank.gpu.model if rank.gpu else "",
        offered_version=rank.offered_version,
        in_force_version=max(0, rank.in_force_version),
        iteration=rank.iteration,
        clocks=_clocks_to_proto(rank.clocks) if rank.clocks is not None else None,
        power_limit_w=rank.gpu.power_limit_w if rank.gpu else 0.0,
        workload_power_profiles=rank.gpu.power_profiles if rank.gpu else (),
        clock_event_reasons=rank.clock_event_reasons,
        capped_clock_mhz=rank.capped_clock_mhz,
        foreign_clock=foreign_clock_to_proto(rank.foreign_clock),
    )


def labels_from_proto(labels: Iterable[job_pb2.Label]) -> tuple[tuple[str, str], ...]:
    """Return labels, sorted by key."""
    return tuple(sorted((label.key, label.value) for label in labels))


def period_to_proto(period: Period, saving: Saving | None) -> job_pb2.ReportPeriod:
    """Return a period of the report, with its saving if it can be compared with stock."""
    are_same = len(set(period.versions)) == 1
    return job_pb2.ReportPeriod(
        number=period.number,
        state=NUMBERS[period.state],
        has_straggler=period.has_straggler,
        plan_versions=period.versions[:1] if are_same else period.versions,
        first_iteration=period.first_iteration,
        last_iteration=period.last_iteration,
        start_time=time_to_proto(period.start_time_s),
        end_time=time_to_proto(period.end_time_s),
        iteration_count=period.iteration_count,
        iteration_time_s=period.iteration_time_s,
        iteration_time_se_s=period.iteration_time_se_s,
        energy_j=period.energy_j,
        energy_se_j=period.energy_se_j,
        iteration_time_margin_s=period.iteration_time_margin_s,
        energy_margin_j=period.energy_margin_j,
        pipeline_energy_j=period.pipeline_energy_j,
        saving=saving_to_proto(saving) if saving is not None else None,
        gap_time_s=period.gap_time_s,
        gap_energy_j=period.gap_energy_j,
        gap_slowed_time_s=period.gap_slowed_time_s,
        irregular_count=period.irregular_count,
        irregular_time_s=period.irregular_time_s,
        latency_cost_percent=period.latency_cost_percent,
    )


def _states_from_proto(numbers: Iterable[int], known: type[State]) -> frozenset[State]:
    by_number: dict[int, State] = {NUMBERS[state]: state for state in known}
    for number in numbers:
        if number not in by_number:
            raise InvalidFieldError(field="states", expected="known states", found=number)
    return frozenset(by_number[number] for number in numbers)


def _clocks_to_proto(clocks: ClockStatistics) -> clock_statistics_pb2.ClockStatistics:
    return clock_statistics_pb2.ClockStatistics(
        plan_version=clocks.plan_version,
        set_count=clocks.set_count,
        computation_count=clocks.computation_count,
        late_raise_count=clocks.late_raise_count,
        missed_count=clocks.missed_count,
        computation_time_s=clocks.computation_time_s,
        on_clock_time_s=clocks.on_clock_time_s,
        set_latency_s=clocks.set_latency_s,
        margin_s=clocks.margin_s,
        prediction_error_s=clocks.prediction_error_s,
        set_latency_count=clocks.set_latency_count,
    )
