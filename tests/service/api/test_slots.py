"""A coordinator of one slot of several: what is about another slot is refused with where that is served.

The power budget that slots divide is in `tests/test_fleet_end_to_end.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from perseus.service.api.elsewhere import Elsewhere
from perseus.service.domain.errors import ServedElsewhereError, TokenUnknownError
from perseus.service.domain.members import Fleet, Member, Slot
from perseus.service.domain.principals import Grant, Token
from perseus.service.shell import tokens
from perseus.service.shell.tokens import Tokens
from perseus.service.shell.writer import Writer
from perseus.service.storage.membership import MemberRows
from perseus.service.storage.sql_store import SqlStore
from perseus.tls.tokens import TokenSource
from perseus.v1 import agent_service_pb2, token_service_pb2
from tests.service.fleet.test_gpus import answer, joined_on
from tests.service.grpc_fakes import (
    ALL_PLACES,
    TIMEOUT_S,
    Client,
    FakeAgent,
    connected,
    connected_to,
    make_settings,
    refusal,
    running_here,
    sent,
    spec_message,
    until,
)
from tests.service.sites import tokens_of_coordinators
from tests.service.storage import postgresql

JOBS = THERE, HERE = "llama-4", "llama-2"
"""A job of slot 0 of two, and one of slot 1, where the tests are."""
METADATA = {"address": "other:1", "slot": "0", "standbys": "standby:1"}
ELSEWHERE = (grpc.StatusCode.UNAVAILABLE, "SERVED_ELSEWHERE", METADATA)


def fleet() -> Fleet:
    """Return a fleet of which this coordinator serves slot 1."""
    members = [Member("other", "other:1"), Member("standby", "standby:1"), Member("me", "me:1")]
    return Fleet("me", 1, members, [Slot(0, "other", 3), Slot(1, "me", 4)])


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    async with connected(make_settings(tmp_path), fleet()) as made:
        yield made


ABOUT_OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("RegisterJob", {"spec": spec_message(THERE), "request_id": "r"}),
    *(
        (method, {"job_id": THERE})
        for method in (
            "GetJob",
            "ListRuns",
            "ListRanks",
            "ListJobEvents",
            "FinishJob",
            "ResumeJob",
            "GetReport",
            "GetTimeline",
            "WatchJob",
            "ListLedgerEntries",
        )
    ),
    ("DeleteJob", {"job_id": THERE, "allow_missing": True}),
    ("CreateToken", {"name": "new", "scope": token_service_pb2.SCOPE_READER}),
    ("RevokeToken", {"name": "new"}),
    ("SetBudget", {"budget_id": "b", "feed": "default", "limit_w": 1e3}),
    ("CancelBudget", {"budget_id": "b"}),
    ("ListBudgets", {}),
]


async def test_calls_about_another_slot_name_who_serves_it(client: Client) -> None:
    for method, fields in ABOUT_OTHERS:
        is_about_job = not method.endswith(("Token", "Budget", "Budgets"))
        metadata = METADATA | ({"job_id": THERE} if is_about_job else {})
        assert await refusal(client.ask(method, **fields)) == (*ELSEWHERE[:2], metadata), method
    assert (await client.register(job_id=HERE)).job_id == HERE
    assert (await client.job(HERE)).job_id == HERE


async def test_while_nobody_serves_a_slot_no_address_is_named(tmp_path: Path) -> None:
    alone = fleet()
    alone.members = [Member("me", "me:1")]
    async with connected(make_settings(tmp_path), alone) as client:
        assert (await refusal(client.job(THERE)))[2] == {"address": "", "slot": "0", "job_id": THERE}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"slot": 1, "job_id": "b"}, "job 'b' is of slot 1, which the coordinator at a:1 serves"),
        ({"address": "", "slot": 1, "job_id": "b"}, "job 'b' is of slot 1, which nobody serves"),
        ({"slot": 0}, "the coordinator at a:1 serves slot 0"),
        ({}, "the coordinator at a:1 serves jobs"),
    ],
)
def test_what_is_served_elsewhere_is_named(given: dict[str, Any], sentence: str) -> None:
    assert str(ServedElsewhereError(**{"address": "a:1"} | given)) == sentence


async def test_a_rank_of_another_slots_job_is_refused_and_the_stream_goes_on(client: Client) -> None:
    await client.register(job_id=HERE)
    here = FakeAgent(client, "agent", ALL_PLACES[:1], job_id=HERE)
    await here.hello()
    assert (here.welcome.slot_count, here.welcome.slot) == (2, 1)
    (rank,) = here.ranks.values()
    message = here.joined(rank)
    message.job_id = THERE
    await here.send(rank_joined=message)
    await here.until(lambda: bool(here.refused))
    (refused,) = here.refused
    assert (refused.job_id, refused.reason) == (THERE, "SERVED_ELSEWHERE")
    assert dict(refused.metadata) == METADATA | {"job_id": THERE}
    await here.join_ranks()
    assert len(here.accepted) == 1


async def hello(client: Client, slot: int) -> agent_service_pb2.ConnectResponse:
    call = client.agents.Connect(timeout=TIMEOUT_S)
    await call.write(sent(hello={"instance_id": "a", "hostname": "h", "slot": slot}))
    answer = await call.read()
    assert isinstance(answer, agent_service_pb2.ConnectResponse)
    call.cancel()
    return answer


async def test_an_agent_for_another_slot_is_sent_there(client: Client) -> None:
    assert (await hello(client, 1)).welcome.slot == 1
    assert await refusal(hello(client, 0)) == ELSEWHERE


async def test_the_coordinators_of_a_fleet_are_listed_by_slot(client: Client) -> None:
    answer = await client.ask("ListCoordinators")
    assert answer.slot_count == 2
    assert [
        (each.address, each.slot if each.HasField("slot") else None, each.lease_epoch, each.is_answering)
        for each in answer.coordinators
    ] == [("other:1", 0, 3, False), ("me:1", 1, 4, True), ("standby:1", None, 0, False)]


async def test_a_coordinator_alone_lists_itself(tmp_path: Path) -> None:
    async with connected(make_settings(tmp_path)) as client:
        answer = await client.ask("ListCoordinators")
    (only,) = answer.coordinators
    assert (answer.slot_count, only.slot, only.HasField("slot"), only.is_answering) == (1, 0, True, True)


async def test_one_that_stands_by_sends_agents_to_their_slot_and_others_to_any() -> None:
    known = fleet()
    known.me, known.served = "standby", None
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Elsewhere(known),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with connected_to(f"127.0.0.1:{port}") as client:
        assert await refusal(hello(client, 0)) == ELSEWHERE
        assert (await refusal(hello(client, 1)))[2] == METADATA | {
            "address": "me:1",
            "slot": "1",
        }
        answers = [(await refusal(client.job(THERE)))[2] for _ in range(40)]
        known.members = known.members[1:2]
        nobody = (await refusal(client.job(THERE)))[2]
        known.slots = known.slots[:1]
        of_one_slot = (await refusal(client.job(THERE)))[2]
    await server.stop(None)
    assert {(answer["address"], answer["slot"]) for answer in answers} == {("other:1", "0"), ("me:1", "1")}
    assert nobody == {"address": "", "standbys": "standby:1"}
    assert of_one_slot == nobody | {"slot": "0"}


@asynccontextmanager
async def tokens_of_two_slots(path: Path) -> AsyncIterator[tuple[Tokens, Tokens, SqlStore]]:
    """Tokens of slot 0's coordinator, which writes them, and of slot 1's."""
    store = await SqlStore.open(path / "jobs.db")
    writer = Writer(store)
    writing = asyncio.create_task(writer.run())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield Tokens(store, writer), Tokens(store, writer, fleet()), store
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await store.close()


async def test_a_replaced_secret_of_the_operator_ends_its_streams_at_other_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "RELOAD_S", 0.01)
    async with tokens_of_two_slots(tmp_path) as (first, second, _):
        await first.adopt("old")
        await second.load()
        reading = asyncio.create_task(second.run())
        with second.watched(second.authenticate("old")) as ended:
            await first.adopt("new")
            assert isinstance(await ended, TokenUnknownError)
        assert second.authenticate("new").token_name == tokens.OPERATOR
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_unknown_tokens_are_looked_for_once_for_all_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tokens_of_two_slots(tmp_path) as (first, second, store):
        load_count = 0
        load = store.load_tokens

        async def counted() -> list[Token]:
            nonlocal load_count
            load_count += 1
            return await load()

        monkeypatch.setattr(store, "load_tokens", counted)
        _, secret = await first.create("reader", Grant.parse("reader"), None)
        with pytest.raises(TokenUnknownError):
            second.authenticate(secret)
        await asyncio.gather(*(second.refresh() for _ in range(5)))
        assert second.authenticate(secret).token_name == "reader"
        await first.refresh()
        assert load_count == 1


# ---------------------------------------------------------------------- two coordinators


@pytest.fixture
def database() -> Iterator[str]:
    with postgresql.running() as server:
        yield server.new_database()


@asynccontextmanager
async def slot_of_two(
    tmp_path: Path, database: str, slot: int, lease_epoch: int = 0, **settings: Any
) -> AsyncIterator[str]:
    """Run a coordinator that holds a slot of two; yield its address."""
    with closing(await asyncio.to_thread(MemberRows, database, 60.0, 2)) as rows:
        rows.join("", "")
        epoch, found = rows.take(slot, lease_epoch), rows.renew()
        assert epoch == lease_epoch + 1
        assert found is not None
        made = make_settings(tmp_path, database=database, slots=2, **settings)
        fence, fleet = Slot(slot, rows.member_id, epoch), Fleet(rows.member_id, slot, *found)
        async with running_here(made, fence, fleet) as (address, _):
            yield address
        rows.depart()


@asynccontextmanager
async def serving(tmp_path: Path, database: str, slot: int, lease_epoch: int = 0) -> AsyncIterator[Client]:
    async with slot_of_two(tmp_path, database, slot, lease_epoch) as address, connected_to(address) as client:
        yield client


@pytest.mark.slow("two coordinators on a PostgreSQL server")
@pytest.mark.timeout(120)
@pytest.mark.skipif(bool(postgresql.MISSING), reason=str(postgresql.MISSING))
async def test_a_token_of_slot_0_holds_at_others_at_once_and_once_revoked_ends_its_streams_there(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "RELOAD_S", 1.0)
    operator_file = tmp_path / "operator.token"
    secured: dict[str, Any] = {"insecure": False, "operator_token_file": operator_file}
    async with AsyncExitStack() as stack:
        made = stack.enter_context(tokens_of_coordinators(monkeypatch))
        _, address = [
            await stack.enter_async_context(slot_of_two(tmp_path, database, slot, **secured))
            for slot in range(2)
        ]
        async with connected_to(address, token=TokenSource(path=operator_file)) as operator:
            await operator.register(job_id=JOBS[1])
        _, secret = await made[0].create("reader", Grant.parse("reader"), None)
        reader = connected_to(address, token=TokenSource(token=secret))
        client = await stack.enter_async_context(reader)
        updates = aiter(client.ask("WatchJob", job_id=JOBS[1]))
        await anext(updates)
        await made[0].revoke("reader")

        async def read_on() -> None:
            async for _ in updates:
                pass

        assert (await refusal(read_on()))[1] == "TOKEN_REVOKED"
        assert (await refusal(client.job(JOBS[1])))[1] == "TOKEN_REVOKED"


@pytest.mark.slow("two coordinators on a PostgreSQL server")
@pytest.mark.timeout(120)
@pytest.mark.skipif(bool(postgresql.MISSING), reason=str(postgresql.MISSING))
async def test_a_gpu_runs_a_rank_of_one_slot(tmp_path: Path, database: str) -> None:
    first, second = ALL_PLACES[:2]
    async with AsyncExitStack() as stack, AsyncExitStack() as stack_of_slot_1:
        agents = []
        for slot, (job_id, each) in enumerate(zip(JOBS, (stack, stack_of_slot_1), strict=True)):
            client = await each.enter_async_context(serving(tmp_path, database, slot))
            await client.register(job_id=job_id)
            agents.append(FakeAgent(client, f"agent of {job_id}", ALL_PLACES, job_id=job_id))
            await agents[-1].hello()
        one, other = agents

        async def may_join(agent: FakeAgent) -> bool:
            return await answer(agent, joined_on(agent, second, "GPU-X")) == ""

        assert await answer(one, joined_on(one, first, "GPU-X")) == ""
        assert await answer(other, joined_on(other, second, "GPU-X")) == "GPU_ALREADY_SERVED"
        refused = other.refused[-1].metadata
        assert (refused["job_id"], refused["stage"]) == (JOBS[0], str(first.stage))
        assert await answer(other, joined_on(other, first, "GPU-Y")) == ""

        # It leaves, and the GPU is free for the other slot.
        await one.leave([first])
        await until(lambda: may_join(other))
        assert await answer(one, joined_on(one, first, "GPU-X")) == "GPU_ALREADY_SERVED"
        assert await answer(one, joined_on(one, second, "GPU-Z")) == ""

        # Slot 1's coordinator ends, and another takes over its ranks with their GPUs.
        await stack_of_slot_1.aclose()
        assert await answer(one, joined_on(one, first, "GPU-X")) == "GPU_ALREADY_SERVED"
        client = await stack.enter_async_context(serving(tmp_path, database, 1, 1))
        assert await answer(one, joined_on(one, first, "GPU-X")) == "GPU_ALREADY_SERVED"
        other.use(client)
        await other.hello()
        assert await answer(other, joined_on(other, second, "GPU-X")) == ""
        assert await answer(one, joined_on(one, first, "GPU-Y")) == "GPU_ALREADY_SERVED"

        # Its job ends there, and the GPUs are free although it is still connected: also the one whose rank
        # has not come back, which the new coordinator knows from the table alone.
        await client.finish(JOBS[1])
        for uuid in ("GPU-X", "GPU-Y"):

            async def is_released(uuid: str = uuid) -> bool:
                return await answer(one, joined_on(one, first, uuid)) == ""

            await until(is_released)
