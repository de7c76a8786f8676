"""Records the inputs of a run's state machine so that the run can be replayed.

A machine is a function of its beginning and of its inputs with their times: both together reproduce the same
commands, and the same fault. Frontiers and plans are not kept: the machine requests them, and solving yields
the same ones again.

A recording begins with the run, and again whenever the coordinator continues a stored run: after its own
start, and when a quarantined job is resumed. Its size is bounded: a recording that grows too large is
dropped, and the next one begins only then.
"""

import base64
import enum
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from google.protobuf.message import Message

from perseus import solver
from perseus.service.domain import (
    inputs,
    ledger,
    measured,
    model,
    profiling,
    records,
    signals,
    specification,
    stall,
    telemetry,
)
from perseus.service.domain.errors import RecordingUnreadableError
from perseus.service.domain.inputs import Input, Refined, RefineFailed, Solved, TelemetryArrived
from perseus.service.domain.records import StoredJob
from perseus.service.domain.specification import JobSpec, Registration
from perseus.service.job.rules import Rules
from perseus.v1 import event_pb2

MAX_SIZE_BYTES = 8 * 2**20
"""Approximate memory that the inputs of one recording may take."""

_MAX_TEXT_BYTES = 256 * 2**20
"""Of a document, many times what `MAX_SIZE_BYTES` make: a damaged one may unpack without an end."""

_FORMAT = 2
_INPUT_BYTES, _ROW_BYTES = 1024, 192
"""Memory that an input takes, and each computation in it."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The beginning of a new run: the arguments of `JobMachine` and its `register`."""

    spec: JobSpec
    run_number: int
    rules: Rules
    epoch: str
    create_time_s: float
    created_s: float
    registration: Registration
    version: int


@dataclass(frozen=True, slots=True)
class Restored:
    """The beginning of a run continued from the store: the arguments of `JobMachine.restore`."""

    stored: StoredJob
    rules: Rules
    epoch: str
    now_s: float
    wall_time_s: float


@dataclass(frozen=True, slots=True)
class SolverAnswered:
    """The answer to the latest request to the solver; with a cause, the request for an exact plan failed."""

    cause: str | None = None


class Recording:
    """A run's beginning and its inputs, each with the time of the jobs' clock and of the wall clock.

    Attributes:
        beginning: None once the recording is dropped.
        size_bytes: approximate size in memory.
    """

    def __init__(self, beginning: Begun | Restored) -> None:
        self.beginning: Begun | Restored | None = beginning
        self.inputs: list[tuple[Input | SolverAnswered, float, float]] = []
        self.size_bytes = 0
        if isinstance(beginning, Restored):  # nothing else keeps the stored rows in memory
            stored = beginning.stored
            parts = stored.ranks, stored.offers, stored.profiles, stored.periods, stored.open_rows
            self.size_bytes = _INPUT_BYTES * sum(map(len, parts))

    def add(self, event: Input, now_s: float, wall_time_s: float) -> None:
        """Record one input."""
        if self.beginning is None:
            return
        self.size_bytes += _INPUT_BYTES
        kept: Input | SolverAnswered = event
        match event:
            case TelemetryArrived():
                self.size_bytes += _ROW_BYTES * len(event.batch.computations.duration_s)
            case Solved() | Refined():
                kept = SolverAnswered()
            case RefineFailed():
                kept = SolverAnswered(event.cause)
        self.inputs.append((kept, now_s, wall_time_s))
        if self.size_bytes > MAX_SIZE_BYTES:
            self.drop()

    def drop(self) -> None:
        """Discard the recording, and record nothing more."""
        self.beginning, self.inputs, self.size_bytes = None, [], 0

    def dump(self, **more: object) -> str:
        """Return the recording as a document, with additional values."""
        document = {"format": _FORMAT, "beginning": self.beginning, "inputs": self.inputs, **more}
        text = json.dumps({name: to_json(value) for name, value in document.items()})
        return base64.b64encode(zlib.compress(text.encode())).decode()

    @classmethod
    def load(cls, document: str) -> tuple["Recording", dict[str, Any]]:
        """Return a recording, and the additional values of its document.

        Raises:
            RecordingUnreadableError: the document is no recording, or of another version of Perseus.
        """
        try:
            unpacking = zlib.decompressobj()
            packed = base64.b64decode(document, validate=True)
            found = json.loads(unpacking.decompress(packed, _MAX_TEXT_BYTES))
            if (form := found.pop("format")) != _FORMAT:
                raise RecordingUnreadableError(expected=f"format {_FORMAT}", found=f"format {form}")
            values = {name: from_json(value) for name, value in found.items()}
            recording = cls(values.pop("beginning"))
            recording.inputs = values.pop("inputs")
        except (zlib.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            text = f"{type(error).__name__}: {error}"
            raise RecordingUnreadableError(expected="a recording of this version", found=text) from None
        return recording, values


def to_json(value: Any) -> Any:
    """Return a value such that `from_json` gives it back: classes and enums by name, tuples as tuples."""
    match value:
        case enum.Enum():
            return {"enum": type(value).__name__, "name": value.name}
        case Rules():  # a subclass may have all other settings, too
            return {"type": "Rules", **{name: getattr(value, name) for name in Rules.model_fields}}
        case Message():  # its fields are numbers only
            found = {field.name: getattr(value, field.name) for field in value.DESCRIPTOR.fields}
            return {"type": value.DESCRIPTOR.name, **found}
        case tuple() if hasattr(value, "_fields"):
            found = {name: to_json(getattr(value, name)) for name in value._fields}
            return {"type": type(value).__name__, **found}
        case tuple():
            return {"tuple": [to_json(each) for each in value]}
        case list():
            return [to_json(each) for each in value]
        case Mapping():
            return {"mapping": [[to_json(key), to_json(each)] for key, each in value.items()]}
        case _ if is_dataclass(value):
            found = {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
            return {"type": type(value).__name__, **found}
    return value


def from_json(value: Any) -> Any:
    """Return the original of a value of `to_json`; KeyError or TypeError if its classes are unknown here."""
    match value:
        case list():
            return [from_json(each) for each in value]
        case {"enum": kind, "name": name}:
            return _CLASSES[kind][name]
        case {"tuple": list(members)}:
            return tuple(from_json(each) for each in members)
        case {"mapping": list(pairs)}:
            return {from_json(key): from_json(each) for key, each in pairs}
        case {"type": kind, **parts}:
            return _CLASSES[kind](**{str(name): from_json(each) for name, each in parts.items()})
    return value


_CLASSES: dict[str, Any] = {
    name: kind
    for module in (
        solver,
        specification,
        telemetry,
        model,
        profiling,
        signals,
        stall,
        measured,
        ledger,
        records,
        inputs,
    )
    for name, kind in vars(module).items()
    if is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, enum.Enum | tuple))
} | {
    kind.__name__: kind
    for kind in (Rules, Begun, Restored, SolverAnswered, event_pb2.MeasurementsUnexplained)
}
"""The classes of which beginnings and inputs consist, apart from numbers and texts."""
