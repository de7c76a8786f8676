"""Malformed messages: every field at its bounds and beyond, random protocol buffers.

Fields come from the contract's descriptors, so none is missing. Everything follows from a seed.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from perseus.v1 import (
    agent_service_pb2,
    computation_pb2,
    frontier_pb2,
    frontier_service_pb2,
    info_service_pb2,
    job_pb2,
    job_service_pb2,
    ledger_service_pb2,
    power_service_pb2,
    rank_pb2,
    token_service_pb2,
)
from perseus.v1.agent_service_pb2 import ConnectRequest

JOB = "fuzzed"
"""The job of all messages, so that they pass the first check."""

_SERVICES = (
    job_service_pb2.DESCRIPTOR.services_by_name["JobService"],
    frontier_service_pb2.DESCRIPTOR.services_by_name["FrontierService"],
    info_service_pb2.DESCRIPTOR.services_by_name["InfoService"],
    ledger_service_pb2.DESCRIPTOR.services_by_name["LedgerService"],
    power_service_pb2.DESCRIPTOR.services_by_name["PowerService"],
    token_service_pb2.DESCRIPTOR.services_by_name["TokenService"],
)

_DEEPEST = 6
_INTEGERS = (0, 1, -1, 2, 100, 1023, 1025, 65_536, 2**31 - 1, -(2**31), 2**32 - 1, 2**53, 2**53 + 1)
_LARGE_INTEGERS = (2**63 - 1, -(2**63), 2**64 - 1)
_FLOATS = (0.0, -0.0, -1.0, 0.5, 5e-324, 1e-9, 1e6, 1e12, 1e155, 1.7e308, float("inf"), float("-inf"))
_TEXTS = (
    "", JOB, "other", "Upper", "-", "x" * 64, "x" * 257, "x" * 5000, "\x00", "\x1b[31m", "\u202e", "\ud7ff",
    "é" * 300, "[/x]", "..", "a/b", "'; DROP TABLE runs; --", "fuzzer",
)  # fmt: skip
_LENGTHS = (0, 1, 2, 3, 100, 5000)
_FULL_BYTES = 4_000_000
"""About the default size limit of a message."""

Path = tuple[FieldDescriptor, ...]


def unary_methods() -> Mapping[str, type[Message]]:
    """Return the request type of every call without a request stream, by its full name."""
    return {
        f"/{service.full_name}/{method.name}": message_factory.GetMessageClass(method.input_type)
        for service in _SERVICES
        for method in service.methods
    }


def is_streaming(rpc: str) -> bool:
    """Whether a call's answer is a stream."""
    return any(
        rpc.endswith(f"/{method.name}") and method.server_streaming
        for service in _SERVICES
        for method in service.methods
    )


def valid(kind: type[Message]) -> Message:
    """Return an ordinary message."""
    if kind is job_service_pb2.RegisterJobRequest:
        return job_service_pb2.RegisterJobRequest(spec=_spec(), request_id="request")
    if kind is frontier_service_pb2.SolveRequest:
        return frontier_service_pb2.SolveRequest(problem=_problem(), point_count=3)
    message = kind()
    if "job_id" in kind.DESCRIPTOR.fields_by_name:
        setattr(message, "job_id", JOB)  # noqa: B010 (of which message, only the descriptor knows)
    return message


def _schedule() -> computation_pb2.Schedule:
    one = computation_pb2.SCHEDULE_NAME_ONE_FORWARD_ONE_BACKWARD
    return computation_pb2.Schedule(named=computation_pb2.NamedSchedule(name=one, microbatch_count=2))


def _spec() -> job_pb2.JobSpec:
    return job_pb2.JobSpec(
        job_id=JOB,
        parallelism=job_pb2.Parallelism(pipeline_count=2, stage_count=2, tensor_count=1),
        schedule=_schedule(),
    )


def _problem() -> frontier_pb2.PipelineProblem:
    kinds = (computation_pb2.COMPUTATION_KIND_FORWARD, computation_pb2.COMPUTATION_KIND_BACKWARD)
    return frontier_pb2.PipelineProblem(
        stage_count=2,
        schedule=_schedule(),
        profiles=[
            frontier_pb2.ComputationProfile(
                stage=stage,
                kind=kind,
                measurements=[
                    frontier_pb2.Measurement(clock_mhz=clock_mhz, time_s=14.0 / clock_mhz, energy_j=clock_mhz)
                    for clock_mhz in (1400, 1000)
                ],
            )
            for stage in range(2)
            for kind in kinds
        ],
        blocking_power_w=[60.0, 60.0],
    )


def conversation() -> list[ConnectRequest]:
    """Return one message of each kind from an agent, in a valid order."""
    place = rank_pb2.RankCoordinates(pipeline=1)
    forward = computation_pb2.COMPUTATION_KIND_FORWARD
    wire = agent_service_pb2
    return [
        ConnectRequest(hello=wire.Hello(instance_id="fuzzer", agent_version="0", hostname="host")),
        ConnectRequest(
            rank_joined=wire.RankJoined(
                job_id=JOB,
                rank=place,
                gpu=wire.Gpu(uuid="GPU-f", model="m", supported_clocks_mhz=[1400, 1000]),
                iteration=-1,
            )
        ),
        ConnectRequest(
            telemetry=wire.TelemetryBatch(
                sequence=1,
                job_id=JOB,
                rank=place,
                iterations=wire.IterationColumns(
                    iteration=[0], plan_version=[0], duration_s=[0.5], energy_j=[50.0],
                    is_regular=[True], clock_event_reasons=[0],
                ),
                computations=wire.ComputationColumns(
                    iteration=[0], kind=[forward], microbatch=[0], chunk=[0],
                    begin_s=[0.0], duration_s=[0.1], clock_mhz=[1400],
                ),
                energy=wire.EnergyEstimate(
                    iteration_count=3,
                    samples=[wire.EnergySample(kind=forward, computation_count=3, time_s=0.1, energy_j=9.0)],
                    blocking_power_w=60.0,
                ),
            )
        ),
        ConnectRequest(
            plan_answer=wire.PlanAnswer(job_id=JOB, rank=place, epoch="e", version=1, accepted=True)
        ),
        ConnectRequest(plan_in_force=wire.PlanInForce(job_id=JOB, rank=place, version=1)),
        ConnectRequest(gpu_error=wire.GpuError(job_id=JOB, rank=place, gpu_uuid="GPU-f", message="m")),
        ConnectRequest(message_refused=wire.MessageRefused(reason="R", field="f[3]")),
        ConnectRequest(power_reading=wire.PowerReading(duration_s=1.0, gpu_uuid=["GPU-f"], power_w=[90.0])),
        ConnectRequest(heartbeat=wire.Heartbeat()),
        ConnectRequest(
            bundle=wire.ConnectRequestBundle(
                messages=[
                    ConnectRequest(telemetry=wire.TelemetryBatch(sequence=2, job_id=JOB, rank=place)),
                    ConnectRequest(heartbeat=wire.Heartbeat()),
                ]
            )
        ),
        ConnectRequest(rank_left=wire.RankLeft(job_id=JOB, rank=place)),
        ConnectRequest(goodbye=wire.Goodbye(reason="r")),
    ]  # fmt: skip


# ---------------------------------------------------------------------- fields at their bounds and beyond


def paths(descriptor: Descriptor, above: Path = ()) -> Iterator[Path]:
    """Yield every field of a message, and of its submessages."""
    for field in descriptor.fields:
        yield (*above, field)
        inner = field.message_type
        is_new = all(inner is not each.containing_type for each in (*above, field))
        if inner is not None and is_new and len(above) < _DEEPEST:
            yield from paths(inner, (*above, field))


def extremes(field: FieldDescriptor) -> Sequence[Any]:
    """Return a field's values at and beyond its bounds, as far as its type can hold them."""
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return (False, True)
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return (*_FLOATS, float("nan"))
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return (b"", b"\xff" * 300)
        case FieldDescriptor.CPPTYPE_STRING:
            return _TEXTS
        case FieldDescriptor.CPPTYPE_ENUM:
            return (-1, 0, 1, 2, 99, 2**31 - 1)
        case FieldDescriptor.CPPTYPE_INT32:
            return [value for value in _INTEGERS if -(2**31) <= value < 2**31]
        case FieldDescriptor.CPPTYPE_UINT32:
            return [value for value in _INTEGERS if 0 <= value < 2**32]
        case FieldDescriptor.CPPTYPE_INT64:
            return [value for value in (*_INTEGERS, *_LARGE_INTEGERS) if value < 2**63]
        case FieldDescriptor.CPPTYPE_UINT64:
            return [value for value in (*_INTEGERS, *_LARGE_INTEGERS) if value >= 0]
        case _:
            return ()


def at_bounds(make: Callable[[], Message]) -> Iterator[Message]:
    """Yield a message with each field in turn absent, at each of its extremes, or repeated."""
    for path in paths(cast(Descriptor, make().DESCRIPTOR)):
        field = path[-1]
        for change in _changes(field):
            message = make()
            holder = _holder(message, path)
            change(holder)
            yield message


def filled(make: Callable[[], Message]) -> Iterator[Message]:
    """Yield a message with each repeated field in turn as long as a message may be."""
    for path in paths(cast(Descriptor, make().DESCRIPTOR)):
        field = path[-1]
        if not field.is_repeated:
            continue
        message = make()
        # As bytes, which is a hundred times as fast: many empty ones, or one column of many zeros.
        tag = _varint(field.number << 3 | 2)
        if field.message_type is not None or field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            data = (tag + b"\x00") * (_FULL_BYTES // (len(tag) + 1))
        else:
            data = tag + _varint(_FULL_BYTES) + bytes(_FULL_BYTES)
        _holder(message, path).MergeFromString(data)
        yield message


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*found, number))


def _changes(field: FieldDescriptor) -> Iterator[Callable[[Message], object]]:
    name = field.name
    yield lambda holder: holder.ClearField(name)
    if field.message_type is not None:
        if field.is_repeated:
            for length in _LENGTHS:
                yield lambda holder, length=length: _lengthen(holder, name, length)  # type: ignore[misc]
        else:
            yield lambda holder: getattr(holder, name).SetInParent()
        return
    for value in extremes(field):
        if field.is_repeated:
            yield lambda holder, value=value: getattr(holder, name).append(value)  # type: ignore[misc]
        else:
            yield lambda holder, value=value: setattr(holder, name, value)  # type: ignore[misc]
    if field.is_repeated:
        value = next(iter(extremes(field)))
        for length in _LENGTHS:
            many = [value] * length
            yield lambda holder, many=many: getattr(holder, name).extend(many)  # type: ignore[misc]


def _lengthen(holder: Message, name: str, length: int) -> None:
    column = getattr(holder, name)
    for _ in range(length):
        column.add()


def _holder(message: Message, path: Path) -> Message:
    """Return the message that holds a field; create missing parents."""
    for field in path[:-1]:
        part = getattr(message, field.name)
        if field.is_repeated:
            message = part[0] if len(part) else part.add()
        else:
            part.SetInParent()
            message = part
    return message


# ---------------------------------------------------------------------- random protocol buffers


def random_message(kind: type[Message], chance: random.Random, depth: int = 0) -> Message:
    """Return a message with random values of the fields' types."""
    message = kind()
    for field in cast(Descriptor, kind.DESCRIPTOR).fields:
        if chance.random() < 0.3 + 0.1 * depth:
            continue
        count = chance.choice((1, 1, 2, 5, 40)) if field.is_repeated else 1
        for _ in range(count):
            if field.message_type is None:
                value = chance.choice(extremes(field))
                if field.is_repeated:
                    getattr(message, field.name).append(value)
                else:
                    setattr(message, field.name, value)
            elif depth < _DEEPEST:
                inner = random_message(message_factory.GetMessageClass(field.message_type), chance, depth + 1)
                part = getattr(message, field.name)
                if field.is_repeated:
                    part.add().CopyFrom(inner)
                else:
                    part.CopyFrom(inner)
    return message


def mangled(data: bytes, chance: random.Random) -> bytes:
    """Return data with bytes flipped, cut, duplicated, inserted or replaced."""
    text = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(text) + 1)
        match chance.randrange(5):
            case 0 if text:
                text[at % len(text)] = chance.randrange(256)
            case 1:
                del text[at:]
            case 2:
                text[at:at] = chance.randbytes(chance.randint(1, 12))
            case 3:
                text += text[at:]
            case _:
                text = bytearray(chance.randbytes(chance.randint(0, 60)))
    return bytes(text)
