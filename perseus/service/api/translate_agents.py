"""Translation between the messages of agents' streams and the coordinator's values.

`…_from_proto` checks what types can't express (a missing message, an unknown enum, a column of another
length,
a number or a text out of bounds) and raises InvalidFieldError with the field's path: within the batch for
telemetry, within the stream's message for everything else. Repeated fields become lists at once.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from perseus.bundles import encoded_field
from perseus.service.api.memo import Memo
from perseus.service.api.translate_jobs import coordinates_from_proto
from perseus.service.api.translate_problems import (
    KIND_FROM_PROTO,
    kind_from_proto,
    stage_plan_to_proto,
)
from perseus.service.domain.bounds import (
    MAX_CLOCK_COUNT,
    MAX_COUNT,
    MAX_POWER_PROFILE,
    MAX_POWER_PROFILE_COUNT,
    MAX_RANK_POWER_W,
    MAX_SENTENCE_LENGTH,
    check_ascii,
    check_range,
    check_size,
    check_text,
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
from perseus.service.domain.messages import NUMBERS, coordinates_to_proto
from perseus.service.domain.model import (
    STOCK_MHZ,
    Gpu,
    GpuErrorReason,
    HoldClocks,
    MaxClock,
    Offer,
    PlannedClocks,
    RankLeftReason,
    RefusalReason,
)
from perseus.service.domain.power_reading import PowerReading
from perseus.service.domain.specification import (
    MAX_FINGERPRINT_LENGTH,
    MAX_PIPELINE_COUNT,
    MAX_STAGE_COUNT,
    MAX_TENSOR_COUNT,
    Coordinates,
)
from perseus.service.domain.telemetry import (
    KINDS,
    ClockStatistics,
    ComputationColumns,
    EnergyEstimate,
    EnergySample,
    ForeignClock,
    GpuLimits,
    IterationColumns,
    TelemetryBatch,
)
from perseus.solver import MAX_CLOCK_MHZ, PlannedComputation
from perseus.v1 import (
    agent_service_pb2,
    clock_statistics_pb2,
    rank_pb2,
)

_SHOWN_COUNT = 10

_KNOWN: dict[tuple[int, ...], tuple[list[int], list[int], list[int]]] = {}
"""Kinds, microbatches and chunks of valid batches, by the kinds on the wire: a stage has one order."""

_KNOWN_LIMIT, _KNOWN_ROWS = 128, 1024
"""Orders that are kept, and the longest of them: some 12 MB at most."""

_NO_ROWS = agent_service_pb2.ComputationColumns()

RankMessage = (
    agent_service_pb2.RankJoined
    | agent_service_pb2.RankLeft
    | agent_service_pb2.GpuError
    | agent_service_pb2.PlanAnswer
    | agent_service_pb2.PlanInForce
    | agent_service_pb2.TelemetryBatch
    | agent_service_pb2.TrainerUnmarked
)
"""Messages about one rank."""

_LEFT_REASON = {NUMBERS[reason]: reason for reason in RankLeftReason}
_GPU_ERROR_REASON = {NUMBERS[reason]: reason for reason in GpuErrorReason}
_REFUSAL_REASON = {NUMBERS[reason]: reason for reason in RefusalReason}

# Index into KINDS by the wire's number.
_KIND_INDEX = {number: KINDS.index(kind) for number, kind in KIND_FROM_PROTO.items()}


def unknown_fields(message: Message) -> str:
    """Return the numbers of the fields that this version of the contract doesn't have; empty if none."""
    fields = UnknownFieldSet(message)
    numbers = sorted({fields[index].field_number for index in range(min(len(fields), _SHOWN_COUNT))})
    return ", ".join(str(number) for number in numbers)


def check_hello(message: agent_service_pb2.Hello) -> None:
    """Check a hello.

    Raises:
        InvalidFieldError: names the invalid field.
    """
    check_text("hello.instance_id", message.instance_id, minimum=1)
    check_text("hello.agent_version", message.agent_version)
    check_text("hello.hostname", message.hostname)
    check_range("hello.protocol_version", message.protocol_version, 0, MAX_COUNT)
    check_text("hello.commit_marker", message.commit_marker)
    check_text("hello.instance_key", message.instance_key)
    check_range("hello.max_bundle_bytes", message.max_bundle_bytes, 0, MAX_COUNT)
    check_range("hello.slot", message.slot, 0, MAX_COUNT)


def place_from_proto(message: RankMessage, field: str = "") -> Coordinates:
    """Return the rank that a message is about, not yet checked against its job.

    Raises:
        InvalidFieldError: it names no rank: absent coordinates are not the first rank.
    """
    if not message.HasField("rank"):
        raise InvalidFieldError(
            field=f"{field}.rank" if field else "rank", expected="a rank's place", found="none"
        )
    return coordinates_from_proto(message.rank)


def gpu_uuid_from_proto(message: agent_service_pb2.RankJoined) -> str:
    """Return the UUID of an announced rank's GPU.

    Raises:
        InvalidFieldError: it is empty, too long or not printable.
    """
    return check_text("rank_joined.gpu.uuid", message.gpu.uuid, minimum=1)


def joined_from_proto(message: agent_service_pb2.RankJoined, instance_id: str, hostname: str) -> RankJoined:
    """Return an announced rank.

    Raises:
        InvalidFieldError: a number is out of range, or the GPU has no clocks.
    """
    rank = place_from_proto(message, "rank_joined")
    check_size("rank_joined.gpu.supported_clocks_mhz", len(message.gpu.supported_clocks_mhz), MAX_CLOCK_COUNT)
    clocks_mhz = tuple(message.gpu.supported_clocks_mhz)
    if (
        not clocks_mhz
        or not 1 <= min(clocks_mhz) <= max(clocks_mhz) <= MAX_CLOCK_MHZ
        or list(clocks_mhz) != sorted(set(clocks_mhz), reverse=True)
    ):
        raise InvalidFieldError(
            field="rank_joined.gpu.supported_clocks_mhz",
            expected=f"at least one clock from 1 to {MAX_CLOCK_MHZ}, each once, highest first",
            found=list(clocks_mhz),
        )
    limits = _limits_from_proto(message.gpu, "rank_joined.gpu")
    check_ascii("rank_joined.spec_fingerprint", message.spec_fingerprint, 0, MAX_FINGERPRINT_LENGTH)
    iteration = _begun_iteration(message, "rank_joined")
    check_range("rank_joined.in_force_version", message.in_force_version, 0, MAX_COUNT)
    check_range("rank_joined.after_sequence", message.after_sequence, 0, MAX_COUNT)
    check_text("rank_joined.in_force_epoch", message.in_force_epoch)
    check_text("rank_joined.owner", message.owner)
    return RankJoined(
        rank=rank,
        instance_id=instance_id,
        hostname=hostname,
        gpu=Gpu(
            gpu_uuid_from_proto(message),
            check_text("rank_joined.gpu.model", message.gpu.model),
            clocks_mhz,
            limits.power_limit_w,
            limits.power_profiles,
        ),
        iteration=iteration,
        in_force_epoch=message.in_force_epoch,
        in_force_version=message.in_force_version,
        after_sequence=message.after_sequence,
        spec_fingerprint=message.spec_fingerprint,
    )


def _limits_from_proto(message: agent_service_pb2.Gpu | agent_service_pb2.GpuLimits, field: str) -> GpuLimits:
    check_range(f"{field}.power_limit_w", message.power_limit_w, 0, MAX_RANK_POWER_W)
    profiles = tuple(message.workload_power_profiles)
    if not profiles:
        return GpuLimits(message.power_limit_w)
    name = f"{field}.workload_power_profiles"
    check_size(name, len(profiles), MAX_POWER_PROFILE_COUNT)
    for row, profile in enumerate(profiles):
        check_range(f"{name}[{row}]", profile, 0, MAX_POWER_PROFILE)
    if list(profiles) != sorted(set(profiles)):
        raise InvalidFieldError(field=name, expected="each once, rising", found=list(profiles))
    return GpuLimits(message.power_limit_w, profiles)


def _foreign_clock_from_proto(message: rank_pb2.ForeignClock) -> ForeignClock:
    check_range("foreign_clock.clock_mhz", message.clock_mhz, 1, MAX_CLOCK_MHZ)
    check_range("foreign_clock.wanted_clock_mhz", message.wanted_clock_mhz, 0, MAX_CLOCK_MHZ)
    return ForeignClock(message.clock_mhz, message.wanted_clock_mhz)


def _begun_iteration(
    message: agent_service_pb2.RankJoined | agent_service_pb2.PlanAnswer | agent_service_pb2.PlanInForce,
    field: str,
) -> int:
    if not message.HasField("iteration"):
        return -1
    check_range(f"{field}.iteration", message.iteration, -1, MAX_COUNT)
    return message.iteration


def left_from_proto(message: agent_service_pb2.RankLeft, instance_id: str) -> RankLeft:
    """Return a rank that is no longer served.

    Raises:
        InvalidFieldError: the reason is unspecified or unknown.
    """
    reason = _LEFT_REASON.get(message.reason)
    if reason is None:
        raise InvalidFieldError(field="rank_left.reason", expected="a known reason", found=message.reason)
    return RankLeft(place_from_proto(message, "rank_left"), instance_id, reason)


def gpu_error_from_proto(message: agent_service_pb2.GpuError) -> GpuErrorReported:
    """Return a GPU error of a rank.

    Raises:
        InvalidFieldError: the reason is unspecified or unknown.
    """
    reason = _GPU_ERROR_REASON.get(message.reason)
    if reason is None:
        raise InvalidFieldError(field="gpu_error.reason", expected="a known reason", found=message.reason)
    check_text("gpu_error.owner", message.owner)
    return GpuErrorReported(
        place_from_proto(message, "gpu_error"),
        check_text("gpu_error.gpu_uuid", message.gpu_uuid),
        reason,
        check_text("gpu_error.message", message.message, maximum=MAX_SENTENCE_LENGTH),
    )


def unmarked_from_proto(message: agent_service_pb2.TrainerUnmarked) -> tuple[Coordinates, str]:
    """Return a rank that marks no iterations, and why; an empty reason if it does.

    Raises:
        InvalidFieldError: the reason is too long, or no job can have the rank.
    """
    place = place_from_proto(message, "trainer_unmarked")
    for name, count in (
        ("pipeline", MAX_PIPELINE_COUNT),
        ("stage", MAX_STAGE_COUNT),
        ("tensor", MAX_TENSOR_COUNT),
    ):
        check_range(f"trainer_unmarked.rank.{name}", getattr(place, name), 0, count - 1)
    return place, check_text("trainer_unmarked.message", message.message, maximum=MAX_SENTENCE_LENGTH)


def answer_from_proto(message: agent_service_pb2.PlanAnswer, instance_id: str) -> OfferAnswered:
    """Return the answer to an offer.

    Raises:
        InvalidFieldError: a number is out of range, or a refusal has no reason.
    """
    check_range("plan_answer.version", message.version, 1, MAX_COUNT)
    iteration = _begun_iteration(message, "plan_answer")
    check_size("plan_answer.refused_clocks_mhz", len(message.refused_clocks_mhz), MAX_CLOCK_COUNT)
    for row, clock_mhz in enumerate(message.refused_clocks_mhz):
        check_range(f"plan_answer.refused_clocks_mhz[{row}]", clock_mhz, 1, MAX_CLOCK_MHZ)
    refusal = _REFUSAL_REASON.get(message.refusal_reason)
    if not message.accepted and refusal is None:
        raise InvalidFieldError(
            field="plan_answer.refusal_reason", expected="a known reason", found=message.refusal_reason
        )
    return OfferAnswered(
        rank=place_from_proto(message, "plan_answer"),
        instance_id=instance_id,
        epoch=check_text("plan_answer.epoch", message.epoch),
        version=message.version,
        refusal=None if message.accepted else refusal,
        message=check_text("plan_answer.message", message.message, maximum=MAX_SENTENCE_LENGTH),
        iteration=iteration,
        refused_clocks_mhz=tuple(message.refused_clocks_mhz),
    )


def in_force_from_proto(message: agent_service_pb2.PlanInForce, instance_id: str) -> PlanInForce:
    """Return the version that a rank has in force.

    Raises:
        InvalidFieldError: a number is out of range.
    """
    check_range("plan_in_force.version", message.version, 0, MAX_COUNT)
    iteration = _begun_iteration(message, "plan_in_force")
    return PlanInForce(
        place_from_proto(message, "plan_in_force"),
        instance_id,
        check_text("plan_in_force.epoch", message.epoch),
        message.version,
        iteration,
    )


def reading_from_proto(message: agent_service_pb2.PowerReading) -> PowerReading:
    """Return a reading of GPUs' power.

    Raises:
        InvalidFieldError: names the column and row, or the number.
    """
    return PowerReading(message.duration_s, message.gpu_uuid[:], message.power_w[:])


def telemetry_from_proto(
    message: agent_service_pb2.TelemetryBatch, instance_id: str, *, is_thinned: bool = False
) -> TelemetryArrived:
    """Return a batch as columns, checked by itself; `check_clocks` needs the rank's GPU.

    `is_thinned`: without its rows of computations.

    Raises:
        InvalidFieldError: names the column and row, or the number.
    """
    iterations, computations = message.iterations, _NO_ROWS if is_thinned else message.computations
    # A slice of a repeated field is a list, the fastest to get; so are positions of a tuple's fields.
    numbers, microbatches, chunks = computations.kind[:], computations.microbatch[:], computations.chunk[:]
    key = (*numbers,)
    known = _KNOWN.get(key)
    is_known = known is not None and known[1] == microbatches and known[2] == chunks
    if known is None or not is_known:
        known = [_KIND_INDEX.get(number, -1) for number in numbers], microbatches, chunks
    batch = TelemetryBatch(
        message.sequence,
        IterationColumns(
            iterations.iteration[:],
            iterations.plan_version[:],
            iterations.duration_s[:],
            iterations.energy_j[:],
            iterations.is_regular[:],
            iterations.clock_event_reasons[:],
            iterations.gap_time_s[:],
            iterations.gap_energy_j[:],
            iterations.gap_slowed_time_s[:],
            iterations.capped_clock_mhz[:],
            iterations.relative_work[:],
            iterations.has_clock_change[:],
            iterations.work[:],
        ),
        ComputationColumns(
            computations.iteration[:],
            *known,
            computations.begin_s[:],
            computations.duration_s[:],
            computations.clock_mhz[:],
        ),
        energy=_estimate_from_proto(message.energy) if message.HasField("energy") else None,
        dropped_batch_count=message.dropped_batch_count,
        clocks=_clocks_from_proto(message.clocks) if message.HasField("clocks") else None,
        gpu_limits=_limits_from_proto(message.gpu_limits, "gpu_limits")
        if message.HasField("gpu_limits")
        else None,
        foreign_clock=_foreign_clock_from_proto(message.foreign_clock)
        if message.HasField("foreign_clock")
        else None,
        is_thinned=is_thinned,
    )
    batch.check(is_known=is_known)
    if not is_known and len(key) <= _KNOWN_ROWS:
        while len(_KNOWN) >= _KNOWN_LIMIT:
            del _KNOWN[next(iter(_KNOWN))]
        _KNOWN[key] = known
    return TelemetryArrived(place_from_proto(message), instance_id, batch)


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
        set_latency_count=message.set_latency_count,
    )


def _estimate_from_proto(message: agent_service_pb2.EnergyEstimate) -> EnergyEstimate:
    for name in ("window_count", "discarded_window_count"):
        check_range(f"energy.{name}", getattr(message, name), 0, MAX_COUNT)
    return EnergyEstimate(
        plan_version=message.plan_version,
        iteration_count=message.iteration_count,
        samples=_samples_from_proto(message.samples, "energy.samples"),
        blocking_power_w=message.blocking_power_w if message.HasField("blocking_power_w") else None,
        blocking_power_se_w=message.blocking_power_se_w,
        undetermined=_samples_from_proto(message.undetermined, "energy.undetermined"),
        power_information=tuple(message.power_information),
        power_information_vector=tuple(message.power_information_vector),
        work=message.work,
    )


def _samples_from_proto(
    samples: Iterable[agent_service_pb2.EnergySample], field: str
) -> tuple[EnergySample, ...]:
    return tuple(
        EnergySample(
            kind=kind_from_proto(sample.kind, f"{field}[{row}].kind"),
            chunk=sample.chunk,
            clock_mhz=sample.clock_mhz,
            computation_count=sample.computation_count,
            time_s=sample.time_s,
            time_se_s=sample.time_se_s,
            energy_j=sample.energy_j,
            energy_se_j=sample.energy_se_j,
        )
        for row, sample in enumerate(samples)
    )


class EncodedOffer(NamedTuple):
    """An offer on its way to one rank.

    `clocks`: a PlanOffer with the clocks alone, encoded once for all ranks that get them.
    """

    response: agent_service_pb2.ConnectResponse
    clocks: bytes

    def ByteSize(self) -> int:  # noqa: N802 (like a message)
        """Return its size, bytes; without the headers around it."""
        return self.response.plan_offer.ByteSize() + len(self.clocks)

    def SerializeToString(self) -> bytes:  # noqa: N802
        """Return it encoded."""
        encoded = self.response.plan_offer.SerializeToString() + self.clocks
        return encoded_field(agent_service_pb2.ConnectResponse.PLAN_OFFER_FIELD_NUMBER, encoded)


def offer_to_proto(job_id: str, rank: Coordinates, offer: Offer, epoch: str, lease_s: float) -> EncodedOffer:
    """Return one rank's share of a pipeline's offer."""
    message = agent_service_pb2.PlanOffer(
        job_id=job_id,
        rank=coordinates_to_proto(rank),
        epoch=epoch,
        version=offer.version,
        start_iteration=offer.start_iteration,
        lease_s=lease_s,
        is_urgent=offer.is_urgent,
    )
    match offer.clocks:
        case PlannedClocks(plan):
            clocks = _SHARES.of(plan.stages[rank.stage])
        case HoldClocks(clocks_mhz) if clocks_mhz[rank.stage] != STOCK_MHZ:
            hold = agent_service_pb2.HoldClock(clock_mhz=clocks_mhz[rank.stage])
            clocks = agent_service_pb2.PlanOffer(hold=hold).SerializeToString()
        case _:
            clocks = _STOCK
    return EncodedOffer(agent_service_pb2.ConnectResponse(plan_offer=message), clocks)


def max_clock_to_proto(max_clock: MaxClock | None) -> agent_service_pb2.MaxClock | None:
    """Return a maximum clock; None where there is none."""
    if max_clock is None:
        return None
    return agent_service_pb2.MaxClock(clock_mhz=max_clock.clock_mhz, outlasts_lease=max_clock.outlasts_lease)


def _encoded_share(stage: Sequence[PlannedComputation]) -> bytes:
    """Return an encoded offer that contains only a stage's share of a plan."""
    if not any(planned.clock_mhz for planned in stage):
        return _STOCK
    return agent_service_pb2.PlanOffer(stage_plan=stage_plan_to_proto(stage)).SerializeToString()


_STOCK = agent_service_pb2.PlanOffer(stock=agent_service_pb2.StockClocks()).SerializeToString()

_SHARES = Memo(_encoded_share, limit=256)
"""Shares of plans: all pipelines under a plan have the same."""
