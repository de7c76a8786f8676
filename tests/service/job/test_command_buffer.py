"""Events as the command buffer creates them: every type with its details, and all their fields."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

import perseus.service
from perseus.service.domain.commands import Announce
from perseus.service.domain.messages import time_to_proto
from perseus.service.job.command_buffer import CommandBuffer
from perseus.v1 import event_pb2

FIELDS = event_pb2.JobEvent.DESCRIPTOR.oneofs_by_name["details"].fields
SHARED = {
    event_pb2.JOB_EVENT_TYPE_PLAN_OFFERED: event_pb2.PipelineClocks,
    event_pb2.JOB_EVENT_TYPE_PLAN_IN_FORCE: event_pb2.PipelineClocks,
    event_pb2.JOB_EVENT_TYPE_STRAGGLER_DETECTED: event_pb2.StragglerFinding,
    event_pb2.JOB_EVENT_TYPE_STRAGGLER_WITHDRAWN: event_pb2.StragglerFinding,
    event_pb2.JOB_EVENT_TYPE_STALLED: event_pb2.Stall,
    event_pb2.JOB_EVENT_TYPE_STALL_ENDED: event_pb2.Stall,
}


def message_name(field: FieldDescriptor) -> str:
    assert field.message_type is not None
    return field.message_type.name


def details_by_type() -> Iterator[tuple[event_pb2.JobEventType.ValueType, Message | None]]:
    own = {f"JOB_EVENT_TYPE_{field.name.upper()}": message_name(field) for field in FIELDS}
    for name, kind in event_pb2.JobEventType.items():
        if kind in SHARED:
            yield kind, SHARED[kind]()
        elif kind:
            yield kind, getattr(event_pb2, own[name])() if name in own else None


def announced(kind: event_pb2.JobEventType.ValueType, details: Message | None) -> event_pb2.JobEvent:
    buffer = CommandBuffer(wall_time_s=12.5)
    buffer.announce(kind, "a sentence", details)
    (command,) = buffer.take()
    assert isinstance(command, Announce)
    return command.event


@pytest.mark.parametrize(("kind", "details"), list(details_by_type()))
def test_an_event_has_its_number_its_time_and_the_details_of_its_type(
    kind: event_pb2.JobEventType.ValueType, details: Message | None
) -> None:
    event = announced(kind, details)
    assert (event.sequence, event.type, event.message) == (1, kind, "a sentence")
    assert event.create_time == time_to_proto(12.5)
    field = event.WhichOneof("details")
    assert (None if field is None else getattr(event, field)) == details


@pytest.mark.parametrize(
    ("kind", "details"),
    [
        (event_pb2.JOB_EVENT_TYPE_SOLVED, event_pb2.SolveFailed()),
        (event_pb2.JOB_EVENT_TYPE_SOLVED, event_pb2.Stall()),
        (event_pb2.JOB_EVENT_TYPE_SOLVED, None),
        (event_pb2.JOB_EVENT_TYPE_STALLED, event_pb2.Solved()),
    ],
)
def test_a_type_accepts_no_other_details(
    kind: event_pb2.JobEventType.ValueType, details: Message | None
) -> None:
    with pytest.raises(AssertionError):
        announced(kind, details)


def test_an_event_shows_the_wall_clocks_time_of_its_input() -> None:
    buffer = CommandBuffer(wall_time_s=12.5)
    buffer.begin(0.0, 99.25)
    buffer.announce(event_pb2.JOB_EVENT_TYPE_RESUMED, "on")
    (command,) = buffer.take()
    assert isinstance(command, Announce)
    assert command.event.create_time == time_to_proto(99.25)


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield every place where the coordinator creates details, with the name of the message."""
    names = {message_name(field) for field in FIELDS}
    for path in Path(perseus.service.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("event_pb2."):
                name = ast.unparse(node.func).removeprefix("event_pb2.")
                if name in names:
                    yield name, node


def test_no_field_of_any_details_is_forgotten() -> None:
    made = set()
    for name, call in calls():
        made.add(name)
        given = {keyword.arg for keyword in call.keywords}
        if given == {
            None
        }:  # `**`: a solver error has the fields, and lacks none (`test_predictions_on_cluster`)
            continue
        descriptor = event_pb2.DESCRIPTOR.message_types_by_name[name]
        choices = [oneof for oneof in descriptor.oneofs if not oneof.name.startswith("_")]  # not `optional`
        chosen = {field.name for oneof in choices for field in oneof.fields}
        assert given == {field.name for field in descriptor.fields} - chosen, name
    assert made == {message_name(field) for field in FIELDS}
