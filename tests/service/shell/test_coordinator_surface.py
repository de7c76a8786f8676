"""Watching, listing, health and reflection over gRPC."""

import gc
import sqlite3
import weakref
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_database, descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from perseus.service.shell import watching
from perseus.service.shell.watch_state import WatchState
from perseus.v1 import event_pb2, job_pb2, job_service_pb2
from tests.service.grpc_fakes import TIMEOUT_S, Client, connected, joined, make_settings, until


def watch(client: Client, after_sequence: int = 0) -> AsyncIterator[job_service_pb2.WatchJobResponse]:
    return aiter(client.ask("WatchJob", job_id="job", after_sequence=after_sequence))


async def test_watching_shows_the_job_then_every_event_once_and_in_order_until_it_ends(
    client: Client,
) -> None:
    agent = await joined(client)
    await agent.iterate()
    early = watch(client)
    first = await anext(early)
    assert first.job.state == job_pb2.JOB_STATE_BASELINE
    await agent.iterate(5)
    late = watch(client, after_sequence=4)
    await client.finish()
    updates = [update async for update in early]
    later = [update async for update in late]

    def sequences(updates: list[job_service_pb2.WatchJobResponse]) -> list[int]:
        return [update.event.sequence for update in updates if update.HasField("event")]

    events = sequences(updates)
    assert events == list(range(1, len(events) + 1))
    assert sequences(later) == events[4:]
    for some in (updates, later):
        (place,) = [place for place, update in enumerate(some) if update.HasField("caught_up")]
        there = some[place].caught_up.last_event_sequence
        assert sequences(some[:place]) == list(range(min(sequences(some)), there + 1))
        last = [update.job for update in some if update.HasField("job")][-1]
        assert (last.state, last.last_event_sequence) == (job_pb2.JOB_STATE_FINISHED, events[-1])
    iterations = [update.iteration for update in updates if update.HasField("iteration")]
    assert {(iteration.pipeline, iteration.iteration) for iteration in iterations} >= {
        (pipeline, iteration) for pipeline in (0, 1) for iteration in range(1, 6)
    }
    assert all(iteration.energy_j == pytest.approx(160.0) for iteration in iterations)
    again = [update async for update in watch(client)]
    assert sequences(again) == events


LATER_TYPE: Any = 1000
LATER_DETAILS = b"\x82\x3f\x03abc"
"""An unknown field of number 1008."""


async def test_a_watcher_gets_gaps_for_deleted_events_and_those_of_a_later_version_unchanged(
    tmp_path: Path,
) -> None:
    settings = make_settings(tmp_path)
    async with connected(settings) as client:
        await client.register()
        for percent in (1, 2, 3, 4, 5):
            await client.ask("SetPolicy", job_id="job", policy={"max_slowdown_percent": percent})
    later = event_pb2.JobEvent(sequence=3, type=LATER_TYPE).SerializeToString() + LATER_DETAILS
    with closing(sqlite3.connect(settings.database)) as connection, connection:
        connection.execute("DELETE FROM events WHERE sequence IN (1, 2, 5)")
        changed = "UPDATE events SET type = ?, event = ? WHERE sequence = 3"
        connection.execute(changed, (LATER_TYPE, later))
    async with connected(settings) as client:
        await client.finish()
        updates = [update async for update in watch(client) if not update.HasField("job")]
    gap = job_service_pb2.WatchGap
    assert [update.gap for update in updates if update.HasField("gap")] == [
        gap(first_missed_sequence=1, last_missed_sequence=2),
        gap(first_missed_sequence=5, last_missed_sequence=5),
    ]
    assert updates[1].event.SerializeToString() == later
    kinds = [update.WhichOneof("update") for update in updates]
    assert kinds == ["gap", "event", "event", "gap", "event", "event", "caught_up"]


async def test_a_watcher_that_leaves_is_dropped(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    watchers: list[weakref.ref[watching.Watcher]] = []
    begin = watching.Watcher.__init__

    def note(watcher: watching.Watcher, state: WatchState) -> None:
        begin(watcher, state)
        watchers.append(weakref.ref(watcher))

    monkeypatch.setattr(watching.Watcher, "__init__", note)
    await client.register()
    call = client.ask("WatchJob", job_id="job")
    await call.read()
    assert [watcher() is not None for watcher in watchers] == [True]
    call.cancel()

    async def is_forgotten() -> bool:
        gc.collect()
        return watchers[0]() is None

    await until(is_forgotten)


async def test_events_are_listed_in_pages_by_type_and_time(client: Client) -> None:
    await joined(client)
    await client.finish()

    async def listed(**wanted: Any) -> list[event_pb2.JobEvent]:
        found: list[event_pb2.JobEvent] = []
        token = ""
        while True:
            page = await client.ask("ListJobEvents", job_id="job", page_size=2, page_token=token, **wanted)
            found += page.events
            if not (token := page.next_page_token):
                return found
            assert len(page.events) == 2

    everything = await listed()
    assert [event.sequence for event in everything] == list(range(1, len(everything) + 1))
    assert everything == await client.events() == await listed(run_number=1)
    states = await listed(types=[event_pb2.JOB_EVENT_TYPE_STATE_CHANGED])
    expected = [job_pb2.JOB_STATE_BASELINE, job_pb2.JOB_STATE_FINISHED]
    assert [event.state_changed.after for event in states] == expected
    third = everything[2].create_time
    assert await listed(start_time=third) == everything[2:]
    assert await listed(end_time=third) == everything[:2]


SERVICES = ("perseus.v1.AgentService", "perseus.v1.FrontierService", "perseus.v1.JobService")


async def test_health_answers_for_each_service(client: Client) -> None:
    health = health_pb2_grpc.HealthStub(client.channel)
    for service in ("", *SERVICES):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def reflected(
    client: Client, package: str, request: reflection_pb2.ServerReflectionRequest
) -> reflection_pb2.ServerReflectionResponse:
    """Call the reflection service of a package; both have the same messages."""
    method: Any = client.channel.stream_stream(
        f"/grpc.reflection.{package}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = method(timeout=TIMEOUT_S)
    await call.write(request)
    await call.done_writing()
    answer = await call.read()
    assert isinstance(answer, reflection_pb2.ServerReflectionResponse)
    return answer


async def listed_services(client: Client, package: str) -> set[str]:
    request = reflection_pb2.ServerReflectionRequest(list_services="*")
    listed = (await reflected(client, package, request)).list_services_response.service
    return {service.name for service in listed}


async def test_reflection_answers_under_its_stable_name_and_describes_itself(client: Client) -> None:
    """For a client that knows `grpc.reflection.v1` only and builds everything from its answers."""
    names = await listed_services(client, "v1")
    assert names == await listed_services(client, "v1alpha")
    assert {
        *SERVICES,
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    } <= names
    files = descriptor_database.DescriptorDatabase()
    pool = descriptor_pool.DescriptorPool(files)
    for name in sorted(names):
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)
        answer = await reflected(client, "v1", request)
        assert not answer.HasField("error_response"), name
        for text in answer.file_descriptor_response.file_descriptor_proto:
            files.Add(descriptor_pb2.FileDescriptorProto.FromString(text))
        service = pool.FindServiceByName(name)
        assert service.methods, name
    method = pool.FindServiceByName("grpc.reflection.v1.ServerReflection").methods[0]
    assert method.input_type.full_name == "grpc.reflection.v1.ServerReflectionRequest"
    assert method.output_type.full_name == "grpc.reflection.v1.ServerReflectionResponse"
    message = message_factory.GetMessageClass(method.output_type)()
    message.ParseFromString(answer.SerializeToString())
    assert message.SerializeToString(deterministic=True) == answer.SerializeToString(deterministic=True)
