"""Growth of the complete frontier's time and memory; each case runs in its own process."""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from benchmarks.harness import (
    BLOCKING_POWER_W,
    GPUS_PER_STAGE,
    Column,
    Table,
    main,
    peak_memory_mb,
    published_pipeline,
    timed,
)
from perseus.solver import Kind, Pipeline, one_forward_one_backward
from perseus.solver.graph import build_event_graph
from perseus.solver.sweep import sweep_frontier

_CASES = (
    (8, 12, 0.0),
    (8, 24, 0.0),
    (8, 48, 0.0),
    (8, 96, 0.0),
    (8, 128, 0.0),
    (16, 256, 0.0),
    (16, 256, 0.002),
)
_REBUILD_COUNT = 20


@dataclass(frozen=True, slots=True)
class _Outcome:
    seconds: float
    event_count: int
    stored_mb: float
    peak_mb: float
    rebuild_ms: float
    times_s: list[float]
    energies_j: list[float]


def run() -> Sequence[Table]:
    rows: list[tuple[str | int | float | None, ...]] = []
    exact: dict[tuple[int, int], _Outcome] = {}
    for stage_count, microbatch_count, tolerance in _CASES:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            done = pool.submit(_solve, stage_count, microbatch_count, tolerance).result()
        reference = exact.setdefault((stage_count, microbatch_count), done)
        power_w = stage_count * GPUS_PER_STAGE * BLOCKING_POWER_W["a100-sxm"]
        times_s = np.linspace(reference.times_s[-1], reference.times_s[0], 101)
        exact_j, bound_j = (
            np.interp(times_s, o.times_s[::-1], o.energies_j[::-1]) + power_w * times_s
            for o in (reference, done)
        )
        rows.append(
            (
                stage_count,
                microbatch_count,
                100 * tolerance,
                done.seconds,
                len(done.times_s) - 1,
                done.event_count,
                done.stored_mb,
                done.peak_mb,
                done.rebuild_ms,
                float(100 * (1 - bound_j / exact_j).max()),
            )
        )
    return [
        Table(
            "Complete relaxed frontier, A100 SXM profile, 1F1B",
            (
                Column("stages", "d"),
                Column("microbatches", "d"),
                Column("hull tolerance, %", ".1f"),
                Column("CPU time, s", ".2f"),
                Column("pieces", "d"),
                Column("events", "d"),
                Column("stored, MB", ".1f"),
                Column("peak of the process, MB", ".0f"),
                Column("plan rebuilt, ms", ".2f"),
                Column("bound looser by at most, %", ".2f"),
            ),
            tuple(rows),
            "With 16 stages, stage s has the profile of stage s // 2, its times and energies scaled by 1.03 "
            "for even s and by 0.97 for odd s. The hull tolerance is a share of each computation's energy; "
            "its cost is a looser bound, given as a share of the iteration's energy.",
        )
    ]


def _solve(stage_count: int, microbatch_count: int, tolerance: float) -> _Outcome:
    pipeline = published_pipeline("a100-sxm", microbatch_count)
    if stage_count == 16:
        pipeline = _doubled(pipeline, microbatch_count)
    with timed() as watch:
        graph = build_event_graph(pipeline, tolerance)
        sweep = sweep_frontier(graph)
    deadlines_ps = np.linspace(sweep.t_min_ps, sweep.t_slow_ps, _REBUILD_COUNT).astype(np.int64)
    with timed() as rebuilding:
        for deadline_ps in deadlines_ps.tolist():
            sweep.event_times_at(deadline_ps)
    return _Outcome(
        seconds=watch.seconds,
        event_count=graph.event_count,
        stored_mb=sweep.event_times.byte_count / 1e6,
        peak_mb=peak_memory_mb(),
        rebuild_ms=1000 * rebuilding.seconds / _REBUILD_COUNT,
        times_s=(sweep.iteration_times_ps / graph.scale.ps_per_s).tolist(),
        energies_j=sweep.effective_energies_j.tolist(),
    )


def _doubled(pipeline: Pipeline, microbatch_count: int) -> Pipeline:
    profiles = {}
    for stage in range(16):
        scale = 0.97 if stage % 2 else 1.03
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            profiles[stage, 0, kind] = tuple(
                type(m)(m.clock_mhz, scale * m.time_s, scale * m.energy_j)
                for m in pipeline.profiles[stage // 2, 0, kind]
            )
    power_w = GPUS_PER_STAGE * BLOCKING_POWER_W["a100-sxm"]
    return Pipeline(one_forward_one_backward(16, microbatch_count), profiles, (power_w,) * 16)


if __name__ == "__main__":
    main("growth", run)
