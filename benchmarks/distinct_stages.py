"""Realised plans of many stages with distinct profiles, against the sweep alone; a process per case.

The sweep's duration comes from the progress of the same call, in CPU seconds of one thread. Beyond 4,096
computations the solver chooses a hull tolerance, and returns the most that it can lower the bounds.
"""

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from benchmarks.harness import (
    BLOCKING_POWER_W,
    GPUS_PER_STAGE,
    Cell,
    Column,
    Table,
    main,
    peak_memory_mb,
    published_pipeline,
)
from benchmarks.realised import gaps_percent
from perseus.solver import (
    Kind,
    Pipeline,
    interleaved_one_forward_one_backward,
    one_forward_one_backward,
    solve,
)

_SEED = 0
_CASES = ((16, 32), (16, 64), (16, 128), (16, 256), (32, 256), (64, 512))
_SWEPT = 0.6
"""Progress at the end of the sweep."""


def run() -> Sequence[Table]:
    return [solved_table("100 realised plans of distinct stages against the sweep alone", _CASES)]


def solved_table(title: str, cases: Sequence[tuple[int, int]], chunk_count: int = 1) -> Table:
    """Solve cases of (stages, microbatches), each in its own process."""
    rows: list[tuple[Cell, ...]] = []
    for case in cases:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            rows.append(pool.submit(_row, *case, chunk_count).result())
    return Table(
        title,
        (
            Column("stages", "d"),
            Column("microbatches", "d"),
            Column("hull tolerance, %", ".1f"),
            Column("sweep, CPU s", ".1f"),
            Column("whole, CPU s", ".1f"),
            Column("whole to sweep", ".2f"),
            Column("bounds lower by at most, %", ".3f"),
            Column("above the bound: T_min, %", ".3f"),
            Column("median, %", ".3f"),
            Column("worst, %", ".2f"),
            Column("peak of the process, MB", ".0f"),
        ),
        tuple(rows),
        "Derived from the A100's profile: each stage takes the times and energies of one of its stages, with "
        "each kind scaled by its own factor between 0.94 and 1.06.",
    )


def _row(stage_count: int, microbatch_count: int, chunk_count: int) -> tuple[Cell, ...]:
    pipeline = distinct_stages(stage_count, microbatch_count, chunk_count)
    began_s = swept_s = time.process_time()

    def report(share: float) -> None:
        nonlocal swept_s
        if share <= _SWEPT:
            swept_s = time.process_time()

    frontier = solve(pipeline, on_progress=report)
    whole_s = time.process_time() - began_s
    gaps = gaps_percent(frontier)
    return (
        stage_count,
        microbatch_count,
        100 * frontier.hull_tolerance,
        swept_s - began_s,
        whole_s,
        whole_s / (swept_s - began_s),
        100 * frontier.bound_slack,
        gaps[0],
        float(np.median(gaps)),
        max(gaps),
        peak_memory_mb(),
    )


def distinct_stages(stage_count: int, microbatch_count: int, chunk_count: int, seed: int = _SEED) -> Pipeline:
    """Return a pipeline whose stages all have distinct profiles, from the A100's and a seed.

    With several chunks, which divide a stage's times and energies, the schedule is interleaved.
    """
    published = published_pipeline("a100-sxm", 8)
    random = np.random.default_rng(seed)
    profiles = {}
    for stage in range(stage_count):
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            longer, dearer = random.uniform(0.94, 1.06, size=2) / chunk_count
            for chunk in range(chunk_count):
                profiles[stage, chunk, kind] = tuple(
                    type(m)(m.clock_mhz, longer * m.time_s, dearer * m.energy_j)
                    for m in published.profiles[stage % 8, 0, kind]
                )
    power_w = GPUS_PER_STAGE * BLOCKING_POWER_W["a100-sxm"]
    schedule = (
        one_forward_one_backward(stage_count, microbatch_count)
        if chunk_count == 1
        else interleaved_one_forward_one_backward(stage_count, microbatch_count, chunk_count)
    )
    return Pipeline(schedule, profiles, (power_w,) * stage_count)


if __name__ == "__main__":
    main("distinct_stages", run)
