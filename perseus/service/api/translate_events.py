"""Between the wire's events and the coordinator's; the evidence of each type by itself."""

from collections.abc import Iterable
from typing import assert_never

from perseus.service.api.translate_jobs import (
    coordinates_to_proto,
    cost_to_proto,
    pacing_to_proto,
    policy_to_proto,
)
from perseus.service.api.translate_time import time_from_proto, time_to_proto
from perseus.service.domain import evidence as domain
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.events import EventFilter, JobEvent, WatchGap
from perseus.service.domain.model import (
    EventType,
    FaultyPart,
    GpuErrorReason,
    JobState,
    RankState,
    RefusalReason,
)
from perseus.service.domain.profiling import ClockGivenUpReason, ProfilingLimit
from perseus.service.domain.signals import SignalKind
from perseus.service.domain.stall import Stall, StallReason
from perseus.solver import Kind
from perseus.v1 import computation_pb2, event_pb2, job_pb2, job_service_pb2, rank_pb2

_EVENT_TYPE = {kind: event_pb2.JobEventType.Value(f"JOB_EVENT_TYPE_{kind.name}") for kind in EventType}
_EVENT_TYPE_FROM = {number: kind for kind, number in _EVENT_TYPE.items() if number}
_JOB_STATE = {state: job_pb2.JobState.Value(f"JOB_STATE_{state.name}") for state in JobState}
_RANK_STATE = {state: rank_pb2.RankState.Value(f"RANK_STATE_{state.name}") for state in RankState}
_KIND = {kind: computation_pb2.ComputationKind.Value(f"COMPUTATION_KIND_{kind.name}") for kind in Kind}
_REFUSAL = {
    reason: rank_pb2.PlanRefusalReason.Value(f"PLAN_REFUSAL_REASON_{reason.name}") for reason in RefusalReason
}
_GPU_ERROR = {
    reason: rank_pb2.GpuErrorReason.Value(f"GPU_ERROR_REASON_{reason.name}") for reason in GpuErrorReason
}
_GIVEN_UP = {
    reason: event_pb2.ClockGivenUpReason.Value(f"CLOCK_GIVEN_UP_REASON_{reason.name}")
    for reason in ClockGivenUpReason
}
_LIMIT = {limit: event_pb2.ProfilingLimit.Value(f"PROFILING_LIMIT_{limit.name}") for limit in ProfilingLimit}
_FAULTY_PART = {part: event_pb2.FaultyPart.Value(f"FAULTY_PART_{part.name}") for part in FaultyPart}
_SIGNAL_KIND = {kind: event_pb2.SignalKind.Value(f"SIGNAL_KIND_{kind.name}") for kind in SignalKind}
_STALL = {reason: event_pb2.StallReason.Value(f"STALL_REASON_{reason.name}") for reason in StallReason}


def gap_to_proto(gap: WatchGap) -> job_service_pb2.WatchGap:
    """Return what was left out of a watch."""
    return job_service_pb2.WatchGap(
        first_missed_sequence=gap.first_missed_sequence,
        last_missed_sequence=gap.last_missed_sequence,
        missed_iteration_count=gap.missed_iteration_count,
    )


def event_to_proto(event: JobEvent) -> event_pb2.JobEvent:
    """Return an event with its evidence."""
    happening = event.happening
    message = event_pb2.JobEvent(
        sequence=happening.sequence,
        create_time=time_to_proto(event.create_time_s),
        type=_EVENT_TYPE[happening.type],
        message=happening.message,
    )
    if happening.evidence is not None:
        _add_details(message, happening.evidence)
    return message


def filter_from_proto(request: job_service_pb2.ListJobEventsRequest) -> EventFilter:
    """Return which events are asked for.

    Raises:
        InvalidFieldError: a type is not known, or a time is none.
    """
    return EventFilter(
        types=frozenset(_event_types(request.types)),
        start_time_s=time_from_proto("start_time", request.start_time)
        if request.HasField("start_time")
        else None,
        end_time_s=time_from_proto("end_time", request.end_time) if request.HasField("end_time") else None,
    )


def _event_types(numbers: Iterable[int]) -> Iterable[EventType]:
    for index, number in enumerate(numbers):
        kind = _EVENT_TYPE_FROM.get(number)  # type: ignore[call-overload]
        if kind is None:
            raise InvalidFieldError(field=f"types[{index}]", expected="a known type of event", found=number)
        yield kind


def _add_details(message: event_pb2.JobEvent, evidence: domain.Evidence) -> None:
    match evidence:
        case domain.Registered():
            message.registered.CopyFrom(_registered(evidence))
        case domain.StateChanged():
            message.state_changed.CopyFrom(_state_changed(evidence))
        case domain.RankChanged():
            message.rank_changed.CopyFrom(_rank_changed(evidence))
        case domain.ClockProfiled():
            message.clock_profiled.CopyFrom(_clock_profiled(evidence))
        case domain.ClockGivenUp():
            message.clock_given_up.CopyFrom(_clock_given_up(evidence))
        case domain.ProfileAdopted():
            message.profile_adopted.CopyFrom(_profile_adopted(evidence))
        case domain.ProfilingEnded():
            message.profiling_ended.CopyFrom(_profiling_ended(evidence))
        case domain.Solved():
            message.solved.CopyFrom(_solved(evidence))
        case domain.SolveFailed():
            message.solve_failed.CopyFrom(event_pb2.SolveFailed(cause=evidence.cause))
        case domain.SolveRetried():
            message.solve_retried.CopyFrom(
                event_pb2.SolveRetried(
                    cause=evidence.cause, crash_count=evidence.crash_count, delay_s=evidence.delay_s
                )
            )
        case domain.PipelineClocks():
            message.pipeline_clocks.CopyFrom(_pipeline_clocks(evidence))
        case domain.PlanRefused():
            message.plan_refused.CopyFrom(_plan_refused(evidence))
        case domain.StragglerReported():
            message.straggler_reported.CopyFrom(_straggler_reported(evidence))
        case domain.StragglerCleared():
            message.straggler_cleared.CopyFrom(_straggler_cleared(evidence))
        case domain.StragglerFinding():
            message.straggler_finding.CopyFrom(_straggler_finding(evidence))
        case domain.PolicySet():
            message.policy_set.CopyFrom(event_pb2.PolicySet(policy=policy_to_proto(evidence.policy)))
        case domain.RankGpuError():
            message.gpu_error.CopyFrom(_gpu_error(evidence))
        case domain.PromiseBroken():
            message.promise_broken.CopyFrom(_promise_broken(evidence))
        case domain.ProfileCorrected():
            message.profile_corrected.CopyFrom(_profile_corrected(evidence))
        case domain.BaselineRequested():
            message.baseline_requested.CopyFrom(
                event_pb2.BaselineRequested(baseline_time_s=evidence.baseline_time_s)
            )
        case domain.Quarantined():
            message.quarantined.CopyFrom(_quarantined(evidence))
        case domain.EventsDropped():
            message.events_dropped.CopyFrom(
                event_pb2.EventsDropped(dropped_count=evidence.dropped_count, is_over=evidence.is_over)
            )
        case domain.ClockCapped():
            message.clock_capped.CopyFrom(_clock_capped(evidence))
        case domain.GpuLimitsChanged():
            message.gpu_limits_changed.CopyFrom(_gpu_limits_changed(evidence))
        case domain.MeasurementsUnexplained():
            message.measurements_unexplained.CopyFrom(_measurements_unexplained(evidence))
        case domain.BudgetPaced():
            message.budget_paced.CopyFrom(
                event_pb2.BudgetPaced(
                    iteration_time_s=evidence.iteration_time_s,
                    before_iteration_time_s=evidence.before_iteration_time_s,
                    is_urgent=evidence.is_urgent,
                )
            )
        case domain.SignalPaced():
            message.signal_paced.CopyFrom(
                event_pb2.SignalPaced(
                    kind=_SIGNAL_KIND[evidence.kind],
                    pacing=pacing_to_proto(evidence.pacing),
                    before_iteration_time_s=evidence.before_iteration_time_s,
                )
            )
        case Stall():
            message.stall.CopyFrom(_stall(evidence))
        case _:
            assert_never(evidence)


def _registered(evidence: domain.Registered) -> event_pb2.Registered:
    counts = evidence.parallelism
    return event_pb2.Registered(
        parallelism=job_pb2.Parallelism(
            pipeline_count=counts.pipeline_count,
            stage_count=counts.stage_count,
            tensor_count=counts.tensor_count,
        )
    )


def _quarantined(evidence: domain.Quarantined) -> event_pb2.Quarantined:
    return event_pb2.Quarantined(
        part=_FAULTY_PART[evidence.part], error=evidence.error, before=_JOB_STATE[evidence.before]
    )


def _state_changed(evidence: domain.StateChanged) -> event_pb2.StateChanged:
    return event_pb2.StateChanged(
        before=_JOB_STATE[evidence.before], after=_JOB_STATE[evidence.after], reason=evidence.reason
    )


def _rank_changed(evidence: domain.RankChanged) -> event_pb2.RankChanged:
    return event_pb2.RankChanged(
        rank=coordinates_to_proto(evidence.rank),
        state=_RANK_STATE[evidence.state],
        instance_id=evidence.instance_id,
        hostname=evidence.hostname,
        gpu_uuid=evidence.gpu_uuid,
        reason=evidence.reason,
    )


def _clock_profiled(evidence: domain.ClockProfiled) -> event_pb2.ClockProfiled:
    return event_pb2.ClockProfiled(
        clocks_mhz=evidence.clocks_mhz,
        iteration_count=evidence.iteration_count,
        blocking_powers=[
            event_pb2.StagePower(stage=power.stage, power_w=power.power_w)
            for power in evidence.blocking_powers
        ],
    )


def _clock_given_up(evidence: domain.ClockGivenUp) -> event_pb2.ClockGivenUp:
    return event_pb2.ClockGivenUp(
        stage=evidence.stage,
        clock_mhz=evidence.clock_mhz,
        iteration_count=evidence.iteration_count,
        disturbed_pipelines=evidence.disturbed_pipelines,
        reason=_GIVEN_UP[evidence.reason],
        rank=None if evidence.rank is None else coordinates_to_proto(evidence.rank),
    )


def _profile_adopted(evidence: domain.ProfileAdopted) -> event_pb2.ProfileAdopted:
    return event_pb2.ProfileAdopted(
        stages=evidence.stages,
        clock_count=evidence.clock_count,
        source_job_id=evidence.source_job_id,
        source_run_number=evidence.source_run_number,
    )


def _profiling_ended(evidence: domain.ProfilingEnded) -> event_pb2.ProfilingEnded:
    return event_pb2.ProfilingEnded(
        is_enough=evidence.is_enough,
        limit=None if evidence.limit is None else _LIMIT[evidence.limit],
        cost=cost_to_proto(evidence.cost),
    )


def _solved(evidence: domain.Solved) -> event_pb2.Solved:
    return event_pb2.Solved(
        t_min_s=evidence.t_min_s,
        t_star_s=evidence.t_star_s,
        t_slow_s=evidence.t_slow_s,
        baseline_energy_j=evidence.baseline_energy_j,
        t_min_energy_j=evidence.t_min_energy_j,
        point_count=evidence.point_count,
        confidence=evidence.confidence,
        margin_time_percent=evidence.margin_time_percent,
        margin_energy_percent=evidence.margin_energy_percent,
        transfer_lag_s=evidence.transfer_lag_s,
        set_latency_s=evidence.set_latency_s,
        latency_cost_percent=evidence.latency_cost_percent,
    )


def _pipeline_clocks(evidence: domain.PipelineClocks) -> event_pb2.PipelineClocks:
    message = event_pb2.PipelineClocks(
        pipeline=evidence.pipeline,
        version=evidence.version,
        changed_stages=evidence.changed_stages,
        start_iteration=evidence.start_iteration,
    )
    if evidence.plan is not None:
        message.plan.iteration_time_s = evidence.plan.iteration_time_s
        message.plan.energy_j = evidence.plan.energy_j
    elif evidence.held_clocks_mhz is not None:
        message.hold.clocks_mhz.extend(evidence.held_clocks_mhz)
    else:
        message.stock.SetInParent()
    return message


def _plan_refused(evidence: domain.PlanRefused) -> event_pb2.PlanRefused:
    return event_pb2.PlanRefused(
        rank=coordinates_to_proto(evidence.rank),
        version=evidence.version,
        start_iteration=evidence.start_iteration,
        iteration=evidence.iteration,
        reason=_REFUSAL[evidence.reason],
        refused_clocks_mhz=evidence.refused_clocks_mhz,
        agent_message=evidence.agent_message,
    )


def _straggler_reported(evidence: domain.StragglerReported) -> event_pb2.StragglerReported:
    message = event_pb2.StragglerReported(pipeline=evidence.pipeline, target_time_s=evidence.target_time_s)
    if evidence.iteration_time_s is not None:
        message.iteration_time_s = evidence.iteration_time_s
    elif evidence.slowdown_factor is not None:
        message.slowdown_factor = evidence.slowdown_factor
    return message


def _straggler_cleared(evidence: domain.StragglerCleared) -> event_pb2.StragglerCleared:
    return event_pb2.StragglerCleared(
        pipeline=evidence.pipeline, detected_slowdown_factor=evidence.detected_slowdown_factor
    )


def _straggler_finding(evidence: domain.StragglerFinding) -> event_pb2.StragglerFinding:
    return event_pb2.StragglerFinding(
        pipeline=evidence.pipeline,
        slowdown_factor=evidence.slowdown_factor,
        waited_factor=evidence.waited_factor,
        iteration=evidence.iteration,
        iteration_count=evidence.iteration_count,
        span_s=evidence.span_s,
        planned_span_s=evidence.planned_span_s,
        excess=evidence.excess,
        noise=evidence.noise,
        limit=evidence.limit,
        slowest_stage=evidence.slowest_stage,
        stage_ratio=evidence.stage_ratio,
        clock_event_reasons=evidence.clock_event_reasons,
        is_overridden=evidence.is_overridden,
    )


def _gpu_error(evidence: domain.RankGpuError) -> event_pb2.RankGpuError:
    return event_pb2.RankGpuError(
        rank=coordinates_to_proto(evidence.rank),
        gpu_uuid=evidence.gpu_uuid,
        reason=_GPU_ERROR[evidence.reason],
        agent_message=evidence.agent_message,
    )


def _promise_broken(evidence: domain.PromiseBroken) -> event_pb2.PromiseBroken:
    return event_pb2.PromiseBroken(
        promised_time_s=evidence.promised_time_s,
        median_time_s=evidence.median_time_s,
        baseline_time_s=evidence.baseline_time_s,
        iteration_times_s=evidence.iteration_times_s,
        last_iteration=evidence.last_iteration,
        plan_versions=evidence.plan_versions,
    )


def _profile_corrected(evidence: domain.ProfileCorrected) -> event_pb2.ProfileCorrected:
    return event_pb2.ProfileCorrected(
        stage=evidence.stage,
        clock_mhz=evidence.clock_mhz,
        chunk=evidence.chunk,
        kind=_KIND[evidence.kind],
        ratio=evidence.ratio,
        corrected_count=evidence.corrected_count,
    )


def _clock_capped(evidence: domain.ClockCapped) -> event_pb2.ClockCapped:
    return event_pb2.ClockCapped(
        rank=coordinates_to_proto(evidence.rank),
        clock_mhz=evidence.clock_mhz,
        planned_clock_mhz=evidence.planned_clock_mhz,
        clock_event_reasons=evidence.clock_event_reasons,
        hold_s=evidence.hold_s,
    )


def _measurements_unexplained(evidence: domain.MeasurementsUnexplained) -> event_pb2.MeasurementsUnexplained:
    return event_pb2.MeasurementsUnexplained(
        median_time_s=evidence.median_time_s,
        baseline_time_s=evidence.baseline_time_s,
        predicted_time_s=evidence.predicted_time_s,
        predicted_baseline_time_s=evidence.predicted_baseline_time_s,
        residual_s=evidence.residual_s,
        transfer_lag_s=evidence.transfer_lag_s,
    )


def _gpu_limits_changed(evidence: domain.GpuLimitsChanged) -> event_pb2.GpuLimitsChanged:
    return event_pb2.GpuLimitsChanged(
        rank=coordinates_to_proto(evidence.rank),
        before_power_limit_w=evidence.before_power_limit_w,
        power_limit_w=evidence.power_limit_w,
        before_workload_power_profiles=evidence.before_workload_power_profiles,
        workload_power_profiles=evidence.workload_power_profiles,
    )


def _stall(evidence: Stall) -> event_pb2.Stall:
    return event_pb2.Stall(
        reason=_STALL[evidence.reason],
        rank=None if evidence.rank is None else coordinates_to_proto(evidence.rank),
        rank_count=evidence.rank_count,
        since_time=time_to_proto(evidence.since_time_s),
        iteration=evidence.iteration,
    )
