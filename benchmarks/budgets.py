"""Two hundred random budgets, simulated: whether limits hold, and whether violations are reported.

Ten runs of eight hours with twenty budgets each, on the six jobs of the mix on one feed. Jobs draw up to 5 %
more or less than planned, with noise of 2 % a second. Budgets overlap, shrink, end early, and come with and
without notice; one in ten asks for less than tolerances allow. `python -m benchmarks.budgets` also draws
`docs/images/budgets.png`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from benchmarks.fleet_jobs import MIX, STRAGGLER, frontier
from benchmarks.harness import Cell, Column, Table, main, timed
from perseus.service.domain.power import DEFAULT_FEED, Budget, Feed
from perseus.service.fleet.power.feed_watch import SETTLING_TIME_S
from perseus.simulation.replay import Fleet, Replay, ReplayedBudget, ReplayedJob, Straggler, replay

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "budgets.png"
_RUN_S = 8 * 3600.0
_RUNS, _BUDGETS = 10, 20
_ERROR = 0.05
_NOISE = 0.02


@dataclass
class Counters:
    """The results of a run's budgets."""

    windows: int = 0
    above: int = 0
    unreported: int = 0
    worst: float = 0.0
    infeasible: int = 0
    reported: int = 0
    changes: int = 0


def run() -> Sequence[Table]:
    rows: list[tuple[Cell, ...]] = []
    sums = Counters()
    for number in range(_RUNS):
        fleet = random_fleet(number)
        with timed() as watch:
            done = replay(fleet)
        if number == 0:
            draw(fleet, done, PICTURE)
        counters = judge(fleet, done)
        for name in ("windows", "above", "unreported", "infeasible", "reported", "changes"):
            setattr(sums, name, getattr(sums, name) + getattr(counters, name))
        sums.worst = max(sums.worst, counters.worst)
        rows.append((f"run {number}", *_cells(counters), counters.changes / 8 / len(MIX), watch.seconds))
    rows.append(("all", *_cells(sums), sums.changes / 8 / len(MIX) / _RUNS, None))
    return [
        Table(
            f"{_RUNS * _BUDGETS} random budgets, simulated on the six jobs",
            (
                Column("budgets"),
                Column("means of a window", "d"),
                Column("above a feasible limit", "d"),
                Column("of these not reported", "d"),
                Column("worst, % of the limit", ".3f"),
                Column("infeasible limits", "d"),
                Column("reported", "d"),
                Column("plan changes, per job and hour", ".1f"),
                Column("simulated in, CPU s", ".1f"),
            ),
            tuple(rows),
            "A mean covers the longer of a minute and three iterations, every second from 5 s after the "
            "power cap reaches a limit until the limit changes. A limit is feasible if tolerances allow it "
            "with the jobs' real draw. GPUs are simulated: no power was measured.",
        )
    ]


def _cells(counters: Counters) -> tuple[Cell, ...]:
    return (
        counters.windows,
        counters.above,
        counters.unreported,
        100 * counters.worst,
        counters.infeasible,
        counters.reported,
    )


def _errors(run_number: int) -> dict[str, float]:
    random = np.random.default_rng([run_number, 1])
    return {job.job_id: float(random.uniform(-_ERROR, _ERROR)) for job in MIX}


def random_fleet(run_number: int) -> Fleet:
    """Return the jobs and the random budgets of a run."""
    random = np.random.default_rng(run_number)
    stock_w = sum(job.stock_power_w() for job in MIX)
    errors = _errors(run_number)
    jobs = [
        ReplayedJob(
            job.job_id,
            frontier(job.gpu),
            job.pipeline_count,
            DEFAULT_FEED,
            job.tolerance_percent,
            job.weight,
            0.0,
            _RUN_S,
            stragglers=[Straggler(0, STRAGGLER, 0.0, _RUN_S)] if job.has_straggler else [],
            power_error=errors[job.job_id],
        )
        for job in MIX
    ]
    budgets = []
    for number in range(_BUDGETS):
        begin_s = float(random.uniform(0.02, 0.9)) * _RUN_S
        end_s = begin_s + float(random.uniform(300, 3_600))
        share = random.uniform(0.55, 0.72) if random.random() < 0.1 else random.uniform(0.76, 0.95)
        notice_s = 0.0 if random.random() < 0.5 else float(random.uniform(60, 3600))
        cancelled_s = begin_s + 600 if random.random() < 0.2 else float("inf")
        budget = Budget(f"b{number}", DEFAULT_FEED, float(share) * stock_w, begin_s, end_s)
        budgets.append(ReplayedBudget(budget, max(0.0, begin_s - notice_s), cancelled_s))
    feed = Feed(DEFAULT_FEED, stock_w, ramp_down_w_per_s=stock_w / 60, ramp_up_w_per_s=stock_w / 300)
    return Fleet(0.0, _RUN_S, {DEFAULT_FEED: feed}, jobs, budgets, noise=_NOISE, seed=run_number)


def judge(fleet: Fleet, done: Replay) -> Counters:
    """Compare every mean under one limit with it, second by second."""
    counters = Counters(changes=sum(int(np.count_nonzero(np.diff(s))) for s in done.speeds.values()))
    seconds = np.arange(1, int(fleet.end_s) + 1)
    index = np.searchsorted(done.times_s, seconds - 1e-6)
    drawn_w, limit_w, power_cap_w = (
        values[DEFAULT_FEED][index] for values in (done.feeds_w, done.limits_w, done.power_caps_w)
    )
    reports = [(time_s, s.is_compliant) for time_s, s in done.statuses]
    longest_s = max(frontier(job.gpu).t_slow_s for job in MIX) * STRAGGLER
    window = int(np.ceil(max(60.0, 3 * longest_s)))
    is_judged = np.isfinite(limit_w) & (power_cap_w <= limit_w * (1 + 1e-9))
    edges = np.flatnonzero(np.diff(np.where(is_judged, limit_w, 0.0), prepend=0.0, append=0.0) != 0)
    sums = np.concatenate([[0.0], np.cumsum(drawn_w)])
    for first, last in pairwise(edges.tolist()):
        if not is_judged[first]:
            continue
        is_feasible = _is_feasible(fleet, float(limit_w[first]))
        begin = first + int(SETTLING_TIME_S)
        is_reported = any(
            not ok and first <= time_s <= last + 1 for time_s, ok in reports
        ) or not _last_report(reports, first)
        if not is_feasible and last - begin >= window:
            counters.infeasible += 1
            counters.reported += is_reported
        if not is_feasible or last - begin < window:
            continue
        means_w = (sums[begin + window : last + 1] - sums[begin : last + 1 - window]) / window
        above = means_w > limit_w[first] * (1 + 1e-9)
        counters.windows += len(means_w)
        counters.above += int(above.sum())
        counters.unreported += 0 if is_reported else int(above.sum())
        counters.worst = max(counters.worst, float(means_w.max() / limit_w[first]))
    return counters


def _last_report(reports: Sequence[tuple[float, bool]], now_s: float) -> bool:
    before = [ok for time_s, ok in reports if time_s <= now_s]
    return before[-1] if before else True


def _is_feasible(fleet: Fleet, limit_w: float) -> bool:
    errors = {job.job_id: job.power_error for job in fleet.jobs}
    min_w = sum((1 + errors[job.job_id]) * job.demand().allowed[-1].power_w[DEFAULT_FEED] for job in MIX)
    return min_w <= limit_w


def draw(fleet: Fleet, done: Replay, path: Path) -> None:
    """Draw the first run: the feed's power under its limits, and the jobs' speeds."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    hours = done.times_s / 3600
    above.plot(hours, done.feeds_w[DEFAULT_FEED] / 1000, lw=0.7, label="drawn")
    above.plot(
        hours, done.power_caps_w[DEFAULT_FEED] / 1000, "--", lw=0.8, color="tab:orange", label="power cap"
    )
    above.plot(hours, done.limits_w[DEFAULT_FEED] / 1000, lw=1.2, color="tab:red", label="limit")
    above.set_ylabel("kW")
    for job_id, speeds in done.speeds.items():
        below.plot(hours, 100 * speeds, lw=0.8, label=job_id)
    below.set_ylabel("speed, % of stock")
    below.set_xlabel("hours")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=7, ncols=3, loc="lower left")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main("budgets", run)
