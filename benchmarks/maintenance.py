"""Commits beside maintenance: what retention costs them where many runs are kept.

Group commits follow each other as in a loaded coordinator, alone and beside pruning in turn, so that other
load on the machine slows both. A hold is the time in which a step of pruning has the writer's thread, flush
to the disk included: a commit that is asked for meanwhile waits. Time in which the thread waits for a
processor that others use is left out of it. Rounds of pruning follow each other without a coordinator's pause
of a minute.
"""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median, quantiles

from benchmarks.harness import Cell, Column, Table, main
from benchmarks.ledger_pages import waited_s
from benchmarks.storage_cost import BATCHES, telemetry
from perseus.service.domain.retention import DAY_S, Retention
from perseus.service.shell.coordinator import PRUNE_STEP_S
from perseus.service.shell.writer import GATHERING_S
from perseus.service.storage.pruning import Pruner
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import NewRun
from tests.service.service_fakes import make_spec
from tests.service.storage.test_pruning import events, finished

RUNS, EVENTS = 10_000, 20
LONG_RUN_EVENTS = 50_000
_COMMITS = 200
_NOW_S = 1_000 * DAY_S
_BUSY_S = 0.004

_DUE = {
    "nothing": Retention(keep_finished_count=RUNS),
    "events of all runs": Retention(keep_finished_count=RUNS, keep_events_days=1.0),
    "most events of one run": Retention(keep_finished_count=RUNS, keep_event_count=1_000),
    "9 of 10 runs": Retention(keep_finished_count=RUNS // 10),
}


class _Holds:
    """Times the turns that pruning has in the writer's thread."""

    def __init__(self, store: SqlStore) -> None:
        self.taken_s: list[float] = []
        self.pruner: asyncio.Task[int] | None = None
        self._submit = store._thread.submit
        store._thread.submit = self._timed  # type: ignore[method-assign, assignment]

    def _timed(self, work: Callable[[], object]) -> object:
        if asyncio.current_task() is not self.pruner:
            return self._submit(work)

        def timed() -> object:
            begun_s = time.perf_counter() - waited_s()
            try:
                return work()
            finally:
                self.taken_s.append(time.perf_counter() - waited_s() - begun_s)

        return self._submit(timed)


async def _fill(store: SqlStore) -> None:
    for number in range(RUNS):
        # All ended ten days ago, one after the other.
        time_s = _NOW_S - 10 * DAY_S + number
        job_id = f"job-{number}"
        await store.write([*finished(job_id, time_s), *events(job_id, EVENTS - 3, time_s, first=4)])
    await store.write([NewRun(make_spec(), 1, _NOW_S), NewRun(make_spec("long"), 1, _NOW_S)])
    for first in range(1, LONG_RUN_EVENTS, 1_000):
        await store.write(events("long", 1_000, _NOW_S, first=first))


async def _commits(store: SqlStore, numbers: range) -> list[float]:
    took_s = []
    for number in numbers:
        await asyncio.sleep(GATHERING_S)
        entries = telemetry(number)
        begun_s = time.perf_counter()
        await store.write(entries)
        took_s.append(time.perf_counter() - begun_s)
    return took_s


async def _prune(store: SqlStore, retention: Retention) -> int:
    row_count = 0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            row_count += (await store.prune(retention, _NOW_S)).row_count
            await asyncio.sleep(PRUNE_STEP_S)
    return row_count


@asynccontextmanager
async def _busy_loop(is_busy: bool) -> AsyncIterator[None]:
    """Have the event loop compute most of the time."""

    async def compute() -> None:
        while True:
            until_s = time.perf_counter() + _BUSY_S
            while time.perf_counter() < until_s:
                pass
            await asyncio.sleep(_BUSY_S / 4)

    task = asyncio.create_task(compute()) if is_busy else None
    yield
    if task is not None:
        task.cancel()


async def _measure() -> list[Table]:
    rows: list[tuple[Cell, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        store = await SqlStore.open(Path(folder) / "store.db", clock=lambda: _NOW_S)
        await _fill(store)
        holds, number = _Holds(store), 1
        for due, retention in _DUE.items():
            for is_busy in (False, True):
                alone_s, beside_s, row_count = [], [], 0
                holds.taken_s.clear()
                store._pruner = Pruner()  # begin another round
                async with _busy_loop(is_busy):
                    for _ in range(4):
                        alone_s += await _commits(store, range(number, number + _COMMITS // 4))
                        number += _COMMITS // 4
                        holds.pruner = asyncio.create_task(_prune(store, retention))
                        beside_s += await _commits(store, range(number, number + _COMMITS // 4))
                        number += _COMMITS // 4
                        holds.pruner.cancel()
                        row_count += await holds.pruner
                rows.append(_row(due, is_busy, alone_s, beside_s, holds.taken_s, row_count))
        del store._thread.submit
        await store.close()
    return [
        Table(
            f"Commits of {BATCHES} batches into SQLite beside pruning, with {RUNS} kept runs",
            (
                Column("due"),
                Column("event loop"),
                Column("commit, median [ms]", ".1f"),
                Column("p99 [ms]", ".1f"),
                Column("beside pruning, p99 [ms]", ".1f"),
                Column("ratio of p99", ".2f"),
                Column("holds of the writer"),
                Column("longest hold [ms]", ".1f"),
                Column("deleted rows"),
            ),
            tuple(rows),
            f"Each run has {EVENTS} events and a row in every table, one more has {LONG_RUN_EVENTS} events. "
            f"Of {_COMMITS} commits; a busy loop computes four fifths of the time.",
        )
    ]


def _row(
    due: str,
    is_busy: bool,
    alone_s: list[float],
    beside_s: list[float],
    holds_s: list[float],
    row_count: int,
) -> tuple[Cell, ...]:
    alone_ms, beside_ms = (1e3 * quantiles(some, n=100)[-1] for some in (alone_s, beside_s))
    longest_ms = 1e3 * max(holds_s) if holds_s else None
    return (
        due, "busy" if is_busy else "idle", 1e3 * median(alone_s), alone_ms, beside_ms, beside_ms / alone_ms,
        str(len(holds_s)), longest_ms, str(row_count),
    )  # fmt: skip


def run() -> list[Table]:
    """Measure commits alone and beside pruning, as more and more is due."""
    return asyncio.run(_measure())


if __name__ == "__main__":
    main("maintenance", run)
