"""Frontiers and simulated days on a Dask cluster of two local workers, against two worker processes.

`run` times 200 frontiers both ways, in blocks that alternate, and compares them bit for bit. `python -m
benchmarks.dask_cluster kills` solves frontiers and simulates 200 days while a Dask worker and then the
scheduler are killed; nothing there is timed, so it may run beside other work.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.distinct_stages import distinct_stages
from benchmarks.harness import DATA, Column, Table, main
from perseus.cli.frontier_file import frontier_text
from perseus.service.solving.dask_cluster import DaskCluster
from perseus.service.solving.worker_pool import BATCH, WorkerPool
from perseus.simulation.scenario import read_scenario
from perseus.simulation.sweep import fleets, outcome, read_sweep
from perseus.solver import solve
from tests.service.solving.dask_processes import DaskProcesses, dask_processes

_COUNT = 200
_BLOCK = 20
_LIMIT_S = 3600.0

_SCENARIO = f"""
start = 2022-06-14T00:00:00Z
duration_h = 24
noise_percent = 2
[[jobs]]
job_id = "gpt3"
profile = "{DATA}/profiles/gpt3-175b-a100-sxm.csv"
microbatches = 8
gpus_per_stage = 8
tolerance_percent = 20
blocking_power_w = 83.64
[[signals]]
kind = "carbon"
file = "{DATA}/carbon/ciso-2022.csv"
column = "avg_CI"
"""
_SWEEP = f"""
seeds = {list(range(_COUNT // 4))}
forecasts = ["persistence"]
[[budgets]]
name = "none"
[[budgets]]
name = "80 % in the evening"
budgets = [{{ budget_id = "evening", percent = 80, begin_h = 17, end_h = 20 }}]
[[policies]]
name = "full speed"
[[policies]]
name = "5 % longer"
policy = {{ signal = "carbon", extra_time_percent = 5, horizon_h = 24 }}
"""


@asynccontextmanager
async def _pools() -> AsyncIterator[tuple[WorkerPool, WorkerPool, DaskProcesses]]:
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


async def _compared() -> tuple[float, float, int]:
    """Return the seconds that the frontiers took in processes and on Dask, and how many are equal."""
    work = [partial(solve, distinct_stages(8, 12, 1, seed)) for seed in range(_COUNT)]
    times_s = {True: 0.0, False: 0.0}
    equal_count = 0
    async with _pools() as (here, there, _):
        for begin in range(0, _COUNT, _BLOCK):
            block = work[begin : begin + _BLOCK]
            found: dict[bool, list[Any]] = {}
            # ABBA: what slows the machine down meets both.
            for is_there in (True, False) if begin // _BLOCK % 2 else (False, True):
                pool = there if is_there else here
                began_s = time.perf_counter()
                found[is_there] = await asyncio.gather(*(pool.run(piece) for piece in block))
                times_s[is_there] += time.perf_counter() - began_s
            equal_count += sum(map(_are_equal, found[True], found[False]))
    return times_s[False], times_s[True], equal_count


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two frontiers and all their plans are the same, to the last bit."""
    deadlines_s = [point.deadline_s for point in one.points]
    return frontier_text(one) == frontier_text(other) and all(
        one.plan_within(time_s) == other.plan_within(time_s) for time_s in deadlines_s
    )


def run() -> Sequence[Table]:
    here_s, there_s, equal_count = asyncio.run(_compared())
    return [
        Table(
            f"{_COUNT} frontiers of 8 distinct stages and 12 microbatches on two processors",
            (
                Column("two worker processes, s", ".1f"),
                Column("two Dask workers, s", ".1f"),
                Column("overhead, %", ".1f"),
                Column("equal bit for bit", "d"),
            ),
            ((here_s, there_s, 100 * (there_s / here_s - 1), equal_count),),
            f"In alternating blocks of {_BLOCK}. Equal: all points and all plans.",
        )
    ]


async def _killed(
    work: Sequence[Callable[[], Any]], are_equal: Callable[[Any, Any], bool]
) -> tuple[int, int, int]:
    """Return how many pieces were done on Dask before it was gone, how many in all, how many are equal."""
    async with _pools() as (here, there, dask):
        expected = await asyncio.gather(*(here.run(piece) for piece in work))
        working = [asyncio.create_task(there.run(piece)) for piece in work]
        for victim, share in ((dask.workers[1], 0.25), (dask.scheduler, 0.5)):
            while sum(task.done() for task in working) < share * len(work):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            victim.kill()
        done_count = sum(task.done() for task in working)
        found = await asyncio.gather(*working)
    return done_count, len(found), sum(map(are_equal, expected, found))


def run_kills() -> Sequence[Table]:
    frontiers = [partial(solve, distinct_stages(4, 8, 1, seed)) for seed in range(_COUNT)]
    with tempfile.TemporaryDirectory() as folder:
        scenario, sweep = Path(folder) / "scenario.toml", Path(folder) / "sweep.toml"
        scenario.write_text(_SCENARIO, encoding="utf-8")
        sweep.write_text(_SWEEP, encoding="utf-8")
        days = [partial(outcome, fleet) for _, fleet in fleets(read_scenario(scenario), read_sweep(sweep))]
    return [
        Table(
            "A Dask worker is killed after a quarter, the scheduler after half",
            (
                Column("work"),
                Column("pieces", "d"),
                Column("done before the scheduler died", "d"),
                Column("done in the end", "d"),
                Column("equal to those of worker processes", "d"),
            ),
            (
                ("frontiers of 4 distinct stages", _COUNT, *asyncio.run(_killed(frontiers, _are_equal))),
                ("simulated days", len(days), *asyncio.run(_killed(days, lambda one, other: one == other))),
            ),
            "The day of a job of 8 stages, with and without a budget and a carbon policy, for 50 seeds.",
        )
    ]


if __name__ == "__main__":
    if sys.argv[1:] == ["kills"]:
        main("dask_kills", run_kills)
    else:
        main("dask_cluster", run)
