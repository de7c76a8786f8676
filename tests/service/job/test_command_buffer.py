"""Events as the command buffer creates them: every type with its details, and all their fields.

Agents can't fill the store with events: excess events are dropped, counted and announced once.
"""

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

import perseus.service
from perseus.service.domain.commands import Announce
from perseus.service.domain.inputs import AgentHeard, GpuErrorReported
from perseus.service.domain.messages import time_to_proto
from perseus.service.domain.model import GpuErrorReason, JobState
from perseus.service.job.command_buffer import CommandBuffer
from perseus.service.job.event_rate_limit import MIN_CAPACITY, EventRateLimit
from perseus.v1 import event_pb2
from tests.service.job.clusters import FIRST, cluster_in

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


# ---------------------------------------------------------------------- floods of events


def test_a_bucket_empties_keeps_a_reserve_and_refills() -> None:
    budget = EventRateLimit(rank_count=0)
    budget.fill(0.0)
    reported = sum(budget.take(event_pb2.JOB_EVENT_TYPE_RANK_CHANGED) for _ in range(2 * MIN_CAPACITY))
    assert reported == 3 * MIN_CAPACITY // 4
    assert budget.take(event_pb2.JOB_EVENT_TYPE_STALLED), "events of the whole job have a reserve"
    assert budget.fill(60.0) == 0, "the flood is over once the bucket is half full"
    assert budget.fill(3600.0) == 2 * MIN_CAPACITY - reported
    assert budget.fill(3600.0) == 0
    assert budget.take(event_pb2.JOB_EVENT_TYPE_RANK_CHANGED)
    budget.fill(1e9)
    assert sum(budget.take(event_pb2.JOB_EVENT_TYPE_STALLED) for _ in range(2 * MIN_CAPACITY)) == MIN_CAPACITY
    assert budget.take(event_pb2.JOB_EVENT_TYPE_STATE_CHANGED), "no agent can suppress the job's end"


def test_a_job_whose_gpus_keep_failing_announces_the_flood_twice_and_drops_the_rest() -> None:
    cluster = cluster_in(JobState.BASELINE)
    error = GpuErrorReported(FIRST, "GPU-0-0-0", GpuErrorReason.DRIVER_FAILED, "")
    count = 5 * MIN_CAPACITY
    errors = [replace(error, message=f"hostile {number} " + "x" * 900) for number in range(count)]
    for each in errors:
        cluster.send(each)

    def announced_count() -> int:
        return sum(event.HasField("gpu_error") for event in cluster.events())

    reported = announced_count()
    assert reported < MIN_CAPACITY * 2
    assert [dropped.is_over for dropped in cluster.announced(event_pb2.EventsDropped)] == [False]
    cluster.now_s += 3600
    cluster.send(AgentHeard("agent-0"))
    cluster.send(AgentHeard("agent-0"))
    assert cluster.announced(event_pb2.EventsDropped)[1:] == [
        event_pb2.EventsDropped(dropped_count=count - reported, is_over=True)
    ]
    sequences = [event.sequence for event in cluster.events()]
    assert sequences == list(range(1, len(sequences) + 1)), "dropped events have no number"
    for each, is_forgotten in ((errors[-1024], False), (errors[-1025], True)):  # so many are remembered
        cluster.send(each)
        assert announced_count() == reported + is_forgotten
