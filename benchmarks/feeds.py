"""The event loop's load from 64 power feeds with 500 jobs, second by second.

The coordinator's real power task runs, in real time, on fake jobs and agents: every second each job ends an
iteration, and each agent reports its GPUs' power. `benchmarks.power_readings` measures the cost of adding up
the agents' readings. Figures are CPU time, so other processes don't count.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import structlog

from benchmarks.harness import GPUS_PER_STAGE, Column, Table, main, published_pipeline
from perseus.service.domain.inputs import BudgetTargetSet, MaxClockSet
from perseus.service.domain.job_power import JobPower, PowerCurveBasis
from perseus.service.domain.power import BudgetRequest, Feed
from perseus.service.domain.principals import ANYBODY
from perseus.service.domain.retention import Retention
from perseus.service.domain.specification import BudgetTerms, Parallelism
from perseus.service.fleet.power.curve import power_points
from perseus.service.fleet.power.demand import PowerPoint
from perseus.service.fleet.power.feeds import Feeds, placement
from perseus.service.fleet.power.readings import PowerTotals
from perseus.service.shell.power import Power
from perseus.solver import Frontier, solve

FEED_COUNT, JOB_COUNT, READER_COUNT = 64, 500, 8
MEASURED_S = 20.0
LIMIT_PERCENT = 85
_SETTLE_S = 8.0
_MICROBATCHES, _STAGES = 16, 8
_NOISE = 0.01


@dataclass(eq=False)
class _Job:
    """A planned job of 64 GPUs that follows orders: the part of run and machine that the power task uses."""

    job_id: str
    basis: PowerCurveBasis
    points: Sequence[PowerPoint]
    names: Sequence[str]
    target_time_s: float | None = None
    max_clock: object = None
    number = 1
    has_finished = False
    has_live_rank = True
    spec = SimpleNamespace(
        parallelism=Parallelism(1, _STAGES, GPUS_PER_STAGE), rank_count=_STAGES * GPUS_PER_STAGE
    )

    @property
    def machine(self) -> "_Job":
        return self

    @property
    def record(self) -> "_Job":
        return self

    @property
    def point(self) -> PowerPoint:
        target_time_s = self.target_time_s or 0.0
        return next((p for p in self.points if p.iteration_time_s >= target_time_s), self.points[-1])

    def power(self) -> JobPower:
        power_w = sum(self.point.power_w.values())
        terms = BudgetTerms(tolerance_percent=30.0)
        return JobPower(
            self.basis, terms, self.target_time_s, power_w, self.point.iteration_time_s, is_in_force=True
        )

    def hostnames(self) -> Sequence[str]:
        return self.names

    def gpu_models(self) -> Sequence[str]:
        return ["NVIDIA A100-SXM4-80GB"] * len(self.names)

    def highest_clock_mhz(self) -> int:
        return 1410


class _Fleet:
    """All jobs, their agents and the store, as the power task uses them."""

    def __init__(self, jobs: Sequence[_Job]) -> None:
        self._jobs = {job.job_id: job for job in jobs}
        self._random = np.random.default_rng(0)
        self._changed: set[str] = set()
        self.is_known = asyncio.Event()
        self.rules = SimpleNamespace(lease_s=30.0)
        self.job_ids = list(self._jobs)
        self.check_budgets = lambda principal, count: None

    async def load_budgets(self) -> list[object]:
        return []

    async def later(self, entries: object, then: Sequence[Callable[[], None]]) -> None:
        for action in then:
            action()

    @contextmanager
    def changes(self) -> Iterator[set[str]]:
        yield self._changed

    def get(self, job_id: str) -> _Job:
        return self._jobs[job_id]

    def read(self, run: _Job, ask: Callable[..., object], otherwise: object) -> object:
        return getattr(run, ask.__name__)()

    def handle(self, run: _Job, order: BudgetTargetSet | MaxClockSet) -> None:
        if isinstance(order, BudgetTargetSet):
            run.target_time_s = order.target_time_s
        else:
            run.max_clock = order.to_max_clock()

    def ask_for_power(self) -> None:
        """Agents report without a request."""

    def totals(self, job_ids: object) -> PowerTotals:
        found = PowerTotals()
        for job in self._jobs.values():
            factor = 1 + _NOISE * self._random.standard_normal()
            found.jobs_w[job.job_id] = {feed: factor * w for feed, w in job.point.power_w.items()}
            found.gpu_counts[job.job_id] = dict.fromkeys(
                job.point.power_w, _STAGES * GPUS_PER_STAGE // len(job.point.power_w)
            )
        self._changed.update(self._jobs)
        self.is_known.set()
        return found


def _feeds() -> Feeds:
    names = [f"feed-{number}" for number in range(FEED_COUNT)]
    return Feeds({name: Feed(name) for name in names}, {name: [f"{name}-*"] for name in names})


def _jobs(frontier: Frontier, feeds: Feeds) -> list[_Job]:
    """Return the jobs; every other one is on two feeds, with half of its stages on each."""
    own_s = frontier.points[0].iteration_time_s
    jobs = []
    for number in range(JOB_COUNT):
        first = number % FEED_COUNT
        second = (7 * number + 1) % FEED_COUNT if number % 2 else first
        half = _STAGES * GPUS_PER_STAGE // 2
        names = [f"feed-{first}-host"] * half + [f"feed-{second}-host"] * half
        placed = placement(feeds, names, _STAGES, GPUS_PER_STAGE)
        points = power_points(frontier, placed, own_time_s=own_s)
        basis = PowerCurveBasis(frontier, own_s, {}, 0.0)
        jobs.append(_Job(f"job-{number}", basis, points, names))
    return jobs


def run() -> Sequence[Table]:
    """Measure every case in its own loop."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    frontier = solve(published_pipeline("a100-sxm", _MICROBATCHES))
    feeds = _feeds()
    jobs = _jobs(frontier, feeds)
    rows = []
    for is_limited in (False, True):
        for reader_count in (0, READER_COUNT):
            some = [replace(job) for job in jobs]
            figures = asyncio.run(_measure(feeds, some, reader_count, is_limited=is_limited))
            rows.append(("limited" if is_limited else "not limited", reader_count, *figures))
    return [
        Table(
            f"{FEED_COUNT} power feeds with {JOB_COUNT} jobs, per second",
            (
                Column("feeds are"),
                Column("readers of WatchFeeds", "d"),
                Column("on the loop [CPU ms]", ".1f"),
                Column("in threads [CPU ms]", ".1f"),
                Column("longest iteration of the loop [CPU ms]", ".1f"),
            ),
            tuple(rows),
            f"Every other job is on two feeds. Limits are {LIMIT_PERCENT} % of the feeds' draw without them. "
            f"Power varies by {100 * _NOISE:.0f} % from second to second; every job changes every second.",
        )
    ]


async def _measure(
    feeds: Feeds, jobs: Sequence[_Job], reader_count: int, *, is_limited: bool
) -> tuple[float, float, float]:
    """Return the CPU per second on the loop and in threads, and its longest iteration, in milliseconds."""
    fleet = cast(Any, _Fleet(jobs))
    power = Power(fleet, fleet, fleet, fleet, fleet, feeds, Retention())
    await power.load()
    if is_limited:
        for feed, drawn_w in _free_w(jobs).items():
            limit_w = LIMIT_PERCENT / 100 * drawn_w
            wanted = BudgetRequest(feed, "r", feed, limit_w, None, None, None, None, "")
            await power.set_budget(wanted, ANYBODY)
    tasks = [asyncio.create_task(power.run())]
    tasks += [asyncio.create_task(_read(power)) for _ in range(reader_count)]
    await fleet.is_known.wait()
    await asyncio.sleep(_SETTLE_S)
    began_s, loop_s, all_s = time.monotonic(), time.thread_time(), time.process_time()
    longest_s = 0.0
    while time.monotonic() < began_s + MEASURED_S:
        before_s = time.thread_time()
        await asyncio.sleep(0.02)
        longest_s = max(longest_s, time.thread_time() - before_s)
    wall_s = time.monotonic() - began_s
    loop_s, all_s = time.thread_time() - loop_s, time.process_time() - all_s
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return 1000 * loop_s / wall_s, 1000 * (all_s - loop_s) / wall_s, 1000 * longest_s


async def _read(power: Power) -> None:
    async for _ in power.watch():
        pass


def _free_w(jobs: Sequence[_Job]) -> Mapping[str, float]:
    total_w: dict[str, float] = {}
    for job in jobs:
        for feed, power_w in job.point.power_w.items():
            total_w[feed] = total_w.get(feed, 0.0) + power_w
    return total_w


if __name__ == "__main__":
    main("feeds", run)
