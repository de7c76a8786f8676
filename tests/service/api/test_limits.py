"""Limits of one principal, on number, size and rate: requests beyond them are refused with a reason, or
slowed down."""

import asyncio
import time
import tracemalloc
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from grpc_status import rpc_status
from structlog.testing import capture_logs

from perseus.service.domain.messages import problem_to_proto
from perseus.service.domain.statement import Statement
from perseus.service.shell.ledger import Ledger
from perseus.tls.channels import Channels
from perseus.tls.tokens import TokenSource
from perseus.v1 import (
    agent_service_pb2,
    computation_pb2,
    frontier_service_pb2,
    job_service_pb2,
    ledger_service_pb2,
    token_service_pb2,
)
from perseus.v1.ledger_service_pb2_grpc import LedgerServiceStub
from perseus.v1.token_service_pb2_grpc import TokenServiceStub
from tests.service.grpc_fakes import (
    ALL_PLACES,
    TIMEOUT_S,
    Client,
    FakeAgent,
    connected,
    make_settings,
    refusal,
    running_here,
    until,
)
from tests.service.solving.problems import large_problem

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
INVALID = grpc.StatusCode.INVALID_ARGUMENT


async def refused_stream(client: Client) -> grpc.aio.AioRpcError:
    call = client.agents.Connect(timeout=TIMEOUT_S)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value


async def test_streams_beyond_the_limit_are_refused_with_a_retry_delay(tmp_path: Path) -> None:
    async with connected(make_settings(tmp_path, limit_streams=2)) as client:
        await client.register()
        agent = FakeAgent(client, "a", ALL_PLACES)
        await agent.join()
        watch = client.jobs.WatchJob(job_service_pb2.WatchJobRequest(job_id="job"))
        await watch.read()
        with capture_logs() as logs:
            for _ in range(3):
                error = await refused_stream(client)
                assert error.code() is EXHAUSTED
                status = rpc_status.from_call(error)
                retry = RetryInfo()
                assert status is not None
                assert any(detail.Unpack(retry) for detail in status.details)
                assert retry.retry_delay.seconds == 5
            again = client.jobs.WatchJob(job_service_pb2.WatchJobRequest(job_id="job"))
            code, reason, values = await refusal(again.read())
        assert (code, reason) == (EXHAUSTED, "LIMIT_REACHED")
        assert values == {"principal": "anybody", "what": "streams at once", "limit": "2", "found": "3"}
        assert [line["event"] for line in logs] == ["agent turned away"], "once, not three times"
        await agent.iterate()  # its stream is unaffected
        watch.cancel()

        async def has_room() -> bool:
            call = client.agents.Connect()
            await call.write(HELLO)
            try:
                answer = await call.read()
            except grpc.aio.AioRpcError:
                return False
            call.cancel()
            return isinstance(answer, agent_service_pb2.ConnectResponse)

        await until(has_room)
        await agent.end()


HELLO = agent_service_pb2.ConnectRequest(
    hello=agent_service_pb2.Hello(instance_id="another", agent_version="0", hostname="host")
)


async def test_live_jobs_count_and_ended_ones_do_not(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, limit_jobs=2)
    async with connected(settings) as client:
        await client.register(job_id="one")
        await client.register(job_id="two")
        await client.register(job_id="two")  # the same again
        code, reason, values = await refusal(client.register(job_id="three"))
        assert (code, reason) == (EXHAUSTED, "LIMIT_REACHED")
        assert (values["what"], values["limit"], values["found"]) == ("jobs", "2", "3")
    async with connected(settings) as client:  # after a restart it still knows the owner
        assert (await refusal(client.register(job_id="three")))[1] == "LIMIT_REACHED"
        await client.register(job_id="two", microbatches=5)  # a new run replaces the one before
        await client.finish("one")
        await client.register(job_id="three")


async def test_ranks_and_computations_count_over_all_jobs(tmp_path: Path) -> None:
    async with connected(make_settings(tmp_path, limit_ranks=8, limit_computations=50)) as client:
        await client.register(job_id="one")  # 4 ranks, 12 computations
        code, reason, values = await refusal(client.register(job_id="two", pipelines=3))
        assert (code, reason, values["what"]) == (EXHAUSTED, "LIMIT_REACHED", "ranks")
        code, reason, values = await refusal(client.register(job_id="two", microbatches=10))
        assert (code, reason, values["what"]) == (EXHAUSTED, "LIMIT_REACHED", "computations")
        # Too large by themselves: waiting would not help.
        code, reason, values = await refusal(client.register(job_id="two", pipelines=5))
        assert (code, reason, values["field"]) == (INVALID, "INVALID_FIELD", "parallelism")
        code, reason, values = await refusal(client.register(job_id="two", microbatches=13))
        assert (code, reason, values["field"]) == (INVALID, "INVALID_FIELD", "schedule")
        await client.register(job_id="two")


async def test_each_principal_has_limits_of_its_own(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, insecure=False, operator_token_file=tmp_path / "token", limit_jobs=1)
    async with AsyncExitStack() as stack:
        address, _ = await stack.enter_async_context(running_here(settings))

        async def called_by(token: TokenSource) -> Client:
            return Client(await stack.enter_async_context(Channels(address, token=token).open()))

        async def agent(name: str) -> Client:
            request = token_service_pb2.CreateTokenRequest(
                name=name, scope=token_service_pb2.SCOPE_AGENT, job_patterns=["*"]
            )
            answer = await TokenServiceStub(operator.channel).CreateToken(request, timeout=TIMEOUT_S)
            return await called_by(TokenSource(token=answer.secret))

        operator = await called_by(TokenSource(path=tmp_path / "token"))
        first, second = await agent("first"), await agent("second")
        await first.register(job_id="a-1")
        values = (await refusal(first.register(job_id="a-2")))[2]
        assert values["principal"] == "token first"
        await second.register(job_id="b-1")
        # Registering another principal's job again does not count it twice.
        await second.register(job_id="a-1")
        assert (await refusal(first.register(job_id="a-2")))[1] == "LIMIT_REACHED"


async def test_a_batch_with_too_many_rows_is_refused_by_itself(tmp_path: Path) -> None:
    async with connected(make_settings(tmp_path, limit_batch_rows=5)) as client:
        await client.register()
        agent = FakeAgent(client, "a", ALL_PLACES)
        await agent.join()
        await agent.iterate()  # of 6 computations each
        assert {(each.reason, each.field, each.expected) for each in agent.telemetry_refused} == {
            ("INVALID_FIELD", "computations.iteration", "at most 5 of them")
        }
        await agent.end()


async def test_a_message_that_is_too_large_ends_its_call_and_nothing_else(tmp_path: Path) -> None:
    async with connected(make_settings(tmp_path, limit_message_bytes=65_536)) as client:
        large = job_service_pb2.RegisterJobRequest(request_id="x" * 70_000)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.jobs.RegisterJob(large, timeout=TIMEOUT_S)
        assert caught.value.code() is EXHAUSTED
        # It decompresses to more than that.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.jobs.RegisterJob(large, timeout=TIMEOUT_S, compression=grpc.Compression.Gzip)
        assert caught.value.code() is EXHAUSTED
        await client.register()


async def test_solves_at_once_and_their_size_are_limited(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, limit_solves=2, limit_solve_computations=4096)
    problem = problem_to_proto(large_problem())  # of 4096 computations
    solve = frontier_service_pb2.SolveRequest(problem=problem, point_count=3)
    async with connected(settings) as client:
        calls = [client.frontiers.Solve(solve, timeout=600) for _ in range(3)]
        waiting = [asyncio.ensure_future(refusal(call)) for call in calls]
        done, others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        code, reason, values = done.pop().result()
        assert (code, reason, values["what"]) == (EXHAUSTED, "LIMIT_REACHED", "solves at once")
        assert len(others) == 2
        for call in calls:
            call.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        larger = frontier_service_pb2.SolveRequest(point_count=3)
        larger.problem.stage_count = 2
        larger.problem.schedule.named.name = computation_pb2.SCHEDULE_NAME_GPIPE
        larger.problem.schedule.named.microbatch_count = 1025
        code, reason, values = await refusal(client.frontiers.Solve(larger, timeout=TIMEOUT_S))
        assert (code, values["expected"]) == (INVALID, "at most 4096 computations")


async def test_listings_of_the_ledger_at_once_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statement, may_go_on, asked = Ledger.statement, asyncio.Event(), asyncio.Semaphore(0)

    async def held_up(ledger: Ledger, *wanted: Any) -> Statement:
        asked.release()
        await may_go_on.wait()
        return await statement(ledger, *wanted)

    monkeypatch.setattr(Ledger, "statement", held_up)
    async with connected(make_settings(tmp_path, limit_solves=2)) as client:
        stub, request = LedgerServiceStub(client.channel), ledger_service_pb2.ListLedgerEntriesRequest()
        waiting = [stub.ListLedgerEntries(request, timeout=TIMEOUT_S) for _ in range(2)]
        async with asyncio.timeout(TIMEOUT_S):
            for _ in waiting:
                await asked.acquire()
        code, reason, values = await refusal(stub.ListLedgerEntries(request, timeout=TIMEOUT_S))
        assert (code, reason, values["what"]) == (EXHAUSTED, "LIMIT_REACHED", "ledger listings at once")
        may_go_on.set()
        await asyncio.gather(*waiting)
        await stub.ListLedgerEntries(request, timeout=TIMEOUT_S)


async def test_a_fast_sender_is_slowed_down_and_loses_nothing(tmp_path: Path) -> None:
    rate = 50
    async with connected(make_settings(tmp_path, limit_stream_messages_per_s=rate)) as client:
        await client.register()
        agent = FakeAgent(client, "a", ALL_PLACES)
        other = FakeAgent(client, "b", [])
        await agent.join()
        await other.hello()
        count, heartbeat_count, began_s = 3 * rate, 0, time.monotonic()
        with capture_logs() as logs:
            sent = asyncio.create_task(send_batches(agent, count))
            while agent.acknowledged < count:  # meanwhile others get answers
                other.received.clear()
                await other.send(heartbeat=agent_service_pb2.Heartbeat())
                await other.until(lambda: any(each.HasField("heartbeat") for each in other.received))
                heartbeat_count += 1
                await asyncio.sleep(0.02)
            await sent
        took_s = time.monotonic() - began_s
        assert took_s >= (count - 2 * rate) / rate, "a second's worth at once, and then the rate"
        assert heartbeat_count > 1
        assert agent.telemetry_refused == []
        assert not agent.reader.done(), "its stream is there still"
        slowed = [line for line in logs if "slowed down" in line["event"]]
        assert [line["instance_id"] for line in slowed] == ["a"], "logged once"
        for each in (agent, other):
            await each.end()


async def send_batches(agent: FakeAgent, count: int) -> None:
    rank = agent.ranks[ALL_PLACES[0]]
    for _ in range(count):
        rank.begin()
        await agent.send(telemetry=agent.telemetry(rank))


async def test_nothing_is_allocated_for_excessive_numbers(tmp_path: Path) -> None:
    """Numbers of jobs and problems are checked against their bounds before anything is allocated."""
    async with connected(make_settings(tmp_path)) as client:
        tracemalloc.start()
        for register in (
            client.register(pipelines=10**9),
            client.register(stages=10**9),
            client.register(microbatches=2**31 - 1),
        ):
            assert (await refusal(register))[0] is INVALID
        problem = frontier_service_pb2.SolveRequest(point_count=3)
        problem.problem.stage_count = 10**9
        assert (await refusal(client.frontiers.Solve(problem)))[0] is INVALID
        problem.problem.stage_count = 2
        problem.problem.schedule.named.name = computation_pb2.SCHEDULE_NAME_GPIPE
        problem.problem.schedule.named.microbatch_count = 2**31 - 1
        assert (await refusal(client.frontiers.Solve(problem)))[0] is INVALID
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < 20 * 2**20
