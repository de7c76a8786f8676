"""Limits of one principal, on number, size and rate: requests beyond them are refused with a reason, or
slowed down."""

import asyncio
import time
import tracemalloc
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from grpc_status import rpc_status
from structlog.testing import capture_logs

from perseus.service.domain.messages import problem_to_proto
from perseus.service.shell.jobs import Jobs
from perseus.service.shell.ledger import Ledger
from perseus.v1 import computation_pb2, frontier_pb2, job_service_pb2
from tests.service.grpc_fakes import (
    TIMEOUT_S,
    Client,
    FakeAgent,
    connected,
    joined,
    make_settings,
    outcome,
    refusal,
    sent,
    until,
)
from tests.service.sites import Site
from tests.service.solving.problems import large_problem, make_problem

SMALL = problem_to_proto(make_problem())
LARGE = problem_to_proto(large_problem())
"""Of 4096 computations."""
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
INVALID = grpc.StatusCode.INVALID_ARGUMENT


async def test_streams_beyond_the_limit_are_refused_with_a_retry_delay(tmp_path: Path) -> None:
    async with connected(make_settings(tmp_path, limit_streams=2)) as client:
        agent = await joined(client)
        watch = client.ask("WatchJob", job_id="job")
        await watch.read()
        with capture_logs() as logs:
            for _ in range(3):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await client.agents.Connect(timeout=TIMEOUT_S).read()
                assert caught.value.code() is EXHAUSTED
                status, retry = rpc_status.from_call(caught.value), RetryInfo()
                assert status is not None
                assert any(detail.Unpack(retry) for detail in status.details)
                assert retry.retry_delay.seconds == 5
            again = await refusal(client.ask("WatchJob", job_id="job"))
        values = {"principal": "anybody", "what": "streams at once", "limit": "2", "found": "3"}
        assert again == (EXHAUSTED, "LIMIT_REACHED", values)
        assert [line["event"] for line in logs] == ["agent turned away"], "once, not three times"
        await agent.iterate()  # its stream is unaffected
        watch.cancel()
        hello = sent(hello={"instance_id": "another", "hostname": "host"})

        async def has_room() -> bool:
            call = client.agents.Connect()
            await call.write(hello)
            return await outcome(call) == ("", {})

        await until(has_room)


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


@pytest.mark.parametrize("site", [{"limit_jobs": 1}], indirect=True)
async def test_each_principal_has_limits_of_its_own(site: Site) -> None:
    secrets = [await site.new(name, "agent:*") for name in ("first", "second")]
    async with site.as_(secrets[0]) as first, site.as_(secrets[1]) as second:
        await first.register(job_id="a-1")
        values = (await refusal(first.register(job_id="a-2")))[2]
        assert values["principal"] == "token first"
        await second.register(job_id="b-1")
        # Registering another principal's job again does not count it twice.
        await second.register(job_id="a-1")
        assert (await refusal(first.register(job_id="a-2")))[1] == "LIMIT_REACHED"


async def test_a_batch_with_too_many_rows_is_refused_by_itself(tmp_path: Path) -> None:
    async with connected(make_settings(tmp_path, limit_batch_rows=5)) as client:
        agent = await joined(client)
        await agent.iterate()  # of 6 computations each
        assert {(each.reason, each.field, each.expected) for each in agent.telemetry_refused} == {
            ("INVALID_FIELD", "computations.iteration", "at most 5 of them")
        }


async def test_a_message_that_is_too_large_ends_its_call_and_nothing_else(tmp_path: Path) -> None:
    async with connected(make_settings(tmp_path, limit_message_bytes=65_536)) as client:
        large = job_service_pb2.RegisterJobRequest(request_id="x" * 70_000)
        # Compressed, it is smaller than that until it is decompressed.
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.jobs.RegisterJob(large, timeout=TIMEOUT_S, compression=compression)
            assert caught.value.code() is EXHAUSTED
        await client.register()


def gpipe(stage_count: int, microbatch_count: int) -> dict[str, Any]:
    name = computation_pb2.SCHEDULE_NAME_GPIPE
    schedule = {"named": {"name": name, "microbatch_count": microbatch_count}}
    return {"stage_count": stage_count, "schedule": schedule}


def solve(
    client: Client, problem: frontier_pb2.PipelineProblem, points: int = 3, timeout_s: float = 600
) -> Any:
    return client.ask("Solve", problem=problem, point_count=points, timeout_s=timeout_s)


async def test_a_solve_ends_with_its_deadline_and_delays_no_other(client: Client) -> None:
    await solve(client, SMALL)
    gone = [solve(client, LARGE, timeout_s=0.3) for _ in range(3)]
    cancelled = solve(client, LARGE)
    assert [await call.code() for call in gone] == [grpc.StatusCode.DEADLINE_EXCEEDED] * 3
    cancelled.cancel()
    answer = await solve(client, SMALL, timeout_s=3 * TIMEOUT_S)
    assert len(answer.frontier.points) == 3


async def test_a_solve_has_a_time_limit(tmp_path: Path) -> None:
    async with connected(make_settings(tmp_path, request_limit_s=0.1)) as client:
        refused = await refusal(solve(client, LARGE))
        assert refused == (grpc.StatusCode.DEADLINE_EXCEEDED, "SOLVER_TIMEOUT", {"limit_s": "0.1"})


async def test_a_solves_size_is_limited(tmp_path: Path) -> None:
    async with connected(make_settings(tmp_path, limit_solve_computations=4096)) as client:
        values = {"field": "problem.schedule.named.microbatch_count", "found": "4100 computations"}
        larger = solve(client, frontier_pb2.PipelineProblem(**gpipe(2, 1025)))
        values["expected"] = "at most 4096 computations"
        assert await refusal(larger) == (INVALID, "INVALID_FIELD", values)
        values = {"field": "point_count", "expected": "at most 2048 for 4096 computations", "found": "10000"}
        assert await refusal(solve(client, LARGE, points=10_000)) == (INVALID, "INVALID_FIELD", values)


@pytest.mark.parametrize(
    ("owner", "method", "rpc", "fields"),
    [
        (Jobs, "solve", "Solve", {"problem": SMALL, "point_count": 3}),
        (Ledger, "statement", "ListLedgerEntries", {}),
    ],
)
async def test_solves_and_listings_of_the_ledger_at_once_are_limited(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
    rpc: str,
    fields: dict[str, Any],
) -> None:
    """A call that comes while another is answered is refused; one that comes afterwards is not."""
    answer, refused = getattr(owner, method), list[tuple[str, str]]()

    async def ask_again(*arguments: Any) -> Any:
        monkeypatch.undo()
        reason, values = await outcome(client.ask(rpc, **fields))
        refused.append((reason, values.get("what", "")))
        return await answer(*arguments)

    monkeypatch.setattr(owner, method, ask_again)
    async with connected(make_settings(tmp_path, limit_solves=1)) as client:
        await client.ask(rpc, **fields)
        what = "solves at once" if owner is Jobs else "ledger listings at once"
        assert refused == [("LIMIT_REACHED", what)]
        await client.ask(rpc, **fields)


async def test_a_fast_sender_is_slowed_down_and_loses_nothing(tmp_path: Path) -> None:
    """At which rate, `test_quotas` tests."""
    rate = 5  # less than any machine sends
    count = 2 * rate
    async with connected(make_settings(tmp_path, limit_stream_messages_per_s=rate)) as client:
        other = FakeAgent(client, "b", [])
        await other.hello()
        with capture_logs() as logs:
            began_s = time.monotonic()
            agent = await joined(client, "a")

            async def send_batches() -> None:
                rank = next(iter(agent.ranks.values()))
                for _ in range(count):
                    rank.begin()
                    await agent.send(telemetry=agent.telemetry(rank))

            sending = asyncio.create_task(send_batches())
            for _ in range(3):  # meanwhile others get answers
                await other.beat()
            await sending
            await agent.until(lambda: agent.acknowledged == count)
            took_s = time.monotonic() - began_s
        assert took_s >= 1.0, "five messages may come at once, the next nine 0.2 s apart"
        assert agent.telemetry_refused == []
        assert not agent.reader.done(), "its stream is there still"
        slowed = [line for line in logs if "slowed down" in line["event"]]
        assert [line["instance_id"] for line in slowed] == ["a"], "logged once"


async def test_nothing_is_allocated_for_excessive_numbers(tmp_path: Path) -> None:
    """Numbers of jobs and problems are checked against their bounds before anything is allocated."""
    async with connected(make_settings(tmp_path)) as client:
        tracemalloc.start()
        for call in (
            client.register(pipelines=10**9),
            client.register(stages=10**9),
            client.register(microbatches=2**31 - 1),
            client.ask("Solve", problem={"stage_count": 10**9}, point_count=3),
            client.ask("Solve", problem=gpipe(2, 2**31 - 1), point_count=3),
        ):
            assert (await refusal(call))[0] is INVALID
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < 20 * 2**20
