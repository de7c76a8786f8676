"""The whole `perseus solve`, with realised plans, against HiGHS.

All times of a row are CPU times of one thread, from the same run. The command reads the profile, solves and
shows the table, with its imports already loaded. HiGHS solves the relaxed problem for 200 deadlines, each
from the previous basis, and realises nothing.
"""

import io
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout

import numpy as np

from benchmarks.harness import (
    BLOCKING_POWER_W,
    DATA,
    GPUS,
    GPUS_PER_STAGE,
    Column,
    Table,
    main,
    published_pipeline,
    timed,
)
from benchmarks.linear_program import LinearProgram
from perseus.cli import solve as command
from perseus.solver import Frontier, Pipeline, solve
from perseus.solver.graph import build_event_graph
from perseus.solver.sweep import sweep_frontier

_DEADLINE_COUNT = 200
_ROUNDS = 3


def run() -> Sequence[Table]:
    _command_s("a100-sxm", 12)  # imports
    rows: list[tuple[str | int | float | None, ...]] = []
    for gpu, label in GPUS.items():
        for microbatch_count in (12, 48, 96):
            pipeline = published_pipeline(gpu, microbatch_count)
            whole_s = min(_command_s(gpu, microbatch_count) for _ in range(_ROUNDS))
            sweep_s, program_s = map(min, zip(*(_relaxed_s(pipeline) for _ in range(_ROUNDS)), strict=True))
            gaps = gaps_percent(solve(pipeline))
            rows.append(
                (
                    label,
                    microbatch_count,
                    sweep_s,
                    whole_s,
                    program_s,
                    whole_s / program_s,
                    gaps[0],
                    float(np.median(gaps)),
                    max(gaps),
                    sum(gap > 0.2 for gap in gaps),
                    sum(gap > 0.5 for gap in gaps),
                )
            )
    table = Table(
        "`perseus solve` with 100 realised plans against 200 deadlines of a linear program, GPT-3 175B",
        (
            Column("GPU"),
            Column("microbatches", "d"),
            Column("sweep, CPU s", ".2f"),
            Column("whole, CPU s", ".2f"),
            Column("HiGHS × 200, CPU s", ".2f"),
            Column("whole to HiGHS", ".2f"),
            Column("T_min above the bound, %", ".3f"),
            Column("median, %", ".3f"),
            Column("worst, %", ".2f"),
            Column("points above 0.2 %", "d"),
            Column("above 0.5 %", "d"),
        ),
        tuple(rows),
        "Whole: the command without start-up. Times: best of three. Per point against the relaxed optimum "
        "at the plan's own time.",
    )
    return [table]


def _command_s(gpu: str, microbatch_count: int) -> float:
    with timed() as watch, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        command.solve(
            [DATA / "profiles" / f"gpt3-175b-{gpu}.csv"],
            microbatch_count,
            gpus_per_stage=GPUS_PER_STAGE,
            blocking_power_w=str(BLOCKING_POWER_W[gpu]),
        )
    return watch.seconds


def _relaxed_s(pipeline: Pipeline) -> tuple[float, float]:
    """Return the times of the sweep and of the linear program."""
    with timed() as sweeping:
        sweep = sweep_frontier(build_event_graph(pipeline))
    # A nanosecond above T_min: there the program may be a rounding error short of feasible.
    first_s, width_s = sweep.t_min_s + 1e-9, sweep.t_slow_s - sweep.t_min_s
    with timed() as solving:
        program = LinearProgram(pipeline)
        for k in reversed(range(_DEADLINE_COUNT)):
            program.min_effective_energy_j(first_s + width_s * k / (_DEADLINE_COUNT - 1))
    return sweeping.seconds, solving.seconds


def gaps_percent(frontier: Frontier) -> list[float]:
    """Return each point's distance above the relaxed optimum at its own time."""
    return [100 * (point.energy_j / point.bound_energy_j - 1) for point in frontier.points]


if __name__ == "__main__":
    main("realised", run)
