"""A database that can't be read for a while: calls are refused, and the coordinator goes on."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from sqlalchemy import text

from perseus.service.domain.errors import DatabaseUnreadableError
from perseus.service.shell import coordinator, ledger, tokens
from perseus.service.storage.engines import connect
from perseus.service.storage.sql_store import SqlStore
from tests.service.api.test_slots import JOBS, serving
from tests.service.grpc_fakes import refusal
from tests.service.storage import postgresql

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
