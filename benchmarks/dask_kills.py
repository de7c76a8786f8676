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
"""
_SWEEP = f"""
seeds = {list(range(COUNT // 2))}
[[budgets]]
name = "none"
[[budgets]]
name = "80 % for a quarter of an hour"
budgets = [{{ budget_id = "evening", percent = 80, begin_h = 17, end_h = 17.25 }}]
"""
_CHECKED = 4
"""Every fourth piece is also done in worker processes, and compared."""


async def _killed(
    work: Sequence[Callable[[], Any]], are_same: Callable[[Any, Any], bool]
) -> tuple[int, int, int]:
    """Return how many pieces were done when the scheduler died, how many in the end, how many are equal."""
    async with pools() as (here, there, dask):
        expected = await asyncio.gather(*(here.run(piece) for piece in work[::_CHECKED]))
        working = [asyncio.create_task(there.run(piece)) for piece in work]
        for victim, share in ((dask.workers[1], 0.25), (dask.scheduler, 0.5)):
            while sum(task.done() for task in working) < share * len(work):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            victim.kill()
        done_count = sum(task.done() for task in working)
        found = await asyncio.gather(*working)
    return done_count, len(found), sum(map(are_same, expected, found[::_CHECKED]))


def run() -> Sequence[Table]:
    frontiers = [partial(solve, distinct_stages(4, 4, 1, seed)) for seed in range(COUNT)]
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
                Column(f"equal, of {COUNT // _CHECKED} compared", "d"),
            ),
            (
                ("frontiers of 4 distinct stages", COUNT, *asyncio.run(_killed(frontiers, are_equal))),
                ("simulated days", len(days), *asyncio.run(_killed(days, lambda one, other: one == other))),
            ),
            f"A day of a job of 8 stages, with and without a budget, for {COUNT // 2} seeds. Every fourth "
            "piece is also done in worker processes.",
        )
    ]


if __name__ == "__main__":
    main("dask_kills", run)
