"""Bundles of an agent's messages: handled as if each had come alone, and acknowledged at once."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from perseus.bundles import MAX_MESSAGES
from perseus.service.api.agent_service import AgentService
from perseus.service.api.authentication import calling
from perseus.service.domain.principals import ANYBODY
from perseus.service.domain.retention import Retention
from perseus.service.domain.specification import Coordinates, Registration
from perseus.service.job.machine import JobMachine
from perseus.service.shell import writer
from perseus.service.shell.coordinator import Coordinator
from perseus.service.shell.jobs import LATEST
from perseus.service.shell.thinning import Part
from perseus.service.storage.sql_store import SqlStore
from perseus.v1 import agent_service_pb2 as wire
from tests.service.api.test_mutated_requests import (
    BEGINNING,
    JOB,
    MINE,
    RULES,
    THEIRS,
    EndedError,
    StreamContext,
    joined,
    output_of,
    requests,
    telemetry,
)
from tests.service.grpc_fakes import TIMEOUT_S, unused_solvers

BOTH = (MINE, THEIRS)


def bundle(*messages: wire.ConnectRequest) -> wire.ConnectRequest:
    return wire.ConnectRequest(bundle=wire.ConnectRequestBundle(messages=messages))


def batch(rank: Coordinates, iteration: int, sequence: int) -> wire.ConnectRequest:
    request = telemetry(rank, iteration + 1)
    request.telemetry.sequence = sequence
    return request


def beginning() -> list[wire.ConnectRequest]:
    """Return the messages of two ranks on one node until they are offered clocks."""
    batches = [
        batch(rank, iteration, 2 * iteration + 1 + number)
        for iteration in range(BEGINNING)
        for number, rank in enumerate(BOTH)
    ]
    return [*map(joined, BOTH), *batches]


class Agent:
    """An agent whose stream goes through the adapter into a real coordinator."""

    def __init__(self, coordinator: Coordinator, max_bundle_bytes: int = 0) -> None:
        self._coordinator = coordinator
        self._max_bundle_bytes = max_bundle_bytes
        self.context = StreamContext()

    async def say(self, *output: wire.ConnectRequest) -> None:
        """Send messages on a new stream, and wait until all are handled or the stream has ended."""
        self.context = context = StreamContext()

        async def speak() -> AsyncIterator[wire.ConnectRequest]:
            hello = wire.Hello(instance_id="agent", max_bundle_bytes=self._max_bundle_bytes)
            yield wire.ConnectRequest(hello=hello)
            for request in output:
                yield request
            await self._coordinator.flush()
            context.answered.clear()
            yield wire.ConnectRequest(heartbeat=wire.Heartbeat())
            await context.answered.wait()

        service = AgentService(self._coordinator.agents, self._coordinator.quotas)
        async with asyncio.timeout(TIMEOUT_S):
            with suppress(EndedError), calling(ANYBODY):
                await service.Connect(speak(), context)  # type: ignore[arg-type]
        await self._coordinator.flush()

    def heard(self, kind: str) -> list[Any]:
        """Return the coordinator's messages of one kind, in bundles or not."""
        each = [
            inner
            for message in self.context.written
            for inner in (message.bundle.messages if message.HasField("bundle") else [message])
        ]
        return [getattr(message, kind) for message in each if message.WhichOneof("message") == kind]


@asynccontextmanager
async def serving(path: Path) -> AsyncIterator[Coordinator]:
    """Run a coordinator with a registered job; it must end without a quarantined one."""
    store = await SqlStore.open(path)
    coordinator = Coordinator(store, *unused_solvers(), RULES, Retention())
    await coordinator.start()
    running = asyncio.create_task(coordinator.run())
    try:
        with patch.object(writer, "GATHERING_S", 0.0):
            await coordinator.jobs.register(JOB, Registration("one"))
            yield coordinator
        for job in coordinator.live:
            assert isinstance(job.machine, JobMachine)
            job.machine.validate()
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await coordinator.close()
        await store.close()


@pytest.fixture
async def coordinator(tmp_path: Path) -> AsyncIterator[Coordinator]:
    async with serving(tmp_path / "perseus.db") as coordinator:
        yield coordinator


async def test_a_bundle_is_acknowledged_once(coordinator: Coordinator) -> None:
    agent = Agent(coordinator)
    await agent.say(*map(joined, BOTH), bundle(*beginning()[2:]))
    assert [each.sequence for each in agent.heard("telemetry_ack")] == [2 * BEGINNING]
    assert coordinator.agents.taken_count == 2 * BEGINNING
    assert await coordinator._store.telemetry_sequence("agent") == 2 * BEGINNING


async def test_one_bad_batch_spoils_no_other(coordinator: Coordinator) -> None:
    bad, foreign = batch(MINE, 1, 3), batch(THEIRS, 1, 4)
    bad.telemetry.iterations.duration_s[0] = float("nan")
    foreign.telemetry.rank.pipeline = 7
    agent = Agent(coordinator)
    await agent.say(
        *map(joined, BOTH),
        bundle(
            batch(MINE, 0, 1), batch(THEIRS, 0, 2), bad, foreign, batch(MINE, 2, 5), wire.ConnectRequest()
        ),
    )
    refused = [(each.sequence, each.reason, each.field) for each in agent.heard("telemetry_refused")]
    assert refused == [
        (3, "INVALID_FIELD", "iterations.duration_s[0]"),
        (4, "RANK_OUT_OF_RANGE", "rank"),
    ]
    assert [each.reason for each in agent.heard("message_refused")] == ["EMPTY_MESSAGE"]
    assert agent.heard("telemetry_ack")[-1].sequence == 5
    assert (coordinator.agents.taken_count, coordinator.agents.passed_count) == (3, 2)
    kinds = [each.WhichOneof("message") for each in agent.context.written]
    assert kinds.index("telemetry_refused") < kinds.index("telemetry_ack"), "a refusal comes first"


async def test_a_resent_bundle_changes_nothing(coordinator: Coordinator) -> None:
    agent = Agent(coordinator)
    await agent.say(bundle(*beginning()))
    await agent.say(bundle(*beginning(), batch(MINE, BEGINNING, 2 * BEGINNING + 1)))
    assert agent.heard("welcome")[0].acknowledged_sequence == 2 * BEGINNING
    assert agent.heard("telemetry_ack")[-1].sequence == 2 * BEGINNING + 1
    assert coordinator.agents.repeated_count == 2 * BEGINNING
    assert agent.heard("telemetry_refused") == []


async def test_under_overload_rows_are_left_out_then_sums_and_all_is_acknowledged(
    coordinator: Coordinator,
) -> None:
    agent = Agent(coordinator)
    for part, taken_count, iterations in ((Part.ROWS, 16, range(8)), (Part.SUMS, 20, range(8, 16))):
        while coordinator.agents.thinning.part is not part:
            coordinator.agents.tick(1.0)
        batches = [batch(rank, each, 2 * each + 1 + n) for each in iterations for n, rank in enumerate(BOTH)]
        joins = [joined(rank) for rank in BOTH]
        for each in joins:
            each.rank_joined.iteration = iterations[0]
        await agent.say(*joins, bundle(*batches), bundle(*batches[-2:]))
        assert agent.heard("telemetry_refused") == []
        assert agent.heard("telemetry_ack")[-1].sequence == batches[-1].telemetry.sequence
        assert coordinator.agents.taken_count == taken_count
    assert coordinator.agents.thinned_counts == {Part.ROWS: 12, Part.SUMS: 12}
    assert (await coordinator.jobs.job("job", LATEST, is_full=False)).thinned_batch_count == 24
    machine = coordinator.live.find("job").machine
    assert isinstance(machine, JobMachine)
    assert machine.run.log.totals.regular_count == 8 + 2, "sums are kept, then every fourth iteration's"


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (bundle(), "bundle.messages"),
        (bundle(*[wire.ConnectRequest(heartbeat=wire.Heartbeat())] * (MAX_MESSAGES + 1)), "bundle.messages"),
        (bundle(bundle(wire.ConnectRequest(heartbeat=wire.Heartbeat()))), "bundle"),
    ],
)
async def test_a_wrong_bundle_is_refused_and_the_stream_continues(
    coordinator: Coordinator, wrong: wire.ConnectRequest, field: str
) -> None:
    agent = Agent(coordinator)
    await agent.say(wrong, bundle(*map(joined, BOTH)))
    refused = [(each.reason, each.field) for each in agent.heard("message_refused")]
    assert refused == [("INVALID_FIELD", field)]
    assert len(agent.heard("rank_accepted")) == 2


async def test_what_ends_the_stream_within_a_bundle_loses_nothing_before_it(coordinator: Coordinator) -> None:
    agent = Agent(coordinator)
    again = wire.ConnectRequest(hello=wire.Hello(instance_id="agent"))
    await agent.say(bundle(*map(joined, BOTH), batch(MINE, 0, 1), again, batch(THEIRS, 0, 2)))
    assert agent.context.status is not None
    goodbye = wire.ConnectRequest(goodbye=wire.Goodbye(reason="done"))
    await agent.say(bundle(*map(joined, BOTH), batch(THEIRS, 0, 2), goodbye, batch(MINE, 1, 3)))
    assert agent.heard("welcome")[0].acknowledged_sequence == 1
    assert agent.context.status is None
    await agent.say()
    assert agent.heard("welcome")[0].acknowledged_sequence == 2


async def test_a_stream_cannot_begin_with_a_bundle(coordinator: Coordinator) -> None:
    context = StreamContext()

    async def speak() -> AsyncIterator[wire.ConnectRequest]:
        yield bundle(wire.ConnectRequest(hello=wire.Hello(instance_id="agent")))

    with pytest.raises(EndedError), calling(ANYBODY):
        await AgentService(coordinator.agents, coordinator.quotas).Connect(speak(), context)  # type: ignore[arg-type]
    assert context.status is not None
    assert "found bundle" in context.status.details


@pytest.mark.parametrize("max_bundle_bytes", [0, 2**20])
async def test_an_agent_gets_bundles_only_if_it_takes_them(
    coordinator: Coordinator, max_bundle_bytes: int
) -> None:
    agent = Agent(coordinator, max_bundle_bytes)
    await agent.say(*beginning())
    assert agent.heard("welcome")[0].max_bundle_bytes == 2**20
    kinds = [message.WhichOneof("message") for message in agent.context.written]
    assert kinds[0] == "welcome"
    assert ("bundle" in kinds) == bool(max_bundle_bytes)
    assert {each.rank.pipeline for each in agent.heard("plan_offer")} == {0, 1}
    assert len(agent.heard("rank_accepted")) == 2


async def outcome(path: Path, output: Sequence[wire.ConnectRequest], max_bundle_bytes: int) -> list[Any]:
    """Return all that a coordinator knows after messages, and its answers, apart from their times."""
    async with serving(path) as coordinator:
        agent = Agent(coordinator, max_bundle_bytes)
        await agent.say(*output)
        job = await coordinator.jobs.job("job", LATEST, is_full=True)
        events = await coordinator.live._store.events("job", 1, 0, 10_000)
        for name in ("create_time", "epoch", "state_reason"):  # which may say since when ranks are missing
            job.ClearField(name)
        machine = coordinator.live.find("job").machine
        assert isinstance(machine, JobMachine)
        latest = {(each.rank.pipeline, each.version): each for each in agent.heard("plan_offer")}
        for offer in latest.values():
            offer.epoch = offer.commit_marker = ""
        return [
            *(agent.heard(kind) for kind in ("telemetry_refused", "message_refused", "rank_accepted")),
            [(each.reason, each.rank) for each in agent.heard("rank_refused")],
            max([0, *(each.sequence for each in agent.heard("telemetry_ack"))]),
            agent.context.status and agent.context.status.details,
            [str(each.message) for each in events],
            job,
            [await output_of(coordinator, rank) for rank in BOTH],
            await coordinator._store.telemetry_sequence("agent"),
            machine.run.log.totals,
            machine.run.log.closed_through,
            latest,
        ]


@st.composite
def split(
    draw: Callable[[st.SearchStrategy[Any]], Any],
) -> tuple[list[wire.ConnectRequest], list[wire.ConnectRequest]]:
    """Return messages, some of them invalid, one by one and in bundles."""
    single = beginning()
    for position, request in draw(
        st.lists(st.tuples(st.integers(2, len(single)), requests()), min_size=1, max_size=4)
    ):
        single.insert(position, request)
    single = [each for each in single if not each.HasField("bundle")]
    together: list[wire.ConnectRequest] = []
    rest = list(single)
    while rest:
        count = draw(st.integers(1, len(rest)))
        some, rest = rest[:count], rest[count:]
        together.append(some[0] if count == 1 else bundle(*some))
    return single, together


@pytest.mark.slow("two coordinators an example")
@settings(max_examples=15)
@given(ways=split())
def test_bundles_lead_where_single_messages_lead(
    tmp_path_factory: pytest.TempPathFactory,
    ways: tuple[list[wire.ConnectRequest], list[wire.ConnectRequest]],
) -> None:
    path = tmp_path_factory.mktemp("store")
    with capture_logs():
        found = [
            asyncio.run(outcome(path / f"{number}.db", output, 2**20 * number))
            for number, output in enumerate(ways)
        ]
    assert found[0] == found[1]
