"""Events on their way to the wire: no type, no class of evidence and no field of it is left out."""

import enum
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.api.translate_events import event_to_proto, filter_from_proto
from perseus.service.api.translate_jobs import policy_from_proto
from perseus.service.api.translate_time import time_from_proto, time_to_proto
from perseus.service.domain import evidence as domain
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.events import EventFilter, Happening, JobEvent
from perseus.service.domain.model import EventType
from perseus.service.domain.signals import SignalPacing
from perseus.service.domain.specification import OperatingPolicy
from perseus.service.domain.stall import Stall
from perseus.v1 import event_pb2, job_pb2
from perseus.v1.job_service_pb2 import ListJobEventsRequest
from tests.service.evidence_strategies import CLASSES, events

DETAILS = event_pb2.JobEvent.DESCRIPTOR.oneofs_by_name["details"].fields


def test_every_type_has_its_number_and_every_details_message_its_class() -> None:
    wire = {name.removeprefix("JOB_EVENT_TYPE_") for name in event_pb2.JobEventType.keys()}  # noqa: SIM118
    assert {kind.name for kind in EventType} == wire
    assert {kind.__name__ for kind in CLASSES} == {_message_name(field) for field in DETAILS}
    assert set(domain.EVIDENCE.values()) == set(CLASSES)
    assert set(domain.EVIDENCE) == set(EventType) - {EventType.RESUMED, EventType.UNSPECIFIED}


def _message_name(field: FieldDescriptor) -> str:
    assert field.message_type is not None
    return field.message_type.name


def plain_evidence(value: Any) -> Any:
    """Return a value as what `plain_message` should make of its message."""
    match value:
        case OperatingPolicy():
            return value
        case domain.PipelineClocks():
            shown = {field.name: plain_evidence(getattr(value, field.name)) for field in fields(value)}
            held_mhz, plan = shown.pop("held_clocks_mhz"), shown.pop("plan")
            clocks = {"hold": {"clocks_mhz": held_mhz}} if plan is None else {"plan": plan}
            return shown | ({"stock": {}} if plan is None and held_mhz is None else clocks)
        case Stall():
            shown = {field.name: plain_evidence(getattr(value, field.name)) for field in fields(value)}
            shown["since_time"] = shown.pop("since_time_s")
            return {name: each for name, each in shown.items() if each is not None}
        case SignalPacing():
            told = {
                "state": value.state.name,
                "begin_time": value.window.begin_s,
                "end_time": value.window.end_s,
                "iteration_count": value.window.iteration_count,
                "done_count": value.done_count,
                "iteration_time_s": value.pace_s,
                "value_per_kwh": value.value,
            }
            return {name: each for name, each in told.items() if each is not None}
        case enum.Enum():
            return value.name
        case tuple():
            return [plain_evidence(each) for each in value]
    if is_dataclass(value):
        shown = {field.name: plain_evidence(getattr(value, field.name)) for field in fields(value)}
        return {name: each for name, each in shown.items() if each is not None}
    return value


def plain_message(message: Message) -> Any:
    """Return every field of a message that is set, or that can't be unset."""
    if isinstance(message, job_pb2.OperatingPolicy):
        return policy_from_proto(message)
    if isinstance(message, Timestamp):
        return time_from_proto("time", message)
    shown = {}
    for field in message.DESCRIPTOR.fields:
        if not field.has_presence or message.HasField(field.name):
            value = getattr(message, field.name)
            shown[field.name] = (
                [_plain(field, v) for v in value] if field.is_repeated else _plain(field, value)
            )
    return shown


def _plain(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return plain_message(value)
    if field.enum_type is not None:
        prefix = field.enum_type.values[0].name.removesuffix("UNSPECIFIED")
        return field.enum_type.values_by_number[value].name.removeprefix(prefix)
    return value


@pytest.mark.parametrize("kind", EventType)
@given(data=st.data())
def test_every_field_of_the_evidence_arrives(kind: EventType, data: st.DataObject) -> None:
    event = data.draw(events(kind))
    message = event_pb2.JobEvent.FromString(event_to_proto(event).SerializeToString())
    assert (message.sequence, message.message) == (event.happening.sequence, event.happening.message)
    assert event_pb2.JobEventType.Name(message.type) == f"JOB_EVENT_TYPE_{kind.name}"
    assert time_from_proto("create_time", message.create_time) == event.create_time_s
    details = message.WhichOneof("details")
    if kind not in domain.EVIDENCE:
        assert details is None
        return
    assert details is not None
    found = getattr(message, details)
    assert found.DESCRIPTOR.name == domain.EVIDENCE[kind].__name__
    assert plain_message(found) == plain_evidence(event.happening.evidence)


@given(st.floats(-1e9, 2e11))
def test_times_come_back_the_same(time_s: float) -> None:
    """So that whoever asks for events from an event's own time on gets it."""
    message = time_to_proto(time_s)
    assert 0 <= message.nanos < 1_000_000_000
    assert time_from_proto("time", message) == pytest.approx(time_s, abs=1e-9)
    if abs(time_s) > 1e8:  # Beyond, a float is coarser than a nanosecond.
        assert time_from_proto("time", message) == time_s


def test_a_filter_says_what_is_wanted() -> None:
    assert filter_from_proto(ListJobEventsRequest()) == EventFilter(frozenset())
    request = ListJobEventsRequest(
        types=[event_pb2.JOB_EVENT_TYPE_SOLVED, event_pb2.JOB_EVENT_TYPE_SOLVED],
        start_time=Timestamp(seconds=1, nanos=500_000_000),
        end_time=Timestamp(seconds=3),
    )
    assert filter_from_proto(request) == EventFilter(frozenset([EventType.SOLVED]), 1.5, 3.0)


SOLVED_AND_NONE = [event_pb2.JOB_EVENT_TYPE_SOLVED, event_pb2.JOB_EVENT_TYPE_UNSPECIFIED]
UNKNOWN: Any = [99]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (ListJobEventsRequest(types=SOLVED_AND_NONE), r"types\[1\]: expected a known type of event, found 0"),
        (ListJobEventsRequest(types=UNKNOWN), r"types\[0\]: expected a known type of event, found 99"),
        (ListJobEventsRequest(start_time=Timestamp(nanos=-1)), "start_time: expected a time"),
        (ListJobEventsRequest(end_time=Timestamp(nanos=1_000_000_000)), "end_time: expected a time"),
        (ListJobEventsRequest(end_time=Timestamp(seconds=2**62)), "end_time: expected a time"),
    ],
)
def test_what_can_not_be_asked_for_is_named(request_: ListJobEventsRequest, expected: str) -> None:
    with pytest.raises(InvalidFieldError, match=expected):
        filter_from_proto(request_)


def test_an_event_without_evidence_has_no_details() -> None:
    event = JobEvent("job", 1, 1.0, Happening(1, EventType.SOLVED, "solved", None))
    assert event_to_proto(event).WhichOneof("details") is None
