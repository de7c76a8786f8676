"""Realised plans of many stages with profiles of their own, against the sweep alone.

How long the sweep takes is read off the progress of the same call, in CPU seconds of one thread.
"""

import time
from collections.abc import Sequence

import numpy as np

from benchmarks.harness import (
    BLOCKING_POWER_W,
    GPUS_PER_STAGE,
    Column,
    Table,
    main,
    peak_memory_mb,
    published_pipeline,
)
from benchmarks.realised import gaps_percent
from perseus.solver import Kind, Pipeline, one_forward_one_backward, solve

_SEED = 0
_CASES = ((16, 32), (16, 64), (16, 128))
_SWEPT = 0.6
"""The progress at which the sweep is done."""


def run() -> Sequence[Table]:
    rows: list[tuple[str | int | float | None, ...]] = []
    for stage_count, microbatch_count in _CASES:
        pipeline = distinct_stages(stage_count, microbatch_count)
        marks_s = [time.process_time()]

        def report(share: float, marks_s: list[float] = marks_s) -> None:
            if share <= _SWEPT:
                del marks_s[1:]
                marks_s.append(time.process_time())

        frontier = solve(pipeline, on_progress=report)
        began_s, swept_s = marks_s
        whole_s = time.process_time() - began_s
        gaps = gaps_percent(frontier)
        rows.append(
            (
                stage_count,
                microbatch_count,
                swept_s - began_s,
                whole_s,
                whole_s / (swept_s - began_s),
                float(np.median(gaps)),
                max(gaps),
                peak_memory_mb(),
            )
        )
    table = Table(
        "100 realised plans of distinct stages against the sweep alone",
        (
            Column("stages", "d"),
            Column("microbatches", "d"),
            Column("sweep, CPU s", ".1f"),
            Column("whole, CPU s", ".1f"),
            Column("whole to sweep", ".2f"),
            Column("above the bound: median, %", ".3f"),
            Column("worst, %", ".2f"),
            Column("peak of the process so far, MB", ".0f"),
        ),
        tuple(rows),
        "Made up of the A100's profile: each stage's times and energies are those of one of its stages, each "
        "kind's scaled by its own factor between 0.94 and 1.06.",
    )
    return [table]


def distinct_stages(stage_count: int, microbatch_count: int) -> Pipeline:
    """Stages that all have profiles of their own, from the A100's and seeded dice."""
    published = published_pipeline("a100-sxm", 8)
    random = np.random.default_rng(_SEED)
    profiles = {}
    for stage in range(stage_count):
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            longer, dearer = random.uniform(0.94, 1.06, size=2)
            profiles[stage, 0, kind] = tuple(
                type(m)(m.clock_mhz, longer * m.time_s, dearer * m.energy_j)
                for m in published.profiles[stage % 8, 0, kind]
            )
    power_w = GPUS_PER_STAGE * BLOCKING_POWER_W["a100-sxm"]
    return Pipeline(
        one_forward_one_backward(stage_count, microbatch_count), profiles, (power_w,) * stage_count
    )


if __name__ == "__main__":
    main("distinct_stages", run)
