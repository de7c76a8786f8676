"""The coordinator and its store: lost state, jobs that can't be read or are archived, failures."""

import asyncio
import json
import os
import shutil
import sqlite3
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from sqlalchemy import text
from typer.testing import CliRunner

from perseus.cli.main import app
from perseus.service import server
from perseus.service.domain.errors import DatabaseUnreadableError, StoreFailedError
from perseus.service.settings import CoordinatorSettings
from perseus.service.shell import coordinator, ledger, tokens, writer
from perseus.service.storage.engines import connect
from perseus.service.storage.sql_store import SqlStore
from perseus.v1 import job_pb2
from tests.service.api.test_slots import JOBS, serving
from tests.service.grpc_fakes import (
    ALL_PLACES,
    TIMEOUT_S,
    Client,
    FakeAgent,
    connected,
    connected_to,
    joined,
    make_settings,
    outcome,
    refusal,
    until,
)
from tests.service.storage import postgresql


async def test_an_older_copy_begins_a_new_epoch_when_an_agent_shows_that_state_is_lost(
    tmp_path: Path,
) -> None:
    settings = make_settings(tmp_path)
    async with connected(settings) as client:
        agent = await joined(client)
        await agent.iterate(1)
        early_marker = agent.commit_marker
    shutil.copy(settings.database, tmp_path / "copy.db")
    async with connected(settings) as client:
        agent.use(client)
        await agent.join()
        await agent.iterate_until(client, job_pb2.JOB_STATE_PROFILING)
        await agent.iterate(3)
        lost_versions = {offer.version for offer in agent.offers}
    old_epoch = agent.epoch
    shutil.move(tmp_path / "copy.db", settings.database)

    async with connected(settings) as client:
        bystander = FakeAgent(client, "bystander", [])
        bystander.commit_marker = early_marker
        await bystander.hello()
        assert bystander.epoch == old_epoch  # it does not know of the loss yet
        agent.use(client)
        agent.offers.clear()
        await agent.hello()
        assert agent.epoch != old_epoch
        for rank in agent.ranks.values():  # they keep what they have in force, of the old epoch
            message = agent.joined(rank)
            message.in_force_epoch = old_epoch if rank.in_force.version else ""
            await agent.send(rank_joined=message)
        with pytest.raises(grpc.aio.AioRpcError, match="has lost acknowledged state"):
            await bystander.reader
        await agent.until(lambda: len(agent.accepted) == len(agent.ranks))
        await agent.iterate_until(client, job_pb2.JOB_STATE_PROFILING)
        assert max(lost_versions) < min(offer.version for offer in agent.offers)
    async with connected(settings) as client:
        agent.use(client)
        epoch = agent.epoch
        await agent.hello()
        assert agent.epoch == epoch  # it is durable, and nothing is lost any more


async def test_an_unreadable_job_is_unavailable_until_it_is_deleted(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    async with connected(settings) as client:
        for job_id in ("broken", "whole"):
            await client.register(job_id=job_id, request_id="request")
    with closing(sqlite3.connect(settings.database)) as connection, connection:
        connection.execute("UPDATE runs SET record = '{', version = 41 WHERE job_id = 'broken'")
    async with connected(settings) as client:
        assert (await client.job("whole")).job_id == "whole"
        for call in (client.job("broken"), client.register(job_id="broken"), client.events("broken")):
            code, reason, metadata = await refusal(call)
            assert (code, reason) == (grpc.StatusCode.DATA_LOSS, "JOB_UNREADABLE")
            assert metadata["job_id"] == "broken"
        agent = FakeAgent(client, places=ALL_PLACES[:1], job_id="broken")
        await agent.join()
        assert [refused.reason for refused in agent.refused] == ["JOB_UNREADABLE"]
        await client.ask("DeleteJob", job_id="broken")
        await client.register(job_id="broken")
    with closing(sqlite3.connect(settings.database)) as connection:
        # Its versions are never used again.
        versions = connection.execute("SELECT version FROM runs WHERE job_id = 'broken'").fetchall()
        assert versions == [(41,)]


async def test_no_reader_brings_back_a_job_that_is_being_deleted(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.register(request_id="first")
    await client.finish()
    monkeypatch.setattr(writer, "GATHERING_S", 0.2)  # its rows stay in the store that long
    deleting = asyncio.ensure_future(client.ask("DeleteJob", job_id="job"))

    async def is_being_deleted() -> bool:
        return bool((await outcome(client.job()))[0])

    await until(is_being_deleted)
    asking = [asyncio.ensure_future(refusal(client.job())) for _ in range(20)]
    await deleting
    codes = [code for code, _, _ in await asyncio.gather(*asking, refusal(client.job()))]
    assert set(codes) == {grpc.StatusCode.NOT_FOUND}
    registered = await client.register(request_id="first")
    assert registered.state is not job_pb2.JOB_STATE_FINISHED, "nothing of it is known any more"


async def test_an_archived_job_leaves_memory_and_its_report_and_number_stay(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, keep_finished_days=1e-9)
    async with connected(settings) as client:
        agent = await joined(client)
        await agent.iterate_until(client, job_pb2.JOB_STATE_PROFILING)
        await agent.iterate(2)
        await client.finish()
        report = await client.ask("GetReport", job_id="job")
        assert report.periods
        await agent.send(goodbye={})
        await client.all_lost()

    async def is_gone() -> bool:
        return not (await client.ask("ListJobs")).jobs

    async with connected(settings) as client:
        await until(is_gone)
        assert await client.ask("GetReport", job_id="job") == report
        assert (await client.job()).state == job_pb2.JOB_STATE_FINISHED
        assert (await client.register()).run_number == 2


async def test_an_orderly_stop_stores_the_pending_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(make_settings(tmp_path)) as client:
        agent = await joined(client)
        monkeypatch.setattr(writer, "GATHERING_S", 0.2)
        await agent.send(goodbye={})
        await client.all_lost()
    async with connected(make_settings(tmp_path)) as client:
        assert (await client.job()).rank_counts.lost_count == len(ALL_PLACES)


async def test_a_store_that_fails_stops_everything_and_its_error_is_logged_before_the_end(
    tmp_path: Path,
) -> None:
    settings = make_settings(tmp_path)
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with structlog.testing.capture_logs() as entries:
        serving = asyncio.ensure_future(server.serve(settings, on_listening=listening.set_result))
        async with connected_to(await listening) as client:
            os.unlink(settings.database)
            request = asyncio.ensure_future(client.register())
            with pytest.raises(StoreFailedError, match=r"perseus\.db was removed or replaced"):
                await asyncio.wait_for(serving, TIMEOUT_S)
            request.cancel()
    causes = {entry["event"]: entry.get("cause", "") for entry in entries}
    assert [*causes][-2:] == ["ends with an error", "stopped"]
    assert "was removed or replaced" in causes["ends with an error"]
    left = str(asyncio.all_tasks())
    assert ("Coordinator._tick" in left, "Writer.run" in left) == (False, False)


def test_the_command_ends_with_one_record_and_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(_: CoordinatorSettings) -> None:
        raise StoreFailedError(database="db", cause="it is away")

    monkeypatch.setattr(server, "serve", failing)
    flags = [f"--database={tmp_path / 'perseus.db'}", "--insecure", "--log-format=json"]
    done = CliRunner().invoke(app, ["coordinator", *flags])
    assert done.exit_code == 3
    record = json.loads(done.stderr)
    assert datetime.fromisoformat(record.pop("timestamp"))
    cause = "the database db failed: it is away"
    assert record == {"event": "ends with an error", "level": "critical", "cause": cause}


TASKS = {"Tokens.run", "Ledger.run", "Power.run"}
"""Tasks that read again and again; the end of one ends the coordinator."""


@pytest.mark.slow("a coordinator reads tables that are locked on a PostgreSQL server")
@pytest.mark.timeout(120)
@pytest.mark.skipif(bool(postgresql.MISSING), reason=str(postgresql.MISSING))
async def test_calls_that_read_are_refused_and_background_tasks_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing: set[str] = set()
    in_thread = SqlStore._in_thread

    async def note(store: SqlStore, *arguments: Any) -> Any:
        try:
            return await in_thread(store, *arguments)
        except DatabaseUnreadableError:
            failing.add(repr(asyncio.current_task()).partition("coro=<")[2].partition("(")[0])
            raise

    monkeypatch.setattr(SqlStore, "_in_thread", note)
    for owner, name in ((coordinator, "PRUNE_ROUND_S"), (ledger, "TOTALS_S"), (tokens, "RELOAD_S")):
        monkeypatch.setattr(owner, name, 0.05)
    with postgresql.running() as server:
        database = server.new_database()
        async with serving(tmp_path, database, 1) as client:
            other = await asyncio.to_thread(connect, database, slot=1)
            other.connection.execute(text("LOCK TABLE ledger, tokens, budgets, slot_powers"))
            code, reason, _ = await refusal(client.ask("ListLedgerEntries"))
            assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "DATABASE_UNREADABLE")
            async with asyncio.timeout(30):
                while not failing >= TASKS:  # noqa: ASYNC110 - they tell nobody
                    await asyncio.sleep(0.05)
            other.close()
            await client.ask("ListLedgerEntries")
            await client.register(job_id=JOBS[1])
