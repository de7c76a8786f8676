"""The local protocol between a trainer's probe and the agent: conversion between bytes and values only.

The transport is a Unix SOCK_SEQPACKET connection per rank: one packet is one message. The probe speaks first:

    probe → agent    Hello, answered by a Reply
                     Registration (the job's first rank), answered by a Reply
                     Membership (all other ranks), IterationMark, ComputationMark, WaitMark, Unmarked, Finish:
                     never answered
    agent → probe    Reply, Packing

A health check sends HealthQuestion first, and the agent answers with a Reply. An inference engine's plug-in
sends EngineHello first, which a Reply answers, then an EngineReport four times a second, never answered.
InstancesQuestion is answered by Instances.

A rank is announced to the coordinator once it has declared its job, by a registration or membership, or at
once if its hello declares that others have registered the job.

HealthQuestion, Hello, Registration, Membership, Unmarked and Reply are JSON objects, because they are rare
and should be readable in a trace. A registration with explicit orders may exceed a socket buffer, so large
ones are deflated. Limits on inflated bytes, objects, lists and text lengths are checked before decoding.
Decoding the largest takes a while: callers that must not block decode packets that are not `is_quick` in a
thread, where decoding yields to other threads. Marks are frequent: 32 bytes each, little-endian, all of one
layout:

    magic  version  type  kind  microbatch  chunk  ordinal  iteration  time_ns
    u8     u8       u8    u8    i32         i32    i32      i64        i64

Fields that a type does not use are zero. Times are CLOCK_MONOTONIC, which both processes share. The ordinal
of an iteration's begin is its relative work in thousandths, 0 if unknown; that of its end counts the marks
that the probe has dropped on this connection so far, and its microbatch and chunk are the low 31 and the high
bits of the iteration's work, in elements, 0 if unknown.

Every packet wakes the agent, which takes most of a mark's cost at either end. So while no clock is set that
depends on them, the agent allows marks to be packed (Packing): a packet then holds up to MAX_PACKED_MARKS
marks, in order, one after the other. An iteration's begin is never packed with what follows it, nor its end
kept back.

Standard library only: this module is imported into the trainer.

    ValueError
     └─ MalformedPacket     the other end does not speak this protocol
"""

import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from enum import IntEnum
from functools import partial
from typing import Any, TypeVar

from perseus.agent.link.computation import Computation, Kind, Rank

PROTOCOL_VERSION = 2
# The largest packet that either end sends or accepts; fits the default socket buffer (net.core.wmem_default).
MAX_PACKET_BYTES = 128 * 1024
# Up to this size, packets that are not deflated decode within a fraction of a millisecond; hellos and marks
# are smaller.
SMALL_PACKET_BYTES = 4 * 1024
# Limits on the JSON in a deflated packet: its size, and its objects, of which each computation is one.
MAX_JSON_BYTES = 4 * 1024 * 1024
MAX_OBJECTS = 100_000
MAX_NAME_LENGTH = 256
MAX_PACKED_MARKS = 64
MAX_UNMARKED_LENGTH = 1024

# The highest valid iteration number: doubles hold integers exactly up to here.
MAX_ITERATION = 2**53

# Relative work beyond a factor of a thousand in either direction is considered a mistake.
MAX_RELATIVE_WORK_PERMILLE = 1_000_000

# An iteration's work is split into two fields of 31 bits.
WORK_BASE = 2**31
MAX_WORK = 2**53

_MAGIC = 0x50
_JSON_BEGIN = 0x7B  # "{"
_DEFLATED_BEGIN = 0x78  # first byte of a zlib stream
_MARK = struct.Struct("<BBBBiiiqq")
MARK_BYTES = _MARK.size
# A registration has a list for each stage and path, and six quotation marks in the object of a computation.
_MAX_LISTS = 4096
_MAX_QUOTES = 8 * MAX_OBJECTS
_MAX_IDENTIFIER_LENGTH = 64
_INFLATE_CHUNK_BYTES = 64 * 1024
_MAX_NUMBER = 1e9

T = TypeVar("T")


class MalformedPacket(ValueError):  # noqa: N818 - names what arrived, as the protocol's other values do
    """A packet that is not of this protocol. The message names the expected and the found value."""


class Edge(IntEnum):
    """The beginning or the end of something."""

    BEGIN = 0
    END = 1


class MarkType(IntEnum):
    """The type field of a mark."""

    ITERATION_BEGIN = 1
    ITERATION_END = 2
    COMPUTATION_BEGIN = 3
    COMPUTATION_END = 4
    FINISH = 5
    WAIT_BEGIN = 6
    WAIT_END = 7


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank introduces itself. `is_registered`: others register its job, and it will not declare it.

    `time_ns`: its CLOCK_MONOTONIC, 0 if unknown. `packs_marks`: it packs marks where that is allowed.
    """

    rank: Rank
    gpu_uuid: str
    is_registered: bool = False
    time_ns: int = 0
    packs_marks: bool = False


@dataclass(frozen=True, slots=True)
class HealthQuestion:
    """A health check."""


@dataclass(frozen=True, slots=True)
class Registration:
    """The job, as proto3 JSON of `perseus.v1.JobSpec`.

    `request_id` is the same in all repetitions by this training; `spec_fingerprint` identifies the
    specification of all its ranks.
    """

    spec: dict[str, Any]
    request_id: str
    spec_fingerprint: str


@dataclass(frozen=True, slots=True)
class Membership:
    """The specification of a rank's job, as in the job's registration."""

    spec_fingerprint: str


@dataclass(frozen=True, slots=True)
class Saving:
    """What a job's plans save, in percent of stock, and how much more time iterations take.

    Margins are half of 95 % intervals; None while they are unknown.
    """

    energy_percent: float
    slowdown_percent: float
    energy_margin_percent: float | None = None
    slowdown_margin_percent: float | None = None

    def __str__(self) -> str:
        energy, slowdown = f"{self.energy_percent:.1f}", f"{self.slowdown_percent:+.1f}"
        if self.energy_margin_percent is not None:
            energy += f" ± {self.energy_margin_percent:.1f}"
        if self.slowdown_margin_percent is not None:
            slowdown += f" ± {self.slowdown_margin_percent:.1f}"
        return f"{energy} % of energy, at {slowdown} % of time"

    def rounded(self) -> "Saving":
        """Return it in tenths of a percent."""
        known = {name: round(figure, 1) for name, figure in asdict(self).items() if figure is not None}
        return Saving(**known)

    def figures(self) -> dict[str, float]:
        """Return what is known of it by the names that trainings log."""
        names = ("energy_saved", "slowdown", "energy_saved_margin", "slowdown_margin")
        figures = zip(names, astuple(self), strict=True)
        return {f"perseus_{name}_percent": figure for name, figure in figures if figure is not None}


SAVING = "SAVING"
"""Reason of a notice of the job's saving; without one, it is unknown."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to a HealthQuestion, a Hello or a Registration.

    A refusal has a stable reason; the message is for people.

    `is_notice`: it is no answer, but reports a change of the rank's state; with reason SAVING, of `saving`.
    """

    ok: bool
    reason: str = ""
    message: str = ""
    is_notice: bool = False
    saving: Saving | None = None


@dataclass(frozen=True, slots=True)
class Packing:
    """Whether the probe may pack marks from the next iteration on; at first it may not."""

    is_allowed: bool


@dataclass(frozen=True, slots=True)
class IterationMark:
    """An iteration begins or ends.

    `relative_work_permille`: at its begin, its work relative to a typical one's, in thousandths; 0 if
    unknown. `dropped_mark_count`: at its end, marks dropped on the connection so far. `work`: at its end, the
    elements of the model's inputs in it, 0 if unknown.
    """

    edge: Edge
    iteration: int
    time_ns: int
    relative_work_permille: int = 0
    dropped_mark_count: int = 0
    work: int = 0


@dataclass(frozen=True, slots=True)
class ComputationMark:
    """A computation begins or ends. `ordinal` counts the computations begun in the iteration, from 0."""

    edge: Edge
    iteration: int
    ordinal: int
    computation: Computation
    time_ns: int


@dataclass(frozen=True, slots=True)
class WaitMark:
    """The current computation begins or ends a wait for other ranks, which does not count as its time."""

    edge: Edge
    iteration: int
    time_ns: int


@dataclass(frozen=True, slots=True)
class Unmarked:
    """Training goes on without marked iterations; the message, for people, has the likely cause."""

    message: str


LATENCY_RATIO = 1.1
"""Of a latency bucket's bounds: bucket i holds seconds from LATENCY_RATIO**i to LATENCY_RATIO**(i + 1)."""
MAX_LATENCY_BUCKET = 60
"""5 minutes. The lowest bucket is its negative: 3 ms; shorter and longer latencies count there."""


@dataclass(frozen=True, slots=True)
class InstancesQuestion:
    """The command line asks for all inference engines that the agent has in its configuration."""


@dataclass(frozen=True, slots=True)
class Instances:
    """Their settings, states and figures: JSON objects, whose names end in their units."""

    instances: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class EngineHello:
    """An inference engine introduces itself, by the name that the agent's configuration has for it.

    `instance` may be empty if the user has one instance on the node. `engine_index`: of its data-parallel
    engines.
    """

    instance: str
    engine_index: int


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What happened in an engine in an interval, and what is there at its end.

    `prompt_tokens` without those from the prefix cache. `ttft` and `itl`: bucket → latencies in it.
    """

    length_s: float
    running_count: int
    waiting_count: int
    kv_usage: float
    prompt_tokens: int
    generation_tokens: int
    step_count: int
    itl_sum_s: float
    ttft: dict[int, int]
    itl: dict[int, int]


@dataclass(frozen=True, slots=True)
class Finish:
    """Training has ended: the following end of the connection is no failure."""

    time_ns: int


Message = (
    HealthQuestion
    | Hello
    | InstancesQuestion
    | Instances
    | EngineHello
    | EngineReport
    | Registration
    | Membership
    | Reply
    | Packing
    | IterationMark
    | ComputationMark
    | WaitMark
    | Unmarked
    | Finish
)


def mark_packer(mark_type: MarkType) -> Callable[[int, int, int, int, int, int], bytes]:
    """Return a packer for marks of one type, without intermediate values or Python frames: the probe's hot
    path.

    The packer takes kind, microbatch, chunk, ordinal, iteration and time_ns; it raises struct.error if one is
    out of range.
    """
    return partial(_MARK.pack, _MAGIC, PROTOCOL_VERSION, int(mark_type))


def encode(message: Message) -> bytes:
    """Return the packet of a message; ValueError if it would exceed MAX_PACKET_BYTES."""
    match message:
        case HealthQuestion():
            return _encode_json({"type": "health"})
        case Hello(rank, gpu_uuid, is_registered, time_ns, packs_marks):
            return _encode_json(
                {
                    "type": "hello",
                    "job_id": rank.job_id,
                    "pipeline": rank.pipeline,
                    "stage": rank.stage,
                    "tensor": rank.tensor,
                    "gpu_uuid": gpu_uuid,
                    "is_registered": is_registered,
                    "time_ns": time_ns,
                    "packs_marks": packs_marks,
                }
            )
        case Registration(spec, request_id, spec_fingerprint):
            return _encode_json(
                {
                    "type": "registration",
                    "spec": spec,
                    "request_id": request_id,
                    "spec_fingerprint": spec_fingerprint,
                }
            )
        case InstancesQuestion():
            return _encode_json({"type": "instances_question"})
        case Instances(instances):
            return _encode_json({"type": "instances", "instances": instances})
        case EngineHello(instance, engine_index):
            return _encode_json({"type": "engine", "instance": instance, "engine_index": engine_index})
        case EngineReport():
            return _encode_json({"type": "engine_report", **asdict(message)})
        case Membership(spec_fingerprint):
            return _encode_json({"type": "membership", "spec_fingerprint": spec_fingerprint})
        case Unmarked(text):
            return _encode_json({"type": "unmarked", "message": text})
        case Reply(ok, reason, text, is_notice, saving):
            reply = {"type": "reply", "ok": ok, "reason": reason, "message": text}
            if saving is not None:
                reply["saving"] = [saving.energy_percent, saving.slowdown_percent]
                # Apart, as older probes know two numbers.
                reply["saving_margins"] = [saving.energy_margin_percent, saving.slowdown_margin_percent]
            return _encode_json({**reply, "is_notice": True} if is_notice else reply)
        case Packing(is_allowed):
            return _encode_json({"type": "packing", "is_allowed": is_allowed})
        case IterationMark(Edge.BEGIN, iteration, time_ns, relative_work_permille):
            return mark_packer(MarkType.ITERATION_BEGIN)(0, 0, 0, relative_work_permille, iteration, time_ns)
        case IterationMark(_, iteration, time_ns, _, dropped_mark_count, work):
            high, low = divmod(work, WORK_BASE)
            return mark_packer(MarkType.ITERATION_END)(0, low, high, dropped_mark_count, iteration, time_ns)
        case ComputationMark(edge, iteration, ordinal, computation, time_ns):
            mark_type = MarkType.COMPUTATION_BEGIN if edge is Edge.BEGIN else MarkType.COMPUTATION_END
            return mark_packer(mark_type)(
                computation.kind,
                computation.microbatch,
                computation.chunk,
                ordinal,
                iteration,
                time_ns,
            )
        case WaitMark(edge, iteration, time_ns):
            mark_type = MarkType.WAIT_BEGIN if edge is Edge.BEGIN else MarkType.WAIT_END
            return mark_packer(mark_type)(0, 0, 0, 0, iteration, time_ns)
        case Finish(time_ns):
            return mark_packer(MarkType.FINISH)(0, 0, 0, 0, 0, time_ns)


def is_quick(packet: bytes | bytearray | memoryview) -> bool:
    """Return whether a packet decodes within a fraction of a millisecond, with any content."""
    return len(packet) <= SMALL_PACKET_BYTES and packet[:1] != _DEFLATED_BEGIN.to_bytes()


def decode(packet: bytes | bytearray | memoryview) -> Message:
    """Return a packet's message; MalformedPacket if it is truncated, too large or not of this protocol."""
    if not 0 < len(packet) <= MAX_PACKET_BYTES:
        raise MalformedPacket(f"packet: expected 1 to {MAX_PACKET_BYTES} bytes, found {len(packet)}")
    first = packet[0]
    if first == _MAGIC:
        return _decode_mark(packet)
    if first == _JSON_BEGIN:
        return _decode_json(bytes(packet))
    if first == _DEFLATED_BEGIN:
        return _decode_json(_inflate(bytes(packet)))
    raise MalformedPacket(f"packet: expected a mark or JSON, found first byte 0x{first:02x}")


def decode_all(packet: bytes | bytearray | memoryview) -> list[Message]:
    """Return the messages of a packet, which may be packed marks; MalformedPacket as `decode`."""
    size = _MARK.size
    if len(packet) <= size or packet[0] != _MAGIC:
        return [decode(packet)]
    if len(packet) > MAX_PACKED_MARKS * size:
        raise MalformedPacket(f"marks: expected at most {MAX_PACKED_MARKS * size} bytes, found {len(packet)}")
    return [_decode_mark(packet[start : start + size]) for start in range(0, len(packet), size)]


def _encode_json(fields: dict[str, Any]) -> bytes:
    packet = json.dumps({"version": PROTOCOL_VERSION, **fields}, separators=(",", ":")).encode()
    if len(packet) > MAX_PACKET_BYTES // 2:
        size = _Size()
        size.add(packet)
        if problem := size.problem():
            raise ValueError(f"{fields['type']}: {problem}")
        packet = zlib.compress(packet)
    if len(packet) > MAX_PACKET_BYTES:
        raise ValueError(
            f"{fields['type']}: expected at most {MAX_PACKET_BYTES} bytes deflated, found {len(packet)}"
        )
    return packet


class _Size:
    """The amount of content in a JSON text, counted before decoding it."""

    def __init__(self) -> None:
        self._bytes = self._objects = self._lists = self._quotes = 0

    def add(self, piece: bytes) -> None:
        """Count a piece of the text."""
        self._bytes += len(piece)
        self._objects += piece.count(b"{")
        self._lists += piece.count(b"[")
        self._quotes += piece.count(b'"')

    def problem(self) -> str:
        """Describe the exceeded limit; empty if there is none."""
        for unit, found, maximum in (
            ("bytes", self._bytes, MAX_JSON_BYTES),
            ("objects", self._objects, MAX_OBJECTS),
            ("lists", self._lists, _MAX_LISTS),
            ("quotation marks", self._quotes, _MAX_QUOTES),
        ):
            if found > maximum:
                return f"expected JSON of at most {maximum} {unit}, found {found}"
        return ""


def _inflate(packet: bytes) -> bytes:
    inflater = zlib.decompressobj()
    pieces: list[bytes] = []
    size = _Size()
    try:
        while not inflater.eof:
            piece = inflater.decompress(packet, _INFLATE_CHUNK_BYTES)
            packet = inflater.unconsumed_tail
            if not piece and not packet and not inflater.eof:
                raise MalformedPacket("packet: deflated JSON is truncated")
            size.add(piece)
            if problem := size.problem():
                raise MalformedPacket(f"packet: {problem} or more")
            pieces.append(piece)
    except zlib.error as error:
        raise MalformedPacket(f"packet: deflated JSON can not be inflated: {error}") from error
    return b"".join(pieces)


def _as_it_is(found: dict[str, Any]) -> dict[str, Any]:
    return found


def _integer(digits: str) -> int:
    return int(digits)


def _no_number(name: str) -> float:
    raise ValueError(f"expected finite numbers, found {name}")


# The hooks are Python functions, so that each call gives other threads an opportunity to run.
_json = json.JSONDecoder(object_hook=_as_it_is, parse_int=_integer, parse_constant=_no_number)


def _decode_json(packet: bytes) -> Message:
    try:
        fields = _json.decode(packet.decode())
    except (ValueError, RecursionError) as error:
        raise MalformedPacket(f"packet: expected JSON: {error}") from error
    if not isinstance(fields, dict):
        raise MalformedPacket(f"packet: expected a JSON object, found {type(fields).__name__}")
    message_type = _text(fields, "type", maximum=_MAX_IDENTIFIER_LENGTH)
    version = _field(fields, "version", int)
    if version != PROTOCOL_VERSION:
        raise MalformedPacket(
            f"{message_type}: expected protocol version {PROTOCOL_VERSION}, found {str(version)[:20]}"
        )
    match message_type:
        case "health":
            return HealthQuestion()
        case "hello":
            rank = Rank(
                _text(fields, "job_id", minimum=1),
                _count(fields, "pipeline"),
                _count(fields, "stage"),
                _count(fields, "tensor"),
            )
            return Hello(
                rank,
                _text(fields, "gpu_uuid", minimum=1),
                _field(fields, "is_registered", bool),
                _count(fields, "time_ns", maximum=2**63 - 1) if "time_ns" in fields else 0,
                _field(fields, "packs_marks", bool) if "packs_marks" in fields else False,
            )
        case "registration":
            return Registration(
                _field(fields, "spec", dict),
                _text(fields, "request_id", maximum=_MAX_IDENTIFIER_LENGTH),
                _text(fields, "spec_fingerprint", maximum=_MAX_IDENTIFIER_LENGTH),
            )
        case "instances_question":
            return InstancesQuestion()
        case "instances":
            return Instances(_field(fields, "instances", list))
        case "engine":
            return EngineHello(_text(fields, "instance"), _count(fields, "engine_index"))
        case "engine_report":
            return EngineReport(
                _number(fields, "length_s"),
                _count(fields, "running_count"),
                _count(fields, "waiting_count"),
                _number(fields, "kv_usage"),
                _count(fields, "prompt_tokens"),
                _count(fields, "generation_tokens"),
                _count(fields, "step_count"),
                _number(fields, "itl_sum_s"),
                _latencies(fields, "ttft"),
                _latencies(fields, "itl"),
            )
        case "membership":
            return Membership(_text(fields, "spec_fingerprint", maximum=_MAX_IDENTIFIER_LENGTH))
        case "unmarked":
            return Unmarked(_text(fields, "message", maximum=MAX_UNMARKED_LENGTH))
        case "reply":
            return Reply(
                _field(fields, "ok", bool),
                _field(fields, "reason", str),
                _field(fields, "message", str),
                _field(fields, "is_notice", bool) if "is_notice" in fields else False,
                _saving(fields) if "saving" in fields else None,
            )
        case "packing":
            return Packing(_field(fields, "is_allowed", bool))
        case _:
            raise MalformedPacket(
                "packet: expected type health, hello, engine, engine_report, instances, "
                "instances_question, registration, membership, unmarked, reply or packing, "
                f"found {message_type!r}"
            )


def _saving(fields: dict[str, Any]) -> Saving:
    match _field(fields, "saving", list), fields.get("saving_margins", [None, None]):
        case [int() | float() as energy_percent, int() | float() as slowdown_percent], [*margins]:
            if len(margins) == 2 and all(isinstance(margin, int | float | None) for margin in margins):
                return Saving(energy_percent, slowdown_percent, *margins)
    raise MalformedPacket("packet: field 'saving': expected two numbers, and two margins or none")


def _field(fields: dict[str, Any], name: str, expected: type[T]) -> T:
    value = fields.get(name)
    # bool is an int to isinstance, but not to JSON.
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        raise MalformedPacket(f"packet: field {name!r}: expected {expected.__name__}, found {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    """Describe a found value briefly, without traversing all of it."""
    if isinstance(value, dict | list):
        return f"a {type(value).__name__}"
    return json.dumps(value[:100] if isinstance(value, str) else value)[:100]


def _text(fields: dict[str, Any], name: str, *, minimum: int = 0, maximum: int = MAX_NAME_LENGTH) -> str:
    """Return a text of bounded length without control characters, fit for display and comparison."""
    text = _field(fields, name, str)
    if not minimum <= len(text) <= maximum or not text.isprintable():
        raise MalformedPacket(
            f"packet: field {name!r}: expected {minimum} to {maximum} printable characters, "
            f"found {len(text)}: {text[:100]!a}"
        )
    return text


def _count(fields: dict[str, Any], name: str, *, maximum: int = 2**31 - 1) -> int:
    value = _field(fields, name, int)
    if not 0 <= value <= maximum:
        raise MalformedPacket(f"packet: field {name!r}: expected 0 to {maximum}, found {str(value)[:20]}")
    return value


def _number(fields: dict[str, Any], name: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_NUMBER:
        raise MalformedPacket(
            f"packet: field {name!r}: expected a number from 0 to {_MAX_NUMBER:g}, found {_shown(value)}"
        )
    return float(value)


def _latencies(fields: dict[str, Any], name: str) -> dict[int, int]:
    found = _field(fields, name, dict)
    buckets = {str(each): each for each in range(-MAX_LATENCY_BUCKET, MAX_LATENCY_BUCKET + 1)}
    if not found.keys() <= buckets.keys():
        raise MalformedPacket(
            f"packet: field {name!r}: expected buckets from {-MAX_LATENCY_BUCKET} to {MAX_LATENCY_BUCKET}, "
            f"found {_shown(next(each for each in found if each not in buckets))}"
        )
    return {buckets[bucket]: _count(found, bucket) for bucket in found}


def _decode_mark(packet: bytes | bytearray | memoryview) -> Message:
    if len(packet) != _MARK.size:
        raise MalformedPacket(f"mark: expected {_MARK.size} bytes, found {len(packet)}")
    _, version, number, kind, microbatch, chunk, ordinal, iteration, time_ns = _MARK.unpack(packet)
    if version != PROTOCOL_VERSION:
        raise MalformedPacket(f"mark: expected protocol version {PROTOCOL_VERSION}, found {version}")
    if min(microbatch, chunk, ordinal, iteration, time_ns) < 0:
        raise MalformedPacket(
            "mark: expected no negative field, found "
            f"microbatch {microbatch}, chunk {chunk}, ordinal {ordinal}, iteration {iteration}, "
            f"time_ns {time_ns}"
        )
    if iteration > MAX_ITERATION:
        raise MalformedPacket(f"mark: expected iteration 0 to {MAX_ITERATION}, found {iteration}")
    match number:
        case MarkType.ITERATION_BEGIN:
            if ordinal > MAX_RELATIVE_WORK_PERMILLE:
                raise MalformedPacket(
                    f"mark: expected relative work of 0 to {MAX_RELATIVE_WORK_PERMILLE} thousandths, "
                    f"found {ordinal}"
                )
            return IterationMark(Edge.BEGIN, iteration, time_ns, ordinal)
        case MarkType.ITERATION_END:
            work = chunk * WORK_BASE + microbatch
            if work > MAX_WORK:
                raise MalformedPacket(f"mark: expected work of 0 to {MAX_WORK} elements, found {work}")
            return IterationMark(Edge.END, iteration, time_ns, dropped_mark_count=ordinal, work=work)
        case MarkType.COMPUTATION_BEGIN | MarkType.COMPUTATION_END:
            if not Kind.FORWARD <= kind <= Kind.FIXED:
                raise MalformedPacket(f"mark: expected kind {Kind.FORWARD} to {Kind.FIXED}, found {kind}")
            edge = Edge.BEGIN if number == MarkType.COMPUTATION_BEGIN else Edge.END
            return ComputationMark(
                edge, iteration, ordinal, Computation(Kind(kind), microbatch, chunk), time_ns
            )
        case MarkType.FINISH:
            return Finish(time_ns)
        case MarkType.WAIT_BEGIN:
            return WaitMark(Edge.BEGIN, iteration, time_ns)
        case MarkType.WAIT_END:
            return WaitMark(Edge.END, iteration, time_ns)
        case _:
            raise MalformedPacket(f"mark: expected type 1 to {MarkType.WAIT_END}, found {number}")
