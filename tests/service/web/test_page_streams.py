"""Server-sent events: all jobs, one job, late and returning readers, readers that don't read, and the end."""

import asyncio
import logging
import socket
from contextlib import AsyncExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from google.protobuf.message import Message
from structlog.testing import capture_logs

from perseus.service.shell.live_runs import LiveRuns
from perseus.service.web import event_sources, event_stream, json_text
from perseus.v1 import job_pb2
from tests.service.grpc_fakes import ALL_PLACES, FakeAgent, until
from tests.service.web.page_server import Stream, site, streaming
from tests.service.web.test_page_api import assert_refused, registration

OF_OTHERS = 1
"""The task that sets signal targets follows changes of jobs, too."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send gathered news soon."""
    monkeypatch.setattr(event_sources, "LIST_PERIOD_S", 0.05)
    monkeypatch.setattr(event_sources, "GATHER_S", 0.05)
    monkeypatch.setattr(event_sources, "FIGURES_S", 0.1)


async def caught_up(stream: Stream) -> list[dict[str, Any]]:
    """Return the updates up to CaughtUp."""
    found: list[dict[str, Any]] = []
    while not any("caught_up" in each for each in found):
        name, data = await stream.next()
        assert name == "updates", data
        found += data["updates"]
    return found


async def test_all_jobs_come_first_and_then_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(tmp_path) as here:
        client = here.client
        await client.register(job_id="one")
        await client.register(job_id="two")
        async with here.watch("jobs") as stream:
            name, whole = await stream.next()
            assert name == "jobs"
            assert whole["is_whole"]
            assert [job["job_id"] for job in whole["jobs"]] == ["one", "two"]
            assert whole["jobs"][0]["state"] == "JOB_STATE_WAITING"
            assert "spec" not in whole["jobs"][0]

            await client.register(job_id="three")
            _, more = await stream.next()
            assert not more["is_whole"]
            assert [job["job_id"] for job in more["jobs"]] == ["three"]

            await client.finish("two")
            _, changed = await stream.next()
            assert [(job["job_id"], job["state"]) for job in changed["jobs"]] == [
                ("two", "JOB_STATE_FINISHED")
            ]

            await client.ask("DeleteJob", job_id="two")
            _, gone = await stream.next()
            assert (gone["jobs"], gone["removed"]) == ([], ["two"])

            # A later reader gets the present jobs, though nothing changes.
            async with here.watch("jobs") as late:
                _, whole = await late.next()
            assert [job["job_id"] for job in whole["jobs"]] == ["one", "three"]

            # New measured figures are news, too.
            agent = FakeAgent(client, "agent", ALL_PLACES, job_id="one")
            await agent.join()
            await agent.iterate(3)
            async with asyncio.timeout(20):
                while not any("power_w" in job["figures"] for job in changed["jobs"]):
                    _, changed = await stream.next()


async def test_nothing_is_made_without_readers_or_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    text = json_text.to_json

    def counted(message: Message) -> str:
        if isinstance(message, job_pb2.Job):
            made.append(message.job_id)
        return text(message)

    monkeypatch.setattr(event_sources, "to_json", counted)
    async with site(tmp_path) as server:
        live: LiveRuns = server.coordinator.live

        async def register(job_id: str) -> None:
            assert (await server.call("RegisterJob", registration(job_id))).status == 200

        await register("a")
        await register("b")
        assert made == []
        async with server.watch("jobs") as first, server.watch("jobs") as second:
            await first.next()
            await second.next()
            assert sorted(made) == ["a", "b"], "made once for both"
            made.clear()
            await register("c")
            reported = await asyncio.gather(first.next(), second.next())
            assert reported[0] == reported[1]
            assert made == ["c"], "unchanged jobs are not read"
            assert len(live._followers) == OF_OTHERS + 1

        async def is_over() -> bool:
            return len(live._followers) == OF_OTHERS

        await register("d")  # the end of the readers shows at the next event
        await until(is_over)
        made.clear()
        await register("e")
        await asyncio.sleep(3 * event_sources.LIST_PERIOD_S)
        assert made == []


async def test_one_jobs_stream_agrees_with_grpc(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        client = here.client
        await client.register()
        agent = await here.train(job_pb2.JOB_STATE_PLANNED)
        async with here.watch("jobs/job") as stream:
            found = await caught_up(stream)
            assert "job" in found[0]
            reported = [each["event"] for each in found if "event" in each]
            last = int(found[-1]["caught_up"]["last_event_sequence"])
            assert [int(event["sequence"]) for event in reported] == list(range(1, last + 1))
            assert reported[0]["type"] == "JOB_EVENT_TYPE_REGISTERED"
            assert reported[0]["registered"]["parallelism"]["pipeline_count"] == 2
            assert stream.ids[-1] == f"1:{last}"
            await agent.iterate(3)
            await client.finish()
            found += await rest(stream)
        by_grpc = await client.events()
        sequences = [int(update["event"]["sequence"]) for update in found if "event" in update]
        assert sequences == list(range(1, len(by_grpc) + 1)), "all of them, in order, once"
        shown = [update["job"] for update in found if "job" in update][-1]
        assert (shown["state"], shown["figures"]["iteration_time_s"]) == ("JOB_STATE_FINISHED", 0.8)
        measured = [update["iteration"] for update in found if "iteration" in update]
        assert {(each["pipeline"], each["iteration_time_s"]) for each in measured} == {(0, 0.8), (1, 0.8)}

        # A run that has ended is delivered to its end.
        async with here.watch("jobs/job") as late:
            assert len(await caught_up(late)) == len(by_grpc) + 2
            assert await late.next() == ("end", {"reason": "RUN_ENDED"})


async def rest(stream: Stream) -> list[dict[str, Any]]:
    """Return the updates up to the end of the run."""
    found: list[dict[str, Any]] = []
    while True:
        name, data = await stream.next()
        if name == "end":
            assert data == {"reason": "RUN_ENDED"}
            return found
        found += data["updates"]


async def test_a_returning_reader_continues_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_sources, "FIRST_EVENTS", 2)
    async with site(tmp_path) as here:
        client = here.client
        await client.register()
        await FakeAgent(client, "agent", ALL_PLACES).join()

        async def sequences(query: str = "", headers: dict[str, str] | None = None) -> list[int]:
            async with here.watch(f"jobs/job{query}", headers) as stream:
                found = await caught_up(stream)
            return [int(update["event"]["sequence"]) for update in found if "event" in update]

        last = (await client.job()).last_event_sequence
        assert last > 4
        everything = list(range(1, last + 1))
        assert await sequences() == everything[-2:]
        assert await sequences("?after_sequence=0") == everything
        assert await sequences("?after_sequence=3") == everything[3:]
        assert await sequences(f"?after_sequence={last + 7}") == []
        assert await sequences("?run_number=1&after_sequence=3") == everything[3:]
        assert await sequences("?run_number=9&after_sequence=3") == everything[-2:], "of another run"
        assert await sequences("?after_sequence=0", {"Last-Event-ID": "1:4"}) == everything[4:]
        assert await sequences("", {"Last-Event-ID": "nonsense"}) == everything[-2:]
        for wrong in (
            "after_sequence=-1",
            "after_sequence=x",
            "run_number=1.5&after_sequence=1",
            "after_sequence=٣",
        ):
            refused = await here.get(f"api/watch/jobs/job?{wrong}")
            assert_refused(refused, 400, "INVALID_ARGUMENT", "INVALID_FIELD")
        missing = await here.get("api/watch/jobs/another")
        assert_refused(missing, 404, "NOT_FOUND", "JOB_NOT_FOUND")


async def test_readers_of_the_same_job_share_one_watcher(tmp_path: Path) -> None:
    async with site(tmp_path) as server:
        await server.call("RegisterJob", registration())
        run = server.coordinator.live.find("job")
        async with server.watch("jobs/job") as first, server.watch("jobs/job") as second:
            assert await caught_up(first) == await caught_up(second)
            assert len(run.watchers) == 1
        factors = count(1.2, 0.01)

        async def is_over() -> bool:
            # Their end shows at the next event.
            straggler = {"job_id": "job", "pipeline": 0, "slowdown_factor": next(factors)}
            await server.call("ReportStraggler", straggler)
            return not run.watchers

        await until(is_over)


async def test_only_a_reader_that_does_not_read_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "MAX_WAITING_BYTES", 200_000)
    async with site(tmp_path) as server:
        readers: list[event_stream.Reader] = []
        initialise = event_stream.Reader.__init__

        def noted(self: event_stream.Reader) -> None:
            initialise(self)
            readers.append(self)

        monkeypatch.setattr(event_stream.Reader, "__init__", noted)
        port = int(server.url.rpartition(":")[2])
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            slow.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(slow, ("127.0.0.1", port))
            request = f"GET /api/watch/jobs HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"
            await loop.sock_sendall(slow, request.encode())

            async def is_there() -> bool:
                return len(readers) == 1

            await until(is_there)
            async with server.watch("jobs") as quick:
                await quick.next()
                slow_one, _ = readers
                maximum = 0
                for number in range(2_000):
                    chunk = event_stream.event("jobs", f'{{"number":{number},"filling":"{"x" * 5_000}"}}')
                    for each in readers:
                        each.send(chunk)
                    maximum = max(maximum, slow_one._waiting_bytes)
                    assert (await quick.next())[1]["number"] == number
                    if slow_one._end_reason:
                        break
                assert slow_one._end_reason == "READER_TOO_SLOW"
                assert not slow_one._waiting
                assert maximum <= 200_000
                # The part that the kernel took can still be read; then the connection is gone.
                async with asyncio.timeout(20):
                    with suppress(ConnectionResetError):
                        while await loop.sock_recv(slow, 65_536):
                            pass

                async def is_gone() -> bool:
                    return len(server.coordinator.live._followers) == OF_OTHERS + 1

                await until(is_gone)
                quick_one = readers[1]
                quick_one.send(event_stream.event("jobs", '{"number":-1}'))
                assert (await quick.next())[1]["number"] == -1


@pytest.mark.parametrize("watching", ["jobs", "jobs/job"])
async def test_leaving_before_the_first_event_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, watching: str
) -> None:
    asked, answered = asyncio.Event(), asyncio.Event()
    serve = event_stream.Reader.serve

    async def serve_once_it_has_left(
        self: event_stream.Reader, request: web.Request, *rest: Any
    ) -> web.StreamResponse:
        async def has_left() -> bool:
            return request.transport is None

        asked.set()
        await until(has_left)
        try:
            return await serve(self, request, *rest)
        finally:
            answered.set()

    monkeypatch.setattr(event_stream.Reader, "serve", serve_once_it_has_left)
    async with site(tmp_path) as server:
        await server.call("RegisterJob", registration())
        host, _, port = server.url.removeprefix("http://").partition(":")
        with capture_logs() as logs:
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"GET /api/watch/{watching} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
            async with asyncio.timeout(20):
                await asked.wait()
                writer.transport.abort()
                await answered.wait()
            monkeypatch.undo()
            # Its place is free again, and others get the present jobs.
            async with server.watch(watching) as stream:
                await stream.next()
        assert [line for line in logs if "stood still" not in line["event"]] == []
        assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


async def test_streams_end_when_the_coordinator_stops(tmp_path: Path) -> None:
    async with aiohttp.ClientSession() as session, AsyncExitStack() as opened:
        async with site(tmp_path) as server:
            await server.call("RegisterJob", registration())
            streams = []
            for path in ("jobs", "jobs/job"):
                watching = streaming(session, f"{server.url}/api/watch/{path}")
                streams.append(await opened.enter_async_context(watching))
                await streams[-1].next()
        assert [await stream.until_end() for stream in streams] == ["DRAINING", "DRAINING"]


async def test_a_stream_without_news_sends_heartbeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "CHECK_S", 0.01)
    monkeypatch.setattr(event_stream, "HEARTBEAT_S", 0.02)
    async with site(tmp_path) as server, server.watch("jobs") as stream:
        response = stream.response
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-store"
        lines = [await response.content.readline() for _ in range(8)]
    assert lines[0].startswith(b"event: jobs")
    assert lines[-1] in (b": \n", b"\n")
    assert b": \n" in lines
