"""Three hours of less power, replayed: the cost beside uniform throttling and the best mixture of plans.

The jobs of the mix draw up to 3 % more or less than planned, and vary by 2 % from second to second. Ours are
controlled by the fleet's own state machine, in the simulation of `perseus simulate`: it learns their draw,
and keeps a margin and its ramps. The others know the exact power of each point, and have no margin, ramps or
tolerances. The best mixture knows it, too, but keeps tolerances; it may run a job at several plans in turn.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.fleet_jobs import MIX, STRAGGLER, Job, frontier
from benchmarks.harness import Cell, Column, Table, main, timed
from benchmarks.power import equal_share, proportional
from perseus.service.domain.power import DEFAULT_FEED, Budget, Feed
from perseus.service.fleet.power.allocation import allocate
from perseus.service.fleet.power.demand import JobDemand, PowerPoint
from perseus.service.fleet.power.feed_watch import SETTLING_TIME_S, WINDOW_ITERATIONS
from perseus.simulation.replay import Fleet, Replay, ReplayedBudget, ReplayedJob, Straggler, replay

CUT = 0.25
CUTS = (0.1, 0.15, 0.2, 0.25, 0.3)
FOUR = (
    Job("small", "a100-sxm", 2, 25.0, 2.0),
    Job("medium", "a100-sxm", 3, 25.0, 3.0),
    Job("large", "a100-sxm", 4, 25.0, 1.0),
    Job("a40", "a40", 4, 25.0, 1.0),
)
"""Jobs that may all be slowed, so that less power costs much speed."""
NOISE, ERROR = 0.02, 0.03
SEED = 18

_BEGIN_S, _CUT_S, _END_S = 1800.0, 3 * 3600.0, 5 * 3600.0
_NOTICE_S = 900.0
_WINDOW_S = 60


def run() -> Sequence[Table]:
    """Replay the cut, and compare it with the others."""
    errors = _errors(MIX)
    stock_w = {job.job_id: job.stock_power_w() * (1 + errors[job.job_id]) for job in MIX}
    limit_w = (1 - CUT) * sum(stock_w.values())
    with timed() as watch:
        done = replay(_fleet(MIX, errors, limit_w, sum(stock_w.values())))
    ours = {job.job_id: _lost(job, done) for job in MIX}
    worst = _worst_mean(done, limit_w)
    slowest = {job.job_id: max(lost for lost, _ in ours[job.job_id]) for job in MIX}
    means = {job_id: sum(lost * time_s for lost, time_s in own) / _CUT_S for job_id, own in ours.items()}
    rows: list[tuple[Cell, ...]] = []
    weighted = _weighted(means)
    rows.append(
        ("least weighted loss", "Perseus", weighted, 1.0, _broken(slowest), worst, *_cells(means, slowest))
    )
    for plans, points in (
        ("Perseus", {job.job_id: _points(job) for job in MIX}),
        ("one clock", {job.job_id: job.one_clock_points() for job in MIX}),
    ):
        drawn = {job_id: _as_drawn(own, errors[job_id]) for job_id, own in points.items()}
        for method, share in (("equal share", equal_share), ("proportional", proportional)):
            operating_points = share(drawn, limit_w)
            lost = {job_id: 100 * (1 - point.speed) for job_id, point in operating_points.items()}
            power_w = sum(point.power_w[DEFAULT_FEED] for point in operating_points.values())
            figures = (_weighted(lost), weighted / _weighted(lost), _broken(lost), 100 * power_w / limit_w)
            rows.append((method, plans, *figures, *_cells(lost, lost)))
    return [
        Table(
            f"Six jobs under {100 * CUT:.0f} % less power for three hours, replayed: speed lost, %",
            (
                Column("slowed by"),
                Column("plans"),
                Column("weighted mean", ".2f"),
                Column("ours over it", ".2f"),
                Column("tolerances exceeded", "d"),
                Column("worst minute's mean, % of the limit", ".2f"),
                *(Column(_heading(job)) for job in MIX),
            ),
            tuple(rows),
            "Relative to the unlimited job, over the three hours, without the ramp before them. "
            f"Maximum: at any second. Five hours were replayed in {watch.seconds:.1f} s of CPU.",
        ),
        _mixtures(),
    ]


def _mixtures() -> Table:
    rows: list[tuple[Cell, ...]] = [
        (name, round(100 * cut), *_beside_mixture(mix, cut))
        for name, mix in (("six", MIX), ("four", FOUR))
        for cut in CUTS
    ]
    return Table(
        "Weighted speed lost under less power for three hours beside the best mixture of the same plans, %",
        (
            Column("jobs"),
            Column("less power, %", "d"),
            Column("best mixture", ".2f"),
            Column("Perseus", ".2f"),
            Column("more, points", ".2f"),
            Column("mixture under 0.6 % less, more, points", ".2f"),
            Column("drawn, % of the limit", ".2f"),
            Column("worst window's mean, %", ".2f"),
        ),
        tuple(rows),
        "Mixture under 0.6 % less: the cost of a constant margin alone. A window is the longer of a minute "
        "and three iterations. The four jobs may lose 25 % each, and weigh 1 to 3.",
    )


def _beside_mixture(mix: Sequence[Job], cut: float) -> tuple[float, ...]:
    errors = _errors(mix)
    stock_w = sum(job.stock_power_w() * (1 + errors[job.job_id]) for job in mix)
    limit_w = (1 - cut) * stock_w
    done = replay(_fleet(mix, errors, limit_w, stock_w))
    drawn = [
        JobDemand(
            job.job_id,
            _as_drawn(_points(job), errors[job.job_id]),
            tolerance_percent=job.tolerance_percent,
            weight=job.weight,
        )
        for job in mix
    ]
    weight = sum(job.weight for job in mix) / 100
    best, best_under_margin = (
        allocate(drawn, {DEFAULT_FEED: share * limit_w}).bound / weight for share in (1, 0.994)
    )
    ours = sum(job.weight * sum(x * s for x, s in _lost(job, done)) for job in mix) / _CUT_S / weight / 100
    is_within = (done.times_s > _BEGIN_S) & (done.times_s <= _BEGIN_S + _CUT_S)
    drawn_w = np.average(done.feeds_w[DEFAULT_FEED][is_within], weights=done.durations_s[is_within])
    longest_s = max(STRAGGLER * frontier(job.gpu).t_slow_s for job in mix)
    worst = _worst_mean(done, limit_w, math.ceil(max(_WINDOW_S, WINDOW_ITERATIONS * longest_s)))
    return best, ours, ours - best, best_under_margin - best, float(100 * drawn_w / limit_w), worst


@functools.cache
def _points(job: Job) -> tuple[PowerPoint, ...]:
    return job.points()


def _errors(mix: Sequence[Job]) -> dict[str, float]:
    random = np.random.default_rng(SEED)
    return {job.job_id: float(random.uniform(-ERROR, ERROR)) for job in mix}


def _fleet(mix: Sequence[Job], errors: Mapping[str, float], limit_w: float, stock_w: float) -> Fleet:
    jobs = [
        ReplayedJob(
            job.job_id,
            frontier(job.gpu),
            job.pipeline_count,
            DEFAULT_FEED,
            job.tolerance_percent,
            job.weight,
            0.0,
            _END_S,
            stragglers=[Straggler(0, STRAGGLER, 0.0, _END_S)] if job.has_straggler else [],
            power_error=errors[job.job_id],
        )
        for job in mix
    ]
    budget = Budget("cut", DEFAULT_FEED, limit_w, _BEGIN_S, _BEGIN_S + _CUT_S)
    feed = Feed(DEFAULT_FEED, stock_w, ramp_down_w_per_s=stock_w / 60, ramp_up_w_per_s=stock_w / 300)
    known = ReplayedBudget(budget, _BEGIN_S - _NOTICE_S)
    return Fleet(0.0, _END_S, {DEFAULT_FEED: feed}, jobs, [known], noise=NOISE, seed=SEED)


def _lost(job: Job, done: Replay) -> list[tuple[float, float]]:
    """Return (speed lost against the unlimited job in %, time) of each step within the three hours."""
    points = _points(job)
    times_s = np.array([point.iteration_time_s for point in points])
    stock_s = frontier(job.gpu).baseline.iteration_time_s
    is_within = (done.times_s > _BEGIN_S) & (done.times_s <= _BEGIN_S + _CUT_S)
    found = []
    for speed, duration_s in zip(
        done.speeds[job.job_id][is_within], done.durations_s[is_within], strict=True
    ):
        nearest = int(np.argmin(np.abs(times_s - stock_s / speed)))
        found.append((100 * (1 - points[nearest].speed), float(duration_s)))
    return found


def _worst_mean(done: Replay, limit_w: float, window_s: int = _WINDOW_S) -> float:
    """Return the highest mean of a window within the three hours, in percent of the limit."""
    seconds = np.arange(_BEGIN_S + SETTLING_TIME_S + 1, _BEGIN_S + _CUT_S + 1)
    drawn_w = done.feeds_w[DEFAULT_FEED][np.searchsorted(done.times_s, seconds - 1e-6)]
    means_w = np.convolve(drawn_w, np.full(window_s, 1 / window_s), "valid")
    return float(100 * means_w.max() / limit_w)


def _as_drawn(points: Sequence[PowerPoint], error: float) -> tuple[PowerPoint, ...]:
    return tuple(
        replace(point, power_w={feed: (1 + error) * power_w for feed, power_w in point.power_w.items()})
        for point in points
    )


def _heading(job: Job) -> str:
    return f"{job.job_id}: mean (maximum), may lose {job.tolerance_percent:g}, weight {job.weight:g}"


def _weighted(lost: Mapping[str, float]) -> float:
    return sum(job.weight * lost[job.job_id] for job in MIX) / sum(job.weight for job in MIX)


def _broken(lost: Mapping[str, float]) -> int:
    return sum(lost[job.job_id] > job.tolerance_percent + 1e-9 for job in MIX)


def _cells(means: Mapping[str, float], maximum: Mapping[str, float]) -> list[Cell]:
    return [f"{means[job.job_id]:.2f} ({maximum[job.job_id]:.2f})" for job in MIX]


if __name__ == "__main__":
    main("three_hours", run)
