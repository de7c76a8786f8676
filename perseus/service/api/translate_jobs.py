"""Between the wire's messages and the coordinator's values: the only place that knows both.

What the solver works on is in its other half, `translate_problems.py`.
`…_from_proto` checks what the types can't say (a missing message, an unknown enum, a column of another
length, NaN) and raises InvalidFieldError with the field's name. Repeated fields become numpy columns at
once.
"""

import numpy as np
from google.protobuf.timestamp_pb2 import Timestamp

from perseus.service.api.translate_problems import (
    KIND_FROM_PROTO,
    computation_to_proto,
    kind_from_proto,
    schedule_spec_from_proto,
    schedule_spec_to_proto,
    stage_plan_to_proto,
)
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.inputs import (
    GpuErrorReported,
    OfferAnswered,
    PlanInForce,
    RankJoined,
    RankLeft,
    TelemetryArrived,
)
from perseus.service.domain.model import (
    STOCK_MHZ,
    EventType,
    Gpu,
    GpuErrorReason,
    HoldClocks,
    IterationSummary,
    JobState,
    JobView,
    Offer,
    PlannedClocks,
    Rank,
    RankLeftReason,
    RankState,
    RefusalReason,
    Straggler,
    stage_clocks,
)
from perseus.service.domain.specification import (
    Coordinates,
    Deadline,
    JobSpec,
    OperatingPolicy,
    Parallelism,
)
from perseus.service.domain.telemetry import (
    KINDS,
    ClockStatistics,
    ComputationColumns,
    EnergyEstimate,
    EnergySample,
    IterationColumns,
    TelemetryBatch,
)
from perseus.service.job.iterations.iteration_log import Period
from perseus.service.job.iterations.timeline_memory import Timeline
from perseus.service.storage.store import JobEvent
from perseus.solver import (
    Computation,
)
from perseus.v1 import (
    agent_service_pb2,
    clock_statistics_pb2,
    job_pb2,
    job_service_pb2,
)

_JOB_STATE = {state: job_pb2.JobState.Value(f"JOB_STATE_{state.name}") for state in JobState}
_RANK_STATE = {state: job_pb2.RankState.Value(f"RANK_STATE_{state.name}") for state in RankState}
_EVENT_TYPE = {kind: job_pb2.JobEventType.Value(f"JOB_EVENT_TYPE_{kind.name}") for kind in EventType}
_LEFT_REASON = {
    agent_service_pb2.RankLeftReason.Value(f"RANK_LEFT_REASON_{reason.name}"): reason
    for reason in RankLeftReason
}
_GPU_ERROR_REASON = {
    agent_service_pb2.GpuErrorReason.Value(f"GPU_ERROR_REASON_{reason.name}"): reason
    for reason in GpuErrorReason
}
_REFUSAL_REASON = {
    agent_service_pb2.PlanRefusalReason.Value(f"PLAN_REFUSAL_REASON_{reason.name}"): reason
    for reason in RefusalReason
}

# Index into KINDS by the wire's number; -1 for what is no kind.
_KIND_INDEX = np.full(max(KIND_FROM_PROTO) + 1, -1, dtype=np.int64)
for _number, _kind in KIND_FROM_PROTO.items():
    _KIND_INDEX[_number] = KINDS.index(_kind)

MAX_TEXT_LENGTH = 256


# ---------------------------------------------------------------------- jobs


def spec_from_proto(message: job_pb2.JobSpec) -> JobSpec:
    """Return the specification, its parts present but its values not yet checked (`JobSpec.check`).

    Raises:
        InvalidFieldError: a part is missing, or has an unknown enum.
    """
    if not message.HasField("parallelism"):
        raise InvalidFieldError(field="parallelism", expected="the layout of the ranks", found="none")
    counts = message.parallelism
    return JobSpec(
        job_id=message.job_id,
        parallelism=Parallelism(counts.pipeline_count, counts.stage_count, counts.tensor_count),
        schedule=schedule_spec_from_proto(message.schedule),
        policy=policy_from_proto(message.policy) if message.HasField("policy") else OperatingPolicy(),
    )


def policy_from_proto(message: job_pb2.OperatingPolicy) -> OperatingPolicy:
    """Return the policy; no rule means no slowdown."""
    match message.WhichOneof("rule"):
        case "deadline":
            return OperatingPolicy(
                deadline=Deadline(message.deadline.iteration_count, message.deadline.time_s)
            )
        case "max_average_power_w":
            return OperatingPolicy(max_average_power_w=message.max_average_power_w)
    return OperatingPolicy(message.max_slowdown_percent)


def policy_to_proto(policy: OperatingPolicy) -> job_pb2.OperatingPolicy:
    """Return the policy."""
    if (deadline := policy.deadline) is not None:
        return job_pb2.OperatingPolicy(
            deadline=job_pb2.Deadline(iteration_count=deadline.iteration_count, time_s=deadline.time_s)
        )
    if policy.max_average_power_w is not None:
        return job_pb2.OperatingPolicy(max_average_power_w=policy.max_average_power_w)
    if policy.max_slowdown_percent == 0:
        return job_pb2.OperatingPolicy(no_slowdown=job_pb2.NoSlowdown())
    return job_pb2.OperatingPolicy(max_slowdown_percent=policy.max_slowdown_percent)


def straggler_from_proto(message: job_service_pb2.ReportStragglerRequest) -> Straggler:
    """Return the reported straggler."""
    slowness = message.WhichOneof("slowness")
    return Straggler(
        pipeline=message.pipeline,
        iteration_time_s=message.iteration_time_s if slowness == "iteration_time_s" else None,
        slowdown_factor=message.slowdown_factor if slowness == "slowdown_factor" else None,
    )


def coordinates_to_proto(rank: Coordinates) -> job_pb2.RankCoordinates:
    """Return a rank's place."""
    return job_pb2.RankCoordinates(pipeline=rank.pipeline, stage=rank.stage, tensor=rank.tensor)


def coordinates_from_proto(message: job_pb2.RankCoordinates) -> Coordinates:
    """Return a rank's place, not yet checked against its job."""
    return Coordinates(message.pipeline, message.stage, message.tensor)


def rank_to_proto(rank: Rank) -> job_pb2.Rank:
    """Return a rank."""
    return job_pb2.Rank(
        coordinates=coordinates_to_proto(rank.coordinates),
        state=_RANK_STATE[rank.state],
        hostname=rank.hostname,
        gpu_uuid=rank.gpu.uuid if rank.gpu else "",
        gpu_model=rank.gpu.model if rank.gpu else "",
        offered_version=rank.offered_version,
        in_force_version=max(0, rank.in_force_version),
        iteration=rank.iteration,
        clocks=_clocks_to_proto(rank.clocks) if rank.clocks is not None else None,
    )


def job_to_proto(view: JobView) -> job_pb2.Job:
    """Return a job; the specification carries the policy that is now in force."""
    spec = view.spec
    return job_pb2.Job(
        spec=job_pb2.JobSpec(
            job_id=spec.job_id,
            parallelism=job_pb2.Parallelism(
                pipeline_count=spec.parallelism.pipeline_count,
                stage_count=spec.parallelism.stage_count,
                tensor_count=spec.parallelism.tensor_count,
            ),
            schedule=schedule_spec_to_proto(spec.schedule),
            policy=policy_to_proto(view.policy),
        ),
        state=_JOB_STATE[view.state],
        epoch=view.epoch,
        ranks=[rank_to_proto(rank) for rank in view.ranks],
        stragglers=[
            job_pb2.Straggler(
                pipeline=pipeline,
                iteration_time_s=time_s,
                is_detected=pipeline in view.detected_stragglers,
            )
            for pipeline, time_s in sorted(view.straggler_times_s.items())
        ],
        profiled_clock_count=view.profiled_clock_count,
        t_min_s=view.t_min_s,
        t_slow_s=view.t_slow_s,
        planned_iteration_time_s=view.planned_iteration_time_s,
        create_time=_timestamp(view.create_time_s),
    )


def event_to_proto(event: JobEvent) -> job_pb2.JobEvent:
    """Return an event."""
    happening = event.happening
    return job_pb2.JobEvent(
        sequence=happening.sequence,
        create_time=_timestamp(event.create_time_s),
        type=_EVENT_TYPE[happening.type],
        message=happening.message,
        attributes=happening.attributes,
    )


def summary_to_proto(summary: IterationSummary) -> job_pb2.IterationSummary:
    """Return an iteration of a pipeline."""
    return job_pb2.IterationSummary(
        pipeline=summary.pipeline,
        iteration=summary.iteration,
        plan_version=summary.plan_version,
        iteration_time_s=summary.iteration_time_s,
        energy_j=summary.energy_j,
    )


def period_to_proto(period: Period) -> job_pb2.ReportPeriod:
    """Return a period of the report."""
    return job_pb2.ReportPeriod(
        state=_JOB_STATE[period.state],
        has_straggler=period.has_straggler,
        first_iteration=period.first_iteration,
        iteration_count=period.iteration_count,
        iteration_time_s=period.iteration_time_s,
        iteration_time_se_s=period.iteration_time_se_s,
        energy_j=period.energy_j,
        energy_se_j=period.energy_se_j,
        pipeline_energy_j=period.pipeline_energy_j,
    )


def timeline_to_proto(timeline: Timeline) -> job_service_pb2.GetTimelineResponse:
    """Return an iteration, each stage's computations in the order of their start."""
    response = job_service_pb2.GetTimelineResponse(
        iteration=timeline.iteration, iteration_time_s=timeline.iteration_time_s
    )
    for stage, columns in enumerate(timeline.stages):
        for row in np.argsort(columns.begin_s, kind="stable").tolist():
            computation = Computation(
                stage, KINDS[columns.kind[row]], int(columns.microbatch[row]), int(columns.chunk[row])
            )
            response.entries.add(
                stage=stage,
                computation=computation_to_proto(computation),
                start_s=columns.begin_s[row],
                duration_s=columns.duration_s[row],
                clock_mhz=int(columns.clock_mhz[row]),
            )
    return response


def _timestamp(time_s: float) -> Timestamp:
    timestamp = Timestamp()
    timestamp.FromNanoseconds(round(time_s * 1e9))
    return timestamp


# ---------------------------------------------------------------------- agents


def text_from_proto(text: str, field: str) -> str:
    """Return a text that must be there, and short.

    Raises:
        InvalidFieldError: it is not.
    """
    if not 1 <= len(text) <= MAX_TEXT_LENGTH:
        raise InvalidFieldError(field=field, expected=f"1 to {MAX_TEXT_LENGTH} characters", found=len(text))
    return text


def joined_from_proto(message: agent_service_pb2.RankJoined, instance_id: str, hostname: str) -> RankJoined:
    """Return an announced rank.

    Raises:
        InvalidFieldError: a number is out of range, or the GPU has no clocks.
    """
    clocks_mhz = tuple(message.gpu.supported_clocks_mhz)
    if not clocks_mhz or min(clocks_mhz) <= 0 or list(clocks_mhz) != sorted(set(clocks_mhz), reverse=True):
        raise InvalidFieldError(
            field="gpu.supported_clocks_mhz",
            expected="at least one clock above 0, each once, highest first",
            found=list(clocks_mhz),
        )
    _check_at_least(message.iteration, -1, "iteration")
    _check_at_least(message.in_force_version, 0, "in_force_version")
    _check_at_least(message.after_sequence, 0, "after_sequence")
    return RankJoined(
        rank=coordinates_from_proto(message.rank),
        instance_id=instance_id,
        hostname=hostname,
        gpu=Gpu(text_from_proto(message.gpu.uuid, "gpu.uuid"), message.gpu.model, clocks_mhz),
        iteration=message.iteration,
        in_force_epoch=message.in_force_epoch,
        in_force_version=message.in_force_version,
        after_sequence=message.after_sequence,
    )


def left_from_proto(message: agent_service_pb2.RankLeft, instance_id: str) -> RankLeft:
    """Return a rank that is no longer served.

    Raises:
        InvalidFieldError: the reason is unspecified or unknown.
    """
    reason = _LEFT_REASON.get(message.reason)
    if reason is None:
        raise InvalidFieldError(field="rank_left.reason", expected="a known reason", found=message.reason)
    return RankLeft(coordinates_from_proto(message.rank), instance_id, reason)


def gpu_error_from_proto(message: agent_service_pb2.GpuError) -> GpuErrorReported:
    """Return what went wrong with a rank's GPU.

    Raises:
        InvalidFieldError: the reason is unspecified or unknown.
    """
    reason = _GPU_ERROR_REASON.get(message.reason)
    if reason is None:
        raise InvalidFieldError(field="gpu_error.reason", expected="a known reason", found=message.reason)
    return GpuErrorReported(coordinates_from_proto(message.rank), message.gpu_uuid, reason, message.message)


def answer_from_proto(message: agent_service_pb2.PlanAnswer, instance_id: str) -> OfferAnswered:
    """Return the answer to an offer.

    Raises:
        InvalidFieldError: a number is out of range, or a refusal has no reason.
    """
    _check_at_least(message.version, 1, "plan_answer.version")
    _check_at_least(message.iteration, -1, "plan_answer.iteration")
    refusal = _REFUSAL_REASON.get(message.refusal_reason)
    if not message.accepted and refusal is None:
        raise InvalidFieldError(
            field="plan_answer.refusal_reason", expected="a known reason", found=message.refusal_reason
        )
    return OfferAnswered(
        rank=coordinates_from_proto(message.rank),
        instance_id=instance_id,
        epoch=message.epoch,
        version=message.version,
        refusal=None if message.accepted else refusal,
        message=message.message,
        iteration=message.iteration,
        refused_clocks_mhz=tuple(message.refused_clocks_mhz),
    )


def in_force_from_proto(message: agent_service_pb2.PlanInForce, instance_id: str) -> PlanInForce:
    """Return what is in force now.

    Raises:
        InvalidFieldError: a number is out of range.
    """
    _check_at_least(message.version, 0, "plan_in_force.version")
    _check_at_least(message.iteration, -1, "plan_in_force.iteration")
    return PlanInForce(
        coordinates_from_proto(message.rank), instance_id, message.epoch, message.version, message.iteration
    )


def telemetry_from_proto(message: agent_service_pb2.TelemetryBatch, instance_id: str) -> TelemetryArrived:
    """Return a batch as columns, checked by itself; `check_clocks` needs the rank's GPU.

    Raises:
        InvalidFieldError: names the column and row, or the figure.
    """
    iterations, computations = message.iterations, message.computations
    kinds = np.array(computations.kind, dtype=np.int64)
    batch = TelemetryBatch(
        sequence=message.sequence,
        iterations=IterationColumns(
            iteration=np.array(iterations.iteration, dtype=np.int64),
            plan_version=np.array(iterations.plan_version, dtype=np.int64),
            duration_s=np.array(iterations.duration_s, dtype=np.float64),
            energy_j=np.array(iterations.energy_j, dtype=np.float64),
            is_regular=np.array(iterations.is_regular, dtype=np.bool_),
            clock_event_reasons=np.array(iterations.clock_event_reasons, dtype=np.int64),
        ),
        computations=ComputationColumns(
            iteration=np.array(computations.iteration, dtype=np.int64),
            kind=_KIND_INDEX[np.where((kinds >= 0) & (kinds < len(_KIND_INDEX)), kinds, 0)],
            microbatch=np.array(computations.microbatch, dtype=np.int64),
            chunk=np.array(computations.chunk, dtype=np.int64),
            begin_s=np.array(computations.begin_s, dtype=np.float64),
            duration_s=np.array(computations.duration_s, dtype=np.float64),
            clock_mhz=np.array(computations.clock_mhz, dtype=np.int64),
        ),
        energy=_estimate_from_proto(message.energy) if message.HasField("energy") else None,
        dropped_batch_count=message.dropped_batch_count,
        clocks=_clocks_from_proto(message.clocks) if message.HasField("clocks") else None,
    )
    batch.check()
    return TelemetryArrived(coordinates_from_proto(message.rank), instance_id, batch)


def _clocks_from_proto(message: clock_statistics_pb2.ClockStatistics) -> ClockStatistics:
    return ClockStatistics(
        plan_version=message.plan_version,
        set_count=message.set_count,
        computation_count=message.computation_count,
        late_raise_count=message.late_raise_count,
        missed_count=message.missed_count,
        computation_time_s=message.computation_time_s,
        on_clock_time_s=message.on_clock_time_s,
        set_latency_s=message.set_latency_s,
        margin_s=message.margin_s,
        prediction_error_s=message.prediction_error_s if message.HasField("prediction_error_s") else None,
    )


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
    )


def _estimate_from_proto(message: agent_service_pb2.EnergyEstimate) -> EnergyEstimate:
    return EnergyEstimate(
        plan_version=message.plan_version,
        iteration_count=message.iteration_count,
        samples=tuple(
            EnergySample(
                kind=kind_from_proto(sample.kind, f"energy.samples[{row}].kind"),
                chunk=sample.chunk,
                clock_mhz=sample.clock_mhz,
                computation_count=sample.computation_count,
                time_s=sample.time_s,
                time_se_s=sample.time_se_s,
                energy_j=sample.energy_j,
                energy_se_j=sample.energy_se_j,
            )
            for row, sample in enumerate(message.samples)
        ),
        blocking_power_w=message.blocking_power_w,
        blocking_power_se_w=message.blocking_power_se_w,
    )


def offer_to_proto(
    job_id: str, rank: Coordinates, offer: Offer, epoch: str, lease_s: float
) -> agent_service_pb2.PlanOffer:
    """Return one rank's share of a pipeline's offer."""
    message = agent_service_pb2.PlanOffer(
        job_id=job_id,
        rank=coordinates_to_proto(rank),
        epoch=epoch,
        version=offer.version,
        start_iteration=offer.start_iteration,
        lease_s=lease_s,
    )
    if stage_clocks(offer.clocks, rank.stage) == STOCK_MHZ:
        message.stock.SetInParent()
        return message
    match offer.clocks:
        case PlannedClocks(plan):
            message.stage_plan.CopyFrom(stage_plan_to_proto(plan.stages[rank.stage]))
        case HoldClocks(clocks_mhz):
            message.hold.clock_mhz = clocks_mhz[rank.stage]
    return message


def _check_at_least(value: int, least: int, field: str) -> None:
    if value < least:
        raise InvalidFieldError(field=field, expected=f"{least} or more", found=value)
