"""Emulated against simulated iteration times, for iterations with 40 % and more of transfers.

Simulated runs of :mod:`benchmarks.transfer_simulation` are fitted on a third of the plans and evaluated on
the others, for each third in turn: with the computations' times measured under each plan, as in
`measured_runs`, and with those of a profile, the only data for a plan that never ran.
"""

from collections.abc import Sequence

import numpy as np

from benchmarks.harness import Cell, Column, Table, main
from benchmarks.transfer_simulation import Mechanisms, SimulatedRun, simulate_run
from perseus.solver import Computation, Kind, Schedule
from perseus.solver.study import FittedTimes, Transfers, emulated_iteration_time_s, fit_times

_FOLDS = 3
_SEEDS = (1, 2)
_FIXED = Computation(0, Kind.FIXED, 0)

MECHANISMS = {
    "overlapping": Mechanisms(),
    "fixed costs": Mechanisms(has_fixed_costs=True),
    "uneven links": Mechanisms(has_uneven_links=True),
    "blocking": Mechanisms(is_blocking=True),
    "blocking, uneven": Mechanisms(is_blocking=True, has_uneven_links=True),
    "blocking, shared links": Mechanisms(is_blocking=True, has_shared_links=True),
    "shared links": Mechanisms(has_shared_links=True),
    "shared links, uneven": Mechanisms(has_shared_links=True, has_uneven_links=True),
    "contention": Mechanisms(contention=0.15),
    "contention, shared links": Mechanisms(has_shared_links=True, contention=0.15),
    "all": Mechanisms(True, True, True, 0.15, True),
}


def run() -> Sequence[Table]:
    rows: list[tuple[Cell, ...]] = []
    for name, mechanisms in MECHANISMS.items():
        rows += [
            (name, *_judged([simulate_run(seed, mechanisms, share) for seed in _SEEDS]))
            for share in (0.4, 0.55)
        ]
    return [
        Table(
            "Emulated against simulated iteration times with many transfers",
            (
                Column("mechanism"),
                Column("transfers, %", ".0f"),
                Column("fixed time alone: mean error, %", ".2f"),
                Column("worst, %", ".2f"),
                Column("fitted: mean error, %", ".2f"),
                Column("worst, %", ".2f"),
                Column("from a profile: mean error, %", ".2f"),
                Column("worst, %", ".2f"),
                Column("fits that chose occupying transfers", "d"),
            ),
            tuple(rows),
            f"4 stages, 24 microbatches, 36 plans of 6 steps, {len(_SEEDS)} seeds, {_FOLDS} fits each. "
            "Errors are on plans outside the fitted third.",
        )
    ]


def _judged(runs: Sequence[SimulatedRun]) -> tuple[Cell, ...]:
    alone: list[float] = []
    fitted: list[float] = []
    profiled: list[float] = []
    occupying = 0
    for simulated in runs:
        schedule = with_fixed_time(simulated.schedule)
        measured = [plan.measured for plan in simulated.plans]
        for fold in range(_FOLDS):
            seen = measured[fold::_FOLDS]
            fit = fit_times(schedule, seen)
            occupying += fit.transfers is Transfers.OCCUPYING
            nothing = FittedTimes({}, {}, {_FIXED: 0.0})
            missing_s = [
                one.iteration_time_s - emulated_iteration_time_s(schedule, one.times_s, nothing)
                for one in seen
            ]
            only_fixed = FittedTimes({}, {}, {_FIXED: float(np.mean(missing_s))})
            for n, plan in enumerate(simulated.plans):
                if n % _FOLDS != fold:
                    real_s = plan.measured.iteration_time_s
                    profile_s = {
                        c: simulated.profile_s[c.stage, c.kind, clock_mhz]
                        for c, clock_mhz in plan.clocks_mhz.items()
                    }
                    for errors, times_s, with_times in (
                        (alone, plan.measured.times_s, only_fixed),
                        (fitted, plan.measured.times_s, fit),
                        (profiled, profile_s, fit),
                    ):
                        emulated_s = emulated_iteration_time_s(schedule, times_s, with_times)
                        errors.append(100 * abs(emulated_s / real_s - 1))
    share = 100 * float(np.mean([simulated.transfer_share for simulated in runs]))
    figures: list[Cell] = []
    for errors in (alone, fitted, profiled):
        figures += [float(np.mean(errors)), max(errors)]
    return (share, *figures, occupying)


def with_fixed_time(schedule: Schedule) -> Schedule:
    """Return the schedule with a FIXED computation before stage 0's first forward, as `measured_runs` has
    it."""
    first, *others = schedule.orders
    return Schedule(((_FIXED, *first), *others))


if __name__ == "__main__":
    main("transfers", run)
