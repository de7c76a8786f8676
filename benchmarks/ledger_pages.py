"""How long a year's ledger takes and stops the coordinator's loop: for its totals after a start, the first
page with the total of all, and a page after that."""

import asyncio
import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path

from benchmarks.harness import Column, Table, main
from perseus.service.api.ledger_service import entry_to_proto
from perseus.service.domain.ledger import Rates
from perseus.service.server import collect_rarely
from perseus.service.shell.ledger import Ledger
from perseus.service.shell.writer import Writer
from perseus.service.storage import schema
from perseus.service.storage.sql_store import SqlStore

SIZES = ((60, 30), (1000, 365))
PAGE_SIZE = 100
_TICK_S = 0.001

# Two baselines a job, and a price and an intensity of each hour's own.
_ROWS = """
WITH RECURSIVE job(number) AS (SELECT 0 UNION ALL SELECT number + 1 FROM job WHERE number + 1 < :jobs),
    hour(number) AS (SELECT 0 UNION ALL SELECT number + 1 FROM hour WHERE number + 1 < :hours)
INSERT INTO ledger
SELECT printf('job-%04d', job.number), 1, 1, :first + hour.number, hour.number * 2 / :hours, 10, 8000.0, 9e4,
    0.2 + 0.1 * (hour.number % 24) / 24, 300.0 + hour.number % 200, 600, 0, 3600.0, 1000.0, 0.0, 599, 4.1e6,
    5.4e6, 590, 0, 0.0, 0.0
FROM job, hour
"""


def run() -> Sequence[Table]:
    collect_rarely()
    rows: list[tuple[str | int | float | None, ...]] = []
    for jobs, days in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ledger.db"
            asyncio.run(_make(path, jobs, days * 24))
            rows += asyncio.run(_measured(path, jobs, days))
    return [
        Table(
            "The ledger of many jobs under a carbon signal",
            (
                Column("jobs"),
                Column("days"),
                Column("what"),
                Column("takes [s]", ".2f"),
                Column("longest pause of the loop [ms]", ".0f"),
            ),
            tuple(rows),
            f"Every hour has a price and an intensity of its own. A page has {PAGE_SIZE} entries. Time in "
            "which the loop's thread waited for a processor is left out.",
        )
    ]


async def _make(path: Path, jobs: int, hours: int) -> None:
    await (await SqlStore.open(path)).close()
    connection = sqlite3.connect(path)
    assert len(schema.ledger.columns) == 22
    with connection:
        first = int(time.time() // 3600) - hours + 1
        connection.execute(_ROWS, {"jobs": jobs, "hours": hours, "first": first})
    connection.close()


async def _measured(path: Path, jobs: int, days: int) -> list[tuple[str | int | float, ...]]:
    store = await SqlStore.open(path)
    writer = Writer(store)
    writing = asyncio.create_task(writer.run())
    ledger = Ledger(store, writer, lambda _time_s: Rates(0.25, 400.0), days * 86_400.0)
    adding = asyncio.create_task(ledger.run())

    async def totals() -> None:
        while ledger.totals is None:  # noqa: ASYNC110 (a scrape polls it, too)
            await asyncio.sleep(_TICK_S)

    async def page(after: tuple[str, int, int] | None) -> None:
        found = await ledger.statement(after=after, run_count=PAGE_SIZE + 1)
        assert [entry_to_proto(entry) for entry in found.entries[:PAGE_SIZE]]

    rows: list[tuple[str | int | float, ...]] = [
        (jobs, days, what, *await _pause(work))
        for what, work in (
            ("totals after a start", totals()),
            ("the first page", page(None)),
            ("a page from the middle", page((f"job-{jobs // 2 - 1:04}", 1, 1))),
        )
    ]
    for task in (adding, writing):
        task.cancel()
    await asyncio.gather(adding, writing, return_exceptions=True)
    await store.close()
    return rows


async def _pause(work: Awaitable[None]) -> tuple[float, float]:
    """Return how long work takes, seconds, and the longest pause of the loop meanwhile, milliseconds.

    Time in which its thread waits for a processor, that others use, is no pause.
    """
    begun_s, longest_s = time.perf_counter(), 0.0
    task = asyncio.ensure_future(work)
    while not task.done():
        slept_s = time.perf_counter() - waited_s()
        await asyncio.sleep(_TICK_S)
        longest_s = max(longest_s, time.perf_counter() - waited_s() - slept_s - _TICK_S)
    await task
    return time.perf_counter() - begun_s, 1000 * longest_s


def waited_s() -> float:
    """Return how long this thread has waited for a processor."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


if __name__ == "__main__":
    main("ledger_pages", run)
