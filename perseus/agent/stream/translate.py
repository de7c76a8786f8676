"""Translates between the stubs of `perseus.v1` and the agent's own values; no other agent module knows both.

Every received number is checked here.

    ValueError
     └─ MalformedMessageError     a message of the coordinator violates the contract, as known here
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from perseus.agent.link.computation import Computation, Kind, Rank
from perseus.agent.link.packets import Registration, Saving
from perseus.agent.rank.messages import (
    MAX_SENTENCE_LENGTH,
    AgentIdentity,
    ClockStatistics,
    ComputationRow,
    Drain,
    EnergyEstimate,
    EnergySample,
    GpuLimits,
    HeartbeatAnswer,
    Hold,
    Incoming,
    IterationRow,
    MaxClock,
    MessageRefused,
    PlanId,
    PlanOffer,
    RankAccepted,
    RankMaxClock,
    RankRefused,
    StageClocks,
    Stock,
    TelemetryAck,
    TelemetryRefused,
    Welcome,
    coordinates,
    sentence,
)
from perseus.agent.stream.telemetry import Batch
from perseus.bundles import MAX_BYTES, MAX_MESSAGES
from perseus.printable import printable
from perseus.v1 import agent_service_pb2 as wire
from perseus.v1 import clock_statistics_pb2, computation_pb2, frontier_pb2, job_pb2, job_service_pb2, rank_pb2

N = TypeVar("N", int, float)

Sendable = (
    wire.RankJoined
    | wire.RankLeft
    | wire.GpuError
    | wire.PlanAnswer
    | wire.PlanInForce
    | wire.PowerReading
    | wire.TrainerUnmarked
    | MessageRefused
    | Batch
)

_BEGINS_EVERY = 4
_LONG_ITERATION_S = 5.0

_FIELDS = {
    field.message_type.full_name: field.name
    for field in wire.ConnectRequest.DESCRIPTOR.oneofs_by_name["message"].fields
    if field.message_type is not None
}

PROTOCOL_VERSION = 1
"""Version of the contract; its `Hello` documents when it rises."""

_UNKNOWN_MESSAGE = "UNKNOWN_MESSAGE"
_EMPTY_MESSAGE = "EMPTY_MESSAGE"
_INVALID_FIELD = "INVALID_FIELD"

_MAX_NAME_LENGTH = 256
_MAX_COUNT = 2**53
_MAX_CLOCK_MHZ = 100_000
_MIN_LEASE_S = 0.01
_MIN_INTERVAL_S = 0.05
_MAX_TIME_S = 1e6
_MAX_PERCENT = 1e6
_SHOWN_COUNT = 10


class MalformedMessageError(ValueError):
    """A message that violates the contract, as known here; the text names the field.

    Attributes:
        refused: the refusal for the coordinator.
    """

    def __init__(self, field: str, expected: str, found: object, reason: str = _INVALID_FIELD) -> None:
        super().__init__(f"{field}: expected {expected}, found {found}")
        self.refused = MessageRefused(reason, field, expected, str(found)[:MAX_SENTENCE_LENGTH])


# --- Messages from the agent --------------------------------------------------------------------------------


def commit_marker(message: wire.ConnectResponse) -> str:
    """Return the commit marker of a message; empty if it has none."""
    match message.WhichOneof("message"):
        case "welcome":
            return message.welcome.commit_marker
        case "telemetry_ack":
            return message.telemetry_ack.commit_marker
        case "plan_offer":
            return message.plan_offer.commit_marker
    return ""


def about_rank(
    message: wire.ConnectResponse,
) -> wire.RankAccepted | wire.RankRefused | wire.RankMaxClock | wire.PlanOffer | None:
    """Return the message about a rank that this is; None if it is another."""
    match message.WhichOneof("message"):
        case "rank_accepted":
            return message.rank_accepted
        case "rank_refused":
            return message.rank_refused
        case "rank_max_clock":
            return message.rank_max_clock
        case "plan_offer":
            return message.plan_offer
    return None


def hello(
    agent: AgentIdentity,
    latest_commit_marker: str = "",
    instance_key: str = "",
    slot: int | None = None,
) -> wire.ConnectRequest:
    """Return the first message on a stream, for the jobs of a slot or, if None, of whichever is served."""
    return wire.ConnectRequest(
        hello=wire.Hello(
            instance_id=agent.instance_id,
            agent_version=agent.version,
            hostname=printable(agent.hostname)[:_MAX_NAME_LENGTH],
            protocol_version=PROTOCOL_VERSION,
            commit_marker=latest_commit_marker,
            instance_key=instance_key,
            max_bundle_bytes=MAX_BYTES,
            slot=slot,
        )
    )


def heartbeat(clock_ahead_s: float | None) -> wire.ConnectRequest:
    """Return a heartbeat; `clock_ahead_s`: of this host's clock, against the coordinator's, if known."""
    return wire.ConnectRequest(heartbeat=wire.Heartbeat(clock_ahead_s=clock_ahead_s))


def goodbye(reason: str) -> wire.ConnectRequest:
    """Return the last message on a stream that ends on purpose."""
    return wire.ConnectRequest(goodbye=wire.Goodbye(reason=reason))


def request(message: Sendable, *, has_short_rows: bool = False) -> wire.ConnectRequest:
    """Return the wire message for a message of a session or of the agent.

    `has_short_rows`: leave out of telemetry what the coordinator knows or nobody needs.
    """
    match message:
        case Batch():
            content: Message = _telemetry(message, has_short_rows=has_short_rows)
        case MessageRefused(reason, field, expected, found, about):
            content = wire.MessageRefused(
                reason=reason,
                field=field,
                expected=expected,
                found=sentence(found),
                job_id=about.job_id if about is not None else "",
                rank=coordinates(about) if about is not None else None,
            )
        case _:
            content = message
    request = wire.ConnectRequest()
    getattr(request, _FIELDS[content.DESCRIPTOR.full_name]).CopyFrom(content)
    return request


def register_job_request(
    registration: Registration, owner: str = "", labels: Sequence[tuple[str, str]] = ()
) -> job_service_pb2.RegisterJobRequest:
    """Return the request for a registration by a trainer of `owner` whose grant has these labels.

    Raises ValueError, naming the field, if it holds no JobSpec. Many computations take a while, all of it in
    Python, so in a thread it lets other threads run.
    """
    try:
        # A newer probe may send fields that this release does not have.
        spec = json_format.ParseDict(registration.spec, job_pb2.JobSpec(), ignore_unknown_fields=True)
    except json_format.ParseError as error:
        raise ValueError(sentence(f"registration: expected a JobSpec as JSON: {error}")) from error
    except SystemError as error:  # raised by protobuf for a name with half a surrogate pair
        raise ValueError(
            sentence(f"registration: expected a JobSpec as JSON: {error.__cause__ or error}")
        ) from error
    return job_service_pb2.RegisterJobRequest(
        spec=spec,
        request_id=registration.request_id,
        spec_fingerprint=registration.spec_fingerprint,
        owner=owner,
        labels=[job_pb2.Label(key=key, value=value) for key, value in labels],
    )


def _limits(limits: GpuLimits) -> wire.GpuLimits:
    return wire.GpuLimits(power_limit_w=limits.power_limit_w, workload_power_profiles=limits.power_profiles)


def _telemetry(batch: Batch, *, has_short_rows: bool) -> wire.TelemetryBatch:
    """Return a batch with its rows as columns."""
    measured = batch.telemetry
    is_short = has_short_rows and [row.is_regular for row in measured.iterations] == [True]
    return wire.TelemetryBatch(
        sequence=batch.sequence,
        job_id=measured.rank.job_id,
        rank=coordinates(measured.rank),
        iterations=_iteration_columns(measured.iterations),
        computations=_short_rows(measured.iterations[0], measured.computations)
        if is_short
        else _computation_columns(measured.computations),
        energy=_energy(measured.energy) if measured.energy is not None else None,
        dropped_batch_count=batch.dropped_batch_count,
        clocks=_clocks(measured.clocks) if measured.clocks is not None else None,
        gpu_limits=_limits(measured.gpu_limits) if measured.gpu_limits is not None else None,
        foreign_clock=rank_pb2.ForeignClock(
            clock_mhz=measured.foreign_clock.clock_mhz,
            wanted_clock_mhz=measured.foreign_clock.wanted_mhz or 0,
        )
        if measured.foreign_clock is not None
        else None,
    )


def _kind(kind: Kind) -> computation_pb2.ComputationKind.ValueType:
    return computation_pb2.ComputationKind.ValueType(int(kind))


def _clocks(clocks: ClockStatistics) -> clock_statistics_pb2.ClockStatistics:
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


def _iteration_columns(rows: tuple[IterationRow, ...]) -> wire.IterationColumns:
    return wire.IterationColumns(
        iteration=[row.iteration for row in rows],
        plan_version=[row.plan_version for row in rows],
        duration_s=[row.duration_s for row in rows],
        energy_j=[row.energy_j for row in rows],
        is_regular=[row.is_regular for row in rows],
        clock_event_reasons=[row.clock_event_reasons for row in rows],
        gap_time_s=[row.gap_time_s for row in rows],
        gap_energy_j=[row.gap_energy_j for row in rows],
        gap_slowed_time_s=[row.gap_slowed_time_s for row in rows],
        capped_clock_mhz=[row.capped_clock_mhz for row in rows],
        # Few trainers state it: nearly all batches lack the column.
        relative_work=[row.relative_work for row in rows] if any(row.relative_work for row in rows) else (),
        # Only of models whose inputs a hook sees.
        work=[row.work for row in rows] if any(row.work for row in rows) else (),
        # Only after an urgent offer or a maximum clock.
        has_clock_change=[row.has_clock_change for row in rows]
        if any(row.has_clock_change for row in rows)
        else (),
    )


def _computation_columns(rows: tuple[ComputationRow, ...]) -> wire.ComputationColumns:
    return wire.ComputationColumns(
        iteration=[row.iteration for row in rows],
        kind=[_kind(row.computation.kind) for row in rows],
        microbatch=[row.computation.microbatch for row in rows],
        chunk=[row.computation.chunk for row in rows],
        begin_s=[row.begin_s for row in rows],
        duration_s=[row.duration_s for row in rows],
        clock_mhz=[row.clock_mhz or 0 for row in rows],
    )


def _short_rows(iteration: IterationRow, rows: tuple[ComputationRow, ...]) -> wire.ComputationColumns:
    """Return the rows of a regular iteration without what the registered order says.

    Timelines need their begins: of the baseline, of an iteration that people wait for, and of every fourth
    otherwise, the same on all ranks.
    """
    has_begins = (
        iteration.iteration % _BEGINS_EVERY == 0
        or iteration.duration_s > _LONG_ITERATION_S
        or not any(row.clock_mhz for row in rows)
    )
    return wire.ComputationColumns(
        begin_s=[row.begin_s for row in rows] if has_begins else (),
        duration_s=[row.duration_s for row in rows],
        clock_mhz=[row.clock_mhz or 0 for row in rows],
    )


def _energy(estimate: EnergyEstimate) -> wire.EnergyEstimate:
    return wire.EnergyEstimate(
        plan_version=estimate.plan_version,
        iteration_count=estimate.iteration_count,
        samples=map(_energy_sample, estimate.samples),
        blocking_power_w=estimate.blocking_power_w,
        blocking_power_se_w=estimate.blocking_power_se_w,
        window_count=estimate.window_count,
        discarded_window_count=estimate.discarded_window_count,
        undetermined=map(_energy_sample, estimate.undetermined),
        power_information=estimate.power_information,
        power_information_vector=estimate.power_information_vector,
        work=estimate.work,
    )


def _energy_sample(sample: EnergySample) -> wire.EnergySample:
    return wire.EnergySample(
        kind=_kind(sample.kind),
        chunk=sample.chunk,
        clock_mhz=sample.clock_mhz or 0,
        computation_count=sample.computation_count,
        time_s=sample.time_s,
        time_se_s=sample.time_se_s,
        energy_j=sample.energy_j,
        energy_se_j=sample.energy_se_j,
    )


# --- Messages from the coordinator --------------------------------------------------------------------------


def unbundled(message: wire.ConnectResponse) -> Sequence[wire.ConnectResponse]:
    """Return the messages of a bundle, or the only message; none has been checked.

    Raises MalformedMessageError if there are too many.
    """
    if not message.HasField("bundle"):
        return (message,)
    if len(message.bundle.messages) > MAX_MESSAGES:
        raise MalformedMessageError(
            "bundle.messages", f"at most {MAX_MESSAGES}", len(message.bundle.messages)
        )
    return message.bundle.messages


def response(message: wire.ConnectResponse) -> Incoming:
    """Return the coordinator's message. Raises MalformedMessageError if it violates the contract."""
    name = message.WhichOneof("message")
    match name:
        case "welcome":
            welcome = message.welcome
            slot_count = _count("welcome.slot_count", welcome.slot_count) or 1
            if not 0 <= welcome.slot < slot_count:
                raise MalformedMessageError("welcome.slot", f"0 to {slot_count - 1}", welcome.slot)
            return Welcome(
                welcome.epoch,
                _within("welcome.lease_s", welcome.lease_s, _MIN_LEASE_S, _MAX_TIME_S),
                _count("welcome.acknowledged_sequence", welcome.acknowledged_sequence),
                _count("welcome.protocol_version", welcome.protocol_version) or 1,
                _power_interval_s("welcome", welcome),
                min(MAX_BYTES, _count("welcome.max_bundle_bytes", welcome.max_bundle_bytes)),
                welcome.slot,
                slot_count,
                welcome.takes_short_rows,
            )
        case "telemetry_ack":
            return TelemetryAck(_count("telemetry_ack.sequence", message.telemetry_ack.sequence))
        case "telemetry_refused":
            batch = message.telemetry_refused
            return TelemetryRefused(batch.sequence, batch.reason, batch.field, batch.expected, batch.found)
        case "message_refused":
            refused = message.message_refused
            about = _place(refused.job_id, refused.rank) if refused.HasField("rank") else None
            return MessageRefused(refused.reason, refused.field, refused.expected, refused.found, about)
        case "heartbeat":
            now = message.heartbeat.current_time
            return HeartbeatAnswer(
                _power_interval_s("heartbeat", message.heartbeat),
                {saving.job_id: _saving(saving) for saving in message.heartbeat.savings},
                now.seconds + now.nanos / 1e9 if message.heartbeat.HasField("current_time") else None,
            )
        case "drain":
            return Drain(message.drain.reason)
        case "rank_accepted":
            return _rank_accepted(message.rank_accepted)
        case "rank_refused":
            turned_away = message.rank_refused
            rank = _rank("rank_refused", turned_away)
            with _about(rank):
                max_clock = _max_clock("rank_refused", turned_away)
                lease_left_s = None
                if turned_away.HasField("lease_left_s"):
                    lease_left_s = _within(
                        "rank_refused.lease_left_s", turned_away.lease_left_s, 0, _MAX_TIME_S
                    )
            return RankRefused(rank, turned_away.reason, turned_away.message, max_clock, lease_left_s)
        case "rank_max_clock":
            limited = message.rank_max_clock
            rank = _rank("rank_max_clock", limited)
            with _about(rank):
                return RankMaxClock(rank, _max_clock("rank_max_clock", limited))
        case "plan_offer":
            return _plan_offer(message.plan_offer)
        case "bundle":
            raise MalformedMessageError("bundle", "a message that comes in a bundle", "a bundle")
        case _:
            numbers = _unknown_fields(message)
            if not numbers:
                raise MalformedMessageError("message", "a message", "an empty one", _EMPTY_MESSAGE)
            raise MalformedMessageError(
                numbers,
                f"a message of protocol version {PROTOCOL_VERSION}",
                f"field {numbers}",
                _UNKNOWN_MESSAGE,
            )


def _rank_accepted(accepted: wire.RankAccepted) -> RankAccepted:
    rank = _rank("rank_accepted", accepted)
    with _about(rank):
        order = tuple(
            _computation(f"rank_accepted.order.computations[{index}]", each)
            for index, each in enumerate(accepted.order.computations)
        )
        if not order or len(set(order)) != len(order):
            raise MalformedMessageError(
                "rank_accepted.order",
                "at least one computation, each once",
                f"{len(order)}, of which {len(set(order))} differ",
            )
        return RankAccepted(rank, order, _max_clock("rank_accepted", accepted))


def _max_clock(
    where: str, message: wire.RankAccepted | wire.RankRefused | wire.RankMaxClock
) -> MaxClock | None:
    if not message.HasField("max_clock"):
        return None
    max_clock = message.max_clock
    clock_mhz = _within(f"{where}.max_clock.clock_mhz", max_clock.clock_mhz, 1, _MAX_CLOCK_MHZ)
    return MaxClock(clock_mhz, max_clock.outlasts_lease)


def _plan_offer(offer: wire.PlanOffer) -> PlanOffer:
    rank = _rank("plan_offer", offer)
    with _about(rank):
        return PlanOffer(
            rank=rank,
            plan=PlanId(offer.epoch, _within("plan_offer.version", offer.version, 1, _MAX_COUNT)),
            start_iteration=_count("plan_offer.start_iteration", offer.start_iteration),
            lease_s=_within("plan_offer.lease_s", offer.lease_s, _MIN_LEASE_S, _MAX_TIME_S),
            clocks=_clocks_of(offer),
            is_urgent=offer.is_urgent,
        )


def _clocks_of(offer: wire.PlanOffer) -> Stock | Hold | StageClocks:
    match offer.WhichOneof("clocks"):
        case "stock":
            return Stock()
        case "hold":
            return Hold(offer.hold.clock_mhz)
        case "stage_plan":
            planned = offer.stage_plan.computations
            return StageClocks(
                tuple(
                    _computation(f"plan_offer.stage_plan.computations[{index}]", each)
                    for index, each in enumerate(planned)
                ),
                tuple(each.clock_mhz for each in planned),
            )
        case _:
            numbers = _unknown_fields(offer)
            found = f"field {numbers}" if numbers else "none"
            raise MalformedMessageError("plan_offer.clocks", "stock, hold or stage_plan", found)


@contextmanager
def _about(rank: Rank) -> Iterator[None]:
    """Add a message's rank to any MalformedMessageError."""
    try:
        yield
    except MalformedMessageError as error:
        error.refused = replace(error.refused, rank=rank)
        raise


def _rank(
    where: str, message: wire.RankAccepted | wire.RankRefused | wire.RankMaxClock | wire.PlanOffer
) -> Rank:
    """Return a message's rank; absent coordinates are an error, not the first rank."""
    if not message.HasField("rank"):
        raise MalformedMessageError(f"{where}.rank", "a rank's place", "none")
    return _place(message.job_id, message.rank)


def _place(job_id: str, coordinates: rank_pb2.RankCoordinates) -> Rank:
    return Rank(job_id, coordinates.pipeline, coordinates.stage, coordinates.tensor)


def _unknown_fields(message: Message) -> str:
    fields = UnknownFieldSet(message)
    numbers = sorted({fields[index].field_number for index in range(min(len(fields), _SHOWN_COUNT))})
    return ", ".join(str(number) for number in numbers)


def _computation(
    where: str, computation: computation_pb2.Computation | frontier_pb2.PlannedComputation
) -> Computation:
    if not Kind.FORWARD <= computation.kind <= Kind.FIXED:
        raise MalformedMessageError(f"{where}.kind", f"1 to {Kind.FIXED}", computation.kind)
    return Computation(
        Kind(computation.kind),
        _count(f"{where}.microbatch", computation.microbatch),
        _count(f"{where}.chunk", computation.chunk),
    )


def _count(where: str, value: int) -> int:
    return _within(where, value, 0, _MAX_COUNT)


def _saving(saving: wire.JobSaving) -> Saving:
    where, most = "heartbeat.savings", _MAX_PERCENT
    return Saving(
        _within(f"{where}.energy_percent", saving.energy_percent, -most, most),
        _within(f"{where}.slowdown_percent", saving.slowdown_percent, -most, most),
        *(
            _within(f"{where}.{name}", getattr(saving, name), 0.0, most) if saving.HasField(name) else None
            for name in ("energy_margin_percent", "slowdown_margin_percent")
        ),
    )


def _power_interval_s(where: str, message: wire.Welcome | wire.Heartbeat) -> float | None:
    if not message.power_interval_s:
        return None
    return _within(f"{where}.power_interval_s", message.power_interval_s, _MIN_INTERVAL_S, _MAX_TIME_S)


def _within(where: str, value: N, minimum: float, maximum: float) -> N:
    if not minimum <= value <= maximum:
        raise MalformedMessageError(where, f"{minimum} to {maximum}", value)
    return value
