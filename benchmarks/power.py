"""The cost of less power: one job under a limit, and six jobs under a common one.

Ours are the plans that the job has anyway (100 points of its frontier): a limit selects the fastest that
keeps it. One clock is the highest clock that keeps it. Power caps are from a published measurement on 256
GPUs with another kind of workload, interpolated linearly between its measured caps.
"""

import csv
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from benchmarks.fleet_jobs import MICROBATCH_COUNT, MIX, Job, frontier, one_clock
from benchmarks.harness import DATA, GPUS, Cell, Column, Table, main, timed
from perseus.service.domain.power import DEFAULT_FEED
from perseus.service.fleet.power.allocation import allocate
from perseus.service.fleet.power.demand import JobDemand, PowerPoint
from perseus.solver import Plan

_CUTS_PERCENT = (10, 20, 25, 30)
_CAPPED = {"pt_mpt_7b_fast": "MPT-7B", "pt_mpt_13b_sm": "MPT-13B"}
"""Pre-training, like our workload."""
_MIX_CUT_PERCENT = 25


def run() -> Sequence[Table]:
    return [_one_job(), _mix(), _cost()]


def _one_job() -> Table:
    rows: list[tuple[Cell, ...]] = []
    for gpu, label in GPUS.items():
        stock = frontier(gpu).baseline
        plans = [frontier(gpu).plan_within(point.iteration_time_s) for point in frontier(gpu).points]
        for cut_percent in _CUTS_PERCENT:
            limit_w = (1 - cut_percent / 100) * _power_w(stock)
            ours, single = (_lost_percent(stock, some, limit_w) for some in (plans, one_clock(gpu)))
            caps = [_capped_percent(workload, cut_percent) for workload in _CAPPED]
            rows.append((label, cut_percent, ours, single, ours / single, *caps))
    return Table(
        f"Speed lost under a power limit, %, GPT-3 175B, {MICROBATCH_COUNT} microbatches",
        (
            Column("GPU"),
            Column("less power, %", "d"),
            Column("Perseus", ".2f"),
            Column("one clock", ".2f"),
            Column("ratio", ".2f"),
            *(Column(f"power caps, measured, {name}", ".1f") for name in _CAPPED.values()),
        ),
        tuple(rows),
        "Power and speed are relative to all at the highest clock. Speed lost is 1 − the time of an "
        "iteration at stock over that under the limit. Perseus' plans draw less than stock without "
        "losing speed.",
    )


def _power_w(plan: Plan) -> float:
    return plan.energy_j / plan.iteration_time_s


def _lost_percent(stock: Plan, plans: Sequence[Plan], limit_w: float) -> float:
    fastest_s = min(plan.iteration_time_s for plan in plans if _power_w(plan) <= limit_w)
    return 100 * (1 - stock.iteration_time_s / max(fastest_s, stock.iteration_time_s))


def _capped_percent(workload: str, cut_percent: float) -> float:
    with (DATA / "reference" / "power-cap-sweep.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["Workload"] == workload]
    full_w = max(float(row["total GPU power"]) for row in rows)
    measured = sorted(
        (float(row["total GPU power"]) / full_w, float(row["normalized throughput"])) for row in rows
    )
    wanted = 1 - cut_percent / 100
    (low, slow), (high, fast) = next(pair for pair in pairwise(measured) if pair[1][0] >= wanted)
    return 100 * (1 - slow - (fast - slow) * (wanted - low) / (high - low))


def _mix() -> Table:
    stock_w = sum(job.stock_power_w() for job in MIX)
    limit_w = (1 - _MIX_CUT_PERCENT / 100) * stock_w
    ours = {job.job_id: job.points() for job in MIX}
    single = {job.job_id: job.one_clock_points() for job in MIX}
    found = allocate([job.demand() for job in MIX], {DEFAULT_FEED: limit_w})
    assert found.is_compliant
    methods: list[tuple[str, str, Mapping[str, PowerPoint]]] = [
        ("least weighted loss", "Perseus", found.operating_points),
        *(
            (method, plans, share(points, limit_w))
            for plans, points in (("Perseus", ours), ("one clock", single))
            for method, share in (("equal share", equal_share), ("proportional", proportional))
        ),
    ]
    rows: list[tuple[Cell, ...]] = []
    for method, plans, operating_points in methods:
        lost = {job.job_id: 100 * (1 - operating_points[job.job_id].speed) for job in MIX}
        weighted = sum(job.weight * lost[job.job_id] for job in MIX) / sum(job.weight for job in MIX)
        if not rows:
            best = weighted
        beyond = sum(lost[job.job_id] > job.tolerance_percent + 1e-9 for job in MIX)
        drawn_w = sum(point.power_w[DEFAULT_FEED] for point in operating_points.values())
        less_percent = 100 * (1 - drawn_w / stock_w)
        rows.append(
            (
                method,
                plans,
                less_percent,
                weighted,
                best / weighted,
                beyond,
                *(lost[job.job_id] for job in MIX),
            )
        )
    return Table(
        f"Six jobs under {_MIX_CUT_PERCENT} % less power for three hours: speed lost, %",
        (
            Column("slowed by"),
            Column("plans"),
            Column("less power, %", ".1f"),
            Column("weighted mean", ".2f"),
            Column("ours over it", ".2f"),
            Column("tolerances exceeded", "d"),
            *(Column(_heading(job), ".2f") for job in MIX),
        ),
        tuple(rows),
        "Nothing changes within the three hours. Equal share: every GPU may draw the same, and the "
        "others share any power that a job does not need. Proportional: every job gets the same "
        "percentage less than at stock. Both choose among the same plans as ours, or among clocks for "
        "all of a job's GPUs; neither knows tolerances. One pipeline in eight of the job with a "
        "straggler takes 1.1 × as long; the job's speed is relative to that.",
    )


def _cost() -> Table:
    rows: list[tuple[Cell, ...]] = []
    for job_count, feed_count in ((100, 1), (100, 4), (500, 1), (500, 4)):
        jobs = _made_up_jobs(job_count, feed_count)
        limits_w = {
            f"feed-{feed}": 0.85 * sum(job.points[0].power_w.get(f"feed-{feed}", 0.0) for job in jobs)
            for feed in range(feed_count)
        }
        with timed() as watch:
            found = allocate(jobs, limits_w)
        assert found.is_compliant
        above_percent = 100 * (found.weighted_loss / found.bound - 1)
        rows.append((job_count, feed_count, 1000 * watch.seconds, above_percent))
    return Table(
        "One allocation",
        (
            Column("jobs", "d"),
            Column("feeds", "d"),
            Column("CPU ms", ".0f"),
            Column("weighted loss above the best mixture, %", ".3f"),
        ),
        tuple(rows),
        "Artificial jobs of 100 points each, with random sizes, weights and tolerances, under 15 % less "
        "power on every feed. With several feeds a job is on half of them, and most of the time goes "
        "into rounding.",
    )


def _made_up_jobs(job_count: int, feed_count: int) -> list[JobDemand]:
    random = np.random.default_rng(0)
    jobs = []
    for number in range(job_count):
        full_w = random.uniform(1e4, 1e6, feed_count) * (random.random(feed_count) < 0.5)
        if not full_w.any():
            full_w[0] = 1e5
        points = tuple(
            PowerPoint(
                1 + slower,
                1 / (1 + 0.3 * slower**1.5),
                {f"feed-{feed}": (1 - 0.5 * slower) * w for feed, w in enumerate(full_w.tolist()) if w},
            )
            for slower in np.linspace(0, 1, 100).tolist()
        )
        tolerance_percent = float(random.choice([5, 10, 20, 50]))
        weight = float(random.uniform(0.5, 5))
        jobs.append(JobDemand(f"job-{number}", points, tolerance_percent=tolerance_percent, weight=weight))
    return jobs


def _heading(job: Job) -> str:
    return f"{job.job_id}: {job.gpu_count} GPUs, tolerance {job.tolerance_percent:g} %, weight {job.weight:g}"


def _within(points: Sequence[PowerPoint], limit_w: float) -> PowerPoint:
    """Return the fastest point that keeps a limit, or the one of least power."""
    return next((p for p in points if p.power_w[DEFAULT_FEED] <= limit_w), points[-1])


def proportional(points: Mapping[str, Sequence[PowerPoint]], limit_w: float) -> dict[str, PowerPoint]:
    stock_w = {job.job_id: job.stock_power_w() for job in MIX}
    share = limit_w / sum(stock_w.values())
    return {job_id: _within(own, share * stock_w[job_id]) for job_id, own in points.items()}


def equal_share(points: Mapping[str, Sequence[PowerPoint]], limit_w: float) -> dict[str, PowerPoint]:
    gpu_counts = {job.job_id: job.gpu_count for job in MIX}
    operating_points: dict[str, PowerPoint] = {}
    while len(operating_points) < len(MIX):
        rest = {job_id for job_id in points if job_id not in operating_points}
        left_w = limit_w - sum(point.power_w[DEFAULT_FEED] for point in operating_points.values())
        per_gpu_w = left_w / sum(gpu_counts[job_id] for job_id in rest)
        content = {
            job_id
            for job_id in rest
            if points[job_id][0].power_w[DEFAULT_FEED] <= per_gpu_w * gpu_counts[job_id]
        }
        for job_id in content or rest:
            operating_points[job_id] = _within(points[job_id], per_gpu_w * gpu_counts[job_id])
    return operating_points


if __name__ == "__main__":
    main("power", run)
