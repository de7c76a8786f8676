"""The relaxed frontier against HiGHS at random deadlines: random pipelines and the published profiles."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.harness import GPUS, Column, Table, main, published_pipeline
from benchmarks.linear_program import LinearProgram
from perseus.solver import (
    Computation,
    Kind,
    Measurement,
    Pipeline,
    Schedule,
    early_recomputation,
    gpipe,
    interleaved_one_forward_one_backward,
    one_forward_one_backward,
    zero_bubble_h1,
)
from perseus.solver.graph import build_event_graph
from perseus.solver.sweep import sweep_frontier

_RANDOM_COUNT = 400
_DEADLINE_COUNT = 5
_SCHEDULES = {
    "GPipe": gpipe,
    "1F1B": one_forward_one_backward,
    "interleaved 1F1B": lambda stages, groups: interleaved_one_forward_one_backward(
        stages, groups * stages, 2
    ),
    "early recomputation": early_recomputation,
    "ZB-H1": zero_bubble_h1,
}


def run() -> Sequence[Table]:
    random = np.random.default_rng(1)
    rows: list[tuple[str | int | float | None, ...]] = []
    for name in _SCHEDULES:
        errors = [
            error
            for _ in range(_RANDOM_COUNT // len(_SCHEDULES))
            for error in _relative_errors(_random_pipeline(random, name), random)
        ]
        rows.append((f"random, {name}", len(errors), max(errors)))
    for gpu, label in GPUS.items():
        for microbatch_count in (12, 24):
            errors = list(_relative_errors(published_pipeline(gpu, microbatch_count), random))
            rows.append((f"GPT-3 175B, {label}, {microbatch_count} microbatches", len(errors), max(errors)))
    return [
        Table(
            "Largest relative difference from HiGHS",
            (Column("pipelines"), Column("deadlines", "d"), Column("difference", ".1e")),
            tuple(rows),
            "Effective energy, relative to the larger of the frontier's two ends. The random pipelines have "
            "profiles of 1 to 6 clocks, lags, fixed times (zero among them) and several first and last "
            "computations. HiGHS runs with feasibility tolerances of 1e-10.",
        )
    ]


def _relative_errors(pipeline: Pipeline, random: np.random.Generator) -> Iterator[float]:
    sweep = sweep_frontier(build_event_graph(pipeline))
    program = LinearProgram(pipeline, tolerance=1e-10)
    scale_j = float(np.abs(sweep.effective_energies_j[[0, -1]]).max())
    for share in random.uniform(size=_DEADLINE_COUNT):
        # 10 ps more: at T_min itself the program may be a rounding error short of feasible.
        time_s = sweep.t_min_s + share * (sweep.t_slow_s - sweep.t_min_s) + 1e-11
        expected_j = program.min_effective_energy_j(time_s)
        yield abs(sweep.effective_energy_j_at(time_s) - expected_j) / scale_j


def _random_pipeline(random: np.random.Generator, name: str) -> Pipeline:
    stage_count, microbatch_count = (int(n) for n in random.integers(1, 5, size=2))
    named = _SCHEDULES[name](stage_count, microbatch_count)
    orders = []
    for stage, order in enumerate(named.orders):
        first, last = Computation(stage, Kind.FIXED, 0), Computation(stage, Kind.FIXED, 1)
        before, after = random.integers(0, 2, size=2)
        orders.append(((first,) if before else ()) + order + ((last,) if after else ()))
    schedule = Schedule(tuple(orders))
    worked = [c for c in schedule.computations if c.kind is not Kind.FIXED]
    profiles = {
        key: tuple(
            Measurement(1000 + k, float(random.integers(10, 1000)) * 1e-4, float(random.uniform(0.5, 60.0)))
            for k in range(random.integers(1, 7))
        )
        for key in sorted({(c.stage, c.chunk, c.kind) for c in worked})
    }
    pipeline = Pipeline(
        schedule,
        profiles,
        tuple(float(power_w) for power_w in random.choice([0.0, 60.0, 300.0], size=stage_count)),
        fixed_times_s={
            c: float(random.choice([0.0, 0.004, 0.05])) for c in schedule.computations if c.kind is Kind.FIXED
        },
    )
    links = [(a, b) for a in range(stage_count) for b in range(stage_count) if a != b]
    lags_s = [dict(zip(links, random.choice([0.0, 0.004, 0.05], size=len(links)), strict=True)) for _ in "ab"]
    return replace(pipeline, activation_lags_s=lags_s[0], gradient_lags_s=lags_s[1])


if __name__ == "__main__":
    main("lp_equality", run)
