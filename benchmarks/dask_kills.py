"""Frontiers and simulated days on a Dask cluster that loses a worker, then its scheduler."""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.dask_cluster import COUNT, are_equal, pools
from benchmarks.distinct_stages import distinct_stages
from benchmarks.harness import DATA, Column, Table, main
from perseus.simulation.scenario import read_scenario
from perseus.simulation.sweep import fleets, outcome, read_sweep
from perseus.solver import solve

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
seeds = {list(range(COUNT // 4))}
forecasts = ["persistence"]
[[budgets]]
name = "none"
[[budgets]]
name = "80 % in the evening"
budgets = [{{ budget_id = "evening", percent = 80, begin_h = 17, end_h = 17.5 }}]
[[policies]]
name = "full speed"
[[policies]]
name = "5 % longer"
policy = {{ signal = "carbon", extra_time_percent = 5, horizon_h = 24 }}
"""


async def _killed(
    work: Sequence[Callable[[], Any]], are_same: Callable[[Any, Any], bool]
) -> tuple[int, int, int]:
    """Return how many pieces were done on Dask before it was gone, how many in all, how many are equal."""
    async with pools() as (here, there, dask):
        expected = await asyncio.gather(*(here.run(piece) for piece in work))
        working = [asyncio.create_task(there.run(piece)) for piece in work]
        for victim, share in ((dask.workers[1], 0.25), (dask.scheduler, 0.5)):
            while sum(task.done() for task in working) < share * len(work):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            victim.kill()
        done_count = sum(task.done() for task in working)
        found = await asyncio.gather(*working)
    return done_count, len(found), sum(map(are_same, expected, found))


def run() -> Sequence[Table]:
    frontiers = [partial(solve, distinct_stages(4, 8, 1, seed)) for seed in range(COUNT)]
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
                ("frontiers of 4 distinct stages", COUNT, *asyncio.run(_killed(frontiers, are_equal))),
                ("simulated days", len(days), *asyncio.run(_killed(days, lambda one, other: one == other))),
            ),
            "The day of a job of 8 stages, with and without a budget and a carbon policy, for 50 seeds.",
        )
    ]


if __name__ == "__main__":
    main("dask_kills", run)
