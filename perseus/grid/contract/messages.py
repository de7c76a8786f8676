"""The contract's messages: reads and validates every field of incoming ones, and writes outgoing ones.

Every message is a CloudEvents envelope around `data`, a JWS. Reading the envelope and reading the signed data
are two steps, with the signature's check between them. Both validate their input fully.
"""

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import from_json, to_json

from perseus.grid.dsx_flex.values import Constraint, Target, TargetSet, Trace

LOAD_TARGET_SET = "grid.loadtarget.set.v1"
POWER_STATE_STATUS = "grid.powerstate.status.v1"
POWER_BREACH_ALERT = "grid.powerbreach.alert.v1"
POWER_BREACH_ENFORCEMENT = "grid.powerbreach.enforcement.v1"

MAX_MESSAGE_BYTES = 256 * 1024
MAX_TARGETS = 64
"""The most targets in one message, and feeds in one target."""

_SHOWN = 80
_MAX_POWER = 1e12
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)", re.ASCII)
_UUID4 = r"^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-4[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}$"
_SOURCE = re.compile(r"//grid/v1/(?P<role>isv|dsx-flex-agent|infra)/(?P<identifier>[^/]+)")


class MalformedError(Exception):
    """A message violates the contract; the text says where, and what was expected and found."""


def _seconds(found: object) -> float:
    """Parse an RFC 3339 time (JSON Schema's date-time) to seconds since 1970."""
    expected = "expected a time as in RFC 3339, such as 2026-01-31T12:00:00Z"
    if not isinstance(found, str) or not _TIME.fullmatch(found):
        raise ValueError(expected)
    try:
        # Python's parser accepts only capital T and Z, and at most microseconds.
        text = re.sub(r"(\.\d{6})\d+", r"\1", found.upper())
        return max(0.0, datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError):
        raise ValueError(expected) from None


Time = Annotated[float, BeforeValidator(_seconds)]
Uuid = Annotated[str, StringConstraints(pattern=_UUID4, to_lower=True)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class _Part(BaseModel):
    """A part of a message. Fields that the contract does not define are ignored, as it demands."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Envelope(_Part):
    """A CloudEvents envelope; `data` is the signed content, as a JWS."""

    specversion: Literal["1.0.2"]
    id: Uuid
    source: Annotated[str, StringConstraints(pattern=f"^{_SOURCE.pattern}$", max_length=256)]
    type: Text
    time: Time
    datacontenttype: Literal["application/json"]
    subject: Text
    correlationid: Uuid | None = None
    traceparent: Annotated[
        str, StringConstraints(pattern=r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")
    ]
    tracestate: Annotated[str, StringConstraints(max_length=512)] | None = None
    data: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+$")]

    @property
    def sender(self) -> tuple[str, str]:
        """The role and identifier in the source."""
        found = _SOURCE.fullmatch(self.source)
        assert found is not None
        return found["role"], found["identifier"]


class _Interval(_Part):
    # An omitted time means an open interval; the contract does not allow null.
    start_time: Time = -math.inf
    end_time: Time = math.inf


class _Constraint(_Part):
    # The contract's schema allows 0, its text does not: the verdict refuses it, not the reader.
    value: Annotated[float, Field(ge=0, le=_MAX_POWER, allow_inf_nan=False)]
    unit: Literal["watt", "kilowatt", "megawatt"]


class _Strategy(_Part):
    best_effort: bool = False


class _Target(_Part):
    interval: _Interval
    load_constraint: _Constraint | None
    feed_tags: Annotated[list[Text], Field(max_length=MAX_TARGETS)] = []
    strategy: _Strategy = _Strategy()


class _SetLoadTarget(_Part):
    targets: Annotated[list[_Target], Field(min_length=1, max_length=MAX_TARGETS)]


class Enforcement(_Part):
    """The outcome of shed hints at an infrastructure agent, as far as the gateway uses it."""

    breach_id: Uuid
    feed_tag: Text
    action: Literal["applied", "reverted"]
    code: Literal["success", "partial", "error"]
    diag_msg: str = ""
    results: list[dict[str, Any]]
    timestamp: Time


_Model = TypeVar("_Model", bound=_Part)


def read_envelope(payload: bytes, wanted_type: str) -> Envelope:
    """Return the envelope in a broker's payload.

    Raises:
        MalformedError: it violates the contract, or has another type.
    """
    if len(payload) > MAX_MESSAGE_BYTES:
        raise MalformedError(f"expected {MAX_MESSAGE_BYTES} bytes at most, found {len(payload)}")
    envelope = _read(Envelope, payload)
    if envelope.type != wanted_type:
        raise MalformedError(f"type: expected {wanted_type}, found {envelope.type[:_SHOWN]!r}")
    return envelope


def read_load_targets(envelope: Envelope, signed: bytes) -> TargetSet:
    """Return the signed load targets.

    A target without a start applies from when its message was sent. A message without a correlation
    identifier gets its own identifier instead.

    Raises:
        MalformedError: they violate the contract.
    """
    content = _read(_SetLoadTarget, signed)
    return TargetSet(
        event_id=envelope.id,
        sender=envelope.sender[1],
        correlation_id=envelope.correlationid or envelope.id,
        time_s=envelope.time,
        targets=tuple(_target(number, each, envelope.time) for number, each in enumerate(content.targets)),
        trace=Trace(envelope.traceparent, envelope.tracestate),
    )


def read_enforcement(signed: bytes) -> Enforcement:
    """Return an infrastructure agent's signed report.

    Raises:
        MalformedError: it violates the contract.
    """
    return _read(Enforcement, signed)


def _target(number: int, target: _Target, sent_s: float) -> Target:
    start_s, end_s = target.interval.start_time, target.interval.end_time
    if start_s == -math.inf:
        start_s = sent_s
    if end_s <= start_s:
        where = f"targets.{number}.interval.end_time"
        raise MalformedError(f"{where}: expected a time after {moment(start_s)}, found {moment(end_s)}")
    limit = target.load_constraint
    constraint = None if limit is None else Constraint(limit.value, limit.unit)
    if constraint is not None and constraint.limit_w > _MAX_POWER:
        where = f"targets.{number}.load_constraint"
        raise MalformedError(f"{where}: expected {_MAX_POWER:g} W at most, found {constraint.limit_w:g}")
    return Target(tuple(target.feed_tags), start_s, end_s, constraint, target.strategy.best_effort)


def _read(model: type[_Model], text: bytes) -> _Model:
    try:
        content = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise MalformedError(f"expected JSON, found: {error}") from None
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in problem["loc"]) or "message"
        message = problem["msg"].removeprefix("Value error, ")
        raise MalformedError(f"{where}: {message}, found {problem['input']!r:.{_SHOWN}}") from None


def moment(time_s: float) -> str:
    """Format a time as in messages: RFC 3339, UTC, to the microsecond."""
    if not 0 <= time_s < 253_402_300_800:  # the years that datetime supports
        return f"{time_s:g}"
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def write_envelope(
    *,
    event_id: str,
    agent: str,
    event_type: str,
    time_s: float,
    data: str,
    trace: Trace,
    correlation_id: str | None,
) -> bytes:
    """Return an event of this gateway, with a JWS as `data`."""
    content: dict[str, str] = {
        "specversion": "1.0.2",
        "id": event_id,
        "source": f"//grid/v1/dsx-flex-agent/{agent}",
        "type": event_type,
        "time": moment(time_s),
        "datacontenttype": "application/json",
        "subject": event_type.split(".")[1],
        "traceparent": trace.traceparent,
    }
    if trace.tracestate is not None:
        content["tracestate"] = trace.tracestate
    if correlation_id is not None:
        content["correlationid"] = correlation_id
    return to_json({**content, "data": data})


def write_data(data: Mapping[str, object]) -> bytes:
    """Return the bytes to sign."""
    return to_json(data)
