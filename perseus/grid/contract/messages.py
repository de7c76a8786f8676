"""The contract's messages: what comes in, checked to the last field, and what goes out, written down.

Everything is a CloudEvents envelope around `data`, which is a JWS on the wire: reading an envelope and
reading what was signed are two steps, and between them is the signature's check. Neither trusts anything.
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
"""In one message, and feeds of one target."""

_SHOWN = 80
_MAX_POWER = 1e12
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)", re.ASCII)
_UUID4 = r"^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-4[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}$"
_SOURCE = re.compile(r"//grid/v1/(?P<role>isv|dsx-flex-agent|infra)/(?P<identifier>[^/]+)")


class MalformedError(Exception):
    """A message is none of the contract's; the text says where, what was expected and what was found."""


def _seconds(found: object) -> float:
    """A time of RFC 3339 in seconds since 1970; a date-time of JSON Schema is nothing else."""
    expected = "expected a time as in RFC 3339, such as 2026-01-31T12:00:00Z"
    if not isinstance(found, str) or not _TIME.fullmatch(found):
        raise ValueError(expected)
    try:
        # Python's parser takes what RFC 3339 has in capitals, and microseconds.
        text = re.sub(r"(\.\d{6})\d+", r"\1", found.upper())
        return max(0.0, datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError):
        raise ValueError(expected) from None


Time = Annotated[float, BeforeValidator(_seconds)]
Uuid = Annotated[str, StringConstraints(pattern=_UUID4, to_lower=True)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class _Part(BaseModel):
    """A part of a message. What the contract does not know is let through, as it says, and not looked at."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Envelope(_Part):
    """A CloudEvents envelope; `data` is what was signed, as a JWS."""

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
        """Role and identifier in the source."""
        found = _SOURCE.fullmatch(self.source)
        assert found is not None
        return found["role"], found["identifier"]


class _Interval(_Part):
    # What is left out is open; the contract has no null for it.
    start_time: Time = -math.inf
    end_time: Time = math.inf


class _Constraint(_Part):
    # 0 is in the contract's schema, though its text wants more: a verdict's matter, not the reader's.
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
    """What an infrastructure agent has made of shed hints: all of it that is of interest here."""

    breach_id: Uuid
    feed_tag: Text
    action: Literal["applied", "reverted"]
    code: Literal["success", "partial", "error"]
    diag_msg: str = ""
    results: list[dict[str, Any]]
    timestamp: Time


_Model = TypeVar("_Model", bound=_Part)


def read_envelope(payload: bytes, wanted_type: str) -> Envelope:
    """Return the envelope in what a broker delivers.

    Raises:
        MalformedError: it is none of the contract's, or of another type.
    """
    if len(payload) > MAX_MESSAGE_BYTES:
        raise MalformedError(f"expected {MAX_MESSAGE_BYTES} bytes at most, found {len(payload)}")
    envelope = _read(Envelope, payload)
    if envelope.type != wanted_type:
        raise MalformedError(f"type: expected {wanted_type}, found {envelope.type[:_SHOWN]!r}")
    return envelope


def read_load_targets(envelope: Envelope, signed: bytes) -> TargetSet:
    """Return the load targets that were signed.

    A target without a start counts from when its message was sent. A message without a correlation identifier
    is called by its own.

    Raises:
        MalformedError: they are none of the contract's.
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
    """Return what an infrastructure agent reports.

    Raises:
        MalformedError: it is none of the contract's.
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
    """Return a time as messages have it: RFC 3339, UTC, to the microsecond."""
    if not 0 <= time_s < 253_402_300_800:  # the years that datetime knows
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
    """Return an event of this door's, with what was signed as `data`."""
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
    """Return what is to be signed."""
    return to_json(data)
