"""Emulated against measured iteration times; lags and a fixed time are fitted on a third of the plans.

Each third in turn is used for fitting, and the other two for evaluation.
"""

import csv
import gzip
import json
from collections.abc import Sequence

import numpy as np

from benchmarks.harness import DATA, Cell, Column, Table, main
from perseus.solver import Computation, Kind, Schedule, one_forward_one_backward
from perseus.solver.study import FittedTimes, MeasuredIteration, emulated_iteration_time_s, fit_times

_FOLDS = 3
_FIXED = Computation(0, Kind.FIXED, 0)
"""Data loading, optimizer and all other work once per iteration, before stage 0's first forward."""


def run() -> Sequence[Table]:
    rows: list[tuple[Cell, ...]] = []
    for path in sorted((DATA / "runs").glob("*.json")):
        schedule, iterations = _read_run(path.stem)
        nothing = FittedTimes({}, {}, {_FIXED: 0.0})
        alone = [abs(_error_percent(schedule, one, nothing)) for one in iterations]
        fits = [fit_times(schedule, iterations[fold::_FOLDS]) for fold in range(_FOLDS)]
        errors = [
            abs(_error_percent(schedule, one, fits[fold]))
            for fold in range(_FOLDS)
            for n, one in enumerate(iterations)
            if n % _FOLDS != fold
        ]
        rows.append(
            (
                path.stem,
                schedule.stage_count,
                len(schedule.orders[-1]) // 2,
                len(iterations),
                float(np.mean([one.iteration_time_s for one in iterations])),
                float(np.mean(alone)),
                float(np.mean(errors)),
                max(errors),
                float(np.mean([fit.fixed_times_s[_FIXED] for fit in fits])),
                1000 * float(np.mean([sum(fit.activation_lags_s.values()) for fit in fits])),
            )
        )
    return [
        Table(
            "Emulated against measured iteration times",
            (
                Column("run"),
                Column("stages", "d"),
                Column("microbatches", "d"),
                Column("plans", "d"),
                Column("iteration, s", ".2f"),
                Column("computations alone: mean error, %", ".2f"),
                Column("fitted: mean error, %", ".3f"),
                Column("worst, %", ".2f"),
                Column("fixed time, s", ".3f"),
                Column("lags of all boundaries one way, ms", ".1f"),
            ),
            tuple(rows),
            "Errors are on plans outside the fitted third, over all three choices of it. An iteration's "
            "critical path crosses each boundary equally often in both directions, so the two directions' "
            "lags can't be distinguished: they come out equal.",
        )
    ]


def _error_percent(schedule: Schedule, iteration: MeasuredIteration, fitted: FittedTimes) -> float:
    emulated_s = emulated_iteration_time_s(schedule, iteration.times_s, fitted)
    return 100 * (emulated_s / iteration.iteration_time_s - 1)


def _read_run(name: str) -> tuple[Schedule, list[MeasuredIteration]]:
    description = json.loads((DATA / "runs" / f"{name}.json").read_text(encoding="utf-8"))
    times_s: dict[int, dict[Computation, float]] = {}
    with gzip.open(DATA / "runs" / f"{name}.csv.gz", "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            c = Computation(int(row["stage"]), Kind(row["instruction"]), int(row["microbatch"]))
            times_s.setdefault(int(row["plan"]), {})[c] = float(row["time_s"])
    first, *others = one_forward_one_backward(description["stages"], description["microbatches"]).orders
    plans = description["plans"]
    return Schedule(((_FIXED, *first), *others)), [
        MeasuredIteration(times_s[plan["plan"]], plan["iteration_time_s"]) for plan in plans
    ]


if __name__ == "__main__":
    main("measured_runs", run)
