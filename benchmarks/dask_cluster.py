"""Frontiers on a Dask cluster of two local workers, against two worker processes, in blocks that alternate.

CPU seconds are of this process and its workers, or of this process and all of Dask's, which count idle, too.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil  # type: ignore[import-untyped]
from numpy.typing import NDArray

from benchmarks.distinct_stages import distinct_stages
from benchmarks.harness import Column, Table, main
from perseus.cli.frontier_file import frontier_text
from perseus.service.solving.dask_cluster import DaskCluster
from perseus.service.solving.worker_pool import BATCH, WorkerPool
from perseus.solver import solve
from tests.service.solving.dask_processes import DaskProcesses, dask_processes

Floats = NDArray[np.float64]

COUNT = 200
_BLOCK = 20
_LIMIT_S = 3600.0


@asynccontextmanager
async def pools() -> AsyncIterator[tuple[WorkerPool, WorkerPool, DaskProcesses]]:
    """Two worker processes, and two Dask workers, both started."""
    with tempfile.TemporaryDirectory() as folder, dask_processes(Path(folder)) as dask:
        cluster = DaskCluster(dask.address)
        here, there = WorkerPool(BATCH, 2, _LIMIT_S), WorkerPool(BATCH, 2, _LIMIT_S, cluster=cluster)
        running = asyncio.create_task(cluster.run())
        try:
            while cluster.thread_count < 2:  # noqa: ASYNC110 (no event)
                await asyncio.sleep(0.1)
            for pool in (here, there):
                await asyncio.gather(*(pool.run(time.sleep, 2.0) for _ in range(2)))
            yield here, there, dask
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            here.close()
            there.close()


async def _compared() -> tuple[Floats, Floats, int]:
    """Return the times that the frontiers took in processes and on Dask, and how many are equal.

    A time is in seconds, and in CPU seconds.
    """
    work = [partial(solve, distinct_stages(8, 12, 1, seed)) for seed in range(COUNT)]
    times_s = {True: np.zeros(2), False: np.zeros(2)}
    equal_count = 0
    async with pools() as (here, there, dask):
        of_here = [cast(int, worker.process_id) for worker in here._workers]
        of_there = [process.pid for process in (dask.scheduler, *dask.workers)]
        for begin in range(0, COUNT, _BLOCK):
            block = work[begin : begin + _BLOCK]
            found: dict[bool, list[Any]] = {}
            # ABBA: what slows the machine down meets both.
            for is_there in (True, False) if begin // _BLOCK % 2 else (False, True):
                pool, processes = (there, of_there) if is_there else (here, of_here)
                began_s = _now_s(processes)
                found[is_there] = await asyncio.gather(*(pool.run(piece) for piece in block))
                times_s[is_there] += _now_s(processes) - began_s
            equal_count += sum(map(are_equal, found[True], found[False]))
    return times_s[False], times_s[True], equal_count


def _now_s(process_ids: Sequence[int]) -> Floats:
    """Return the time, and the CPU time of this process, of others and of those below them."""
    others = [psutil.Process(process_id) for process_id in process_ids]
    below = [child for process in others for child in process.children(recursive=True)]
    used = [process.cpu_times() for process in (psutil.Process(), *others, *below)]
    return np.array([time.perf_counter(), sum(each.user + each.system for each in used)])


def are_equal(one: Any, other: Any) -> bool:
    """Whether two frontiers and all their plans are the same, to the last bit."""
    deadlines_s = [point.deadline_s for point in one.points]
    return frontier_text(one) == frontier_text(other) and all(
        one.plan_within(time_s) == other.plan_within(time_s) for time_s in deadlines_s
    )


def run() -> Sequence[Table]:
    (here_s, here_cpu_s), (there_s, there_cpu_s), equal_count = asyncio.run(_compared())
    return [
        Table(
            f"{COUNT} frontiers of 8 distinct stages and 12 microbatches on two processors",
            (
                Column("two worker processes, s", ".1f"),
                Column("two Dask workers, s", ".1f"),
                Column("overhead, %", ".1f"),
                Column("two worker processes, CPU s", ".1f"),
                Column("two Dask workers, CPU s", ".1f"),
                Column("overhead, % of CPU", ".1f"),
                Column("equal bit for bit", "d"),
            ),
            (
                (
                    float(here_s),
                    float(there_s),
                    float(100 * (there_s / here_s - 1)),
                    float(here_cpu_s),
                    float(there_cpu_s),
                    float(100 * (there_cpu_s / here_cpu_s - 1)),
                    equal_count,
                ),
            ),
            f"In alternating blocks of {_BLOCK}. Equal: all points and all plans.",
        )
    ]


if __name__ == "__main__":
    main("dask_cluster", run)
