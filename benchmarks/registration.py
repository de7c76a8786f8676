"""The longest pause of the event loop while the largest permitted job is registered.

It is registered on the loop, as if it were small, and in a thread beside it, as in production; a small job
shows the share of the store and the answer. Pauses are CPU seconds of the process, so that other processes
don't count.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Column, Table, main
from perseus.schedule_name import ScheduleName
from perseus.service.domain.retention import Retention
from perseus.service.domain.specification import (
    MAX_COMPUTATION_COUNT,
    JobSpec,
    NamedSchedule,
    Parallelism,
    Registration,
)
from perseus.service.job.rules import Rules
from perseus.service.shell import live_runs
from perseus.service.shell.coordinator import Coordinator
from perseus.service.solving.worker_pool import JOBS, REQUESTS, WorkerPool
from perseus.service.storage.sql_store import SqlStore

STAGES = 16
_REPEATS = 3


def _spec(job_id: str, microbatches: int) -> JobSpec:
    schedule = NamedSchedule(ScheduleName.ONE_FORWARD_ONE_BACKWARD, microbatches)
    return JobSpec(job_id, Parallelism(1, STAGES, 1), schedule)


async def _longest_pause_s(done: asyncio.Task[object]) -> float:
    """Return the longest pause of the loop until a task is done."""
    longest_s, last_s = 0.0, time.process_time()
    while not done.done():
        await asyncio.sleep(0)
        now_s = time.process_time()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    return longest_s


async def _measure(large_size: int, microbatches: int) -> tuple[float, float]:
    """Return the longest pause and the time of a registration, the minimum over repeats, in seconds."""
    live_runs._LARGE_SIZE = large_size
    found: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as directory:
        store = await SqlStore.open(Path(directory) / "perseus.db")
        jobs, requests = WorkerPool(JOBS, 1, 60), WorkerPool(REQUESTS, 1, 60)
        coordinator = Coordinator(store, jobs, requests, Rules(), Retention())
        await coordinator.start()
        running = asyncio.create_task(coordinator.run())
        for number in range(_REPEATS):
            began_s = time.process_time()
            call = coordinator.jobs.register(_spec(f"job-{number}", microbatches), Registration("one"))
            task: asyncio.Task[object] = asyncio.create_task(call)
            pause_s = await _longest_pause_s(task)
            found.append((pause_s, time.process_time() - began_s))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await coordinator.close()
        await store.close()
        jobs.close()
        requests.close()
    return min(found)


def run() -> Sequence[Table]:
    """Measure all three."""
    largest = MAX_COMPUTATION_COUNT // (2 * STAGES)
    usual = live_runs._LARGE_SIZE
    rows = []
    for name, large_size, microbatches in (
        ("8 microbatches", usual, 8),
        (f"{largest} microbatches, on the loop", 10**9, largest),
        (f"{largest} microbatches, beside it", usual, largest),
    ):
        pause_s, time_s = asyncio.run(_measure(large_size, microbatches))
        rows.append((name, 2 * STAGES * microbatches, 1e3 * pause_s, 1e3 * time_s))
    beside, on_loop = rows[2][2], rows[1][2]
    assert isinstance(beside, float)
    assert isinstance(on_loop, float)
    return [
        Table(
            "Registering the largest job",
            (
                Column("job of 16 stages"),
                Column("computations", ","),
                Column("longest pause of the loop, ms", ".1f"),
                Column("CPU until it is registered, ms", ".0f"),
            ),
            tuple(rows),
            note=f"Beside the loop, its longest pause is {beside / on_loop:.3f} of that on it. "
            f"Minimum of {_REPEATS} registrations.",
        )
    ]


if __name__ == "__main__":
    main("registration", run)
