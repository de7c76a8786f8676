"""The cost of scraping a coordinator: with a job of 1,024 ranks, with metrics of every rank, with many jobs.

The jobs' machines were brought into their planned state beforehand; the coordinator around them is real,
idle, and serves HTTP in this process. Another process scrapes it about once a second: an answer is cached
that long, so each scrape reads anew. The CPU time of an interval with a scrape is compared with that of the
next interval; its median, for a scrape every five seconds, gives the share of a core.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.batch_cost import TimedCluster
from benchmarks.harness import Cell, Column, Table, main
from benchmarks.load.control import quantile
from perseus.service.domain.model import JobState
from perseus.service.domain.retention import Retention
from perseus.service.job.machine import JobMachine
from perseus.service.job.rules import Rules
from perseus.service.shell.coordinator import Coordinator
from perseus.service.solving.worker_pool import JOBS, REQUESTS, WorkerPool
from perseus.service.storage.sql_store import SqlStore
from perseus.service.web.app import make_app
from perseus.service.web.collector import CoordinatorCollector
from perseus.service.web.listening import bind, listening
from perseus.service.web.scrape import FRESH_S, Scrape

EVERY_S = 5.0
"""Recommended scrape interval of a Prometheus."""

_SCRAPES = 30
_MOMENT_S = 0.55 * FRESH_S


@dataclass(frozen=True, slots=True)
class Configuration:
    """A number of jobs with a number of ranks."""

    job_count: int
    rank_count: int
    has_ranks: bool = False


CONFIGURATIONS = (
    Configuration(1, 8),
    Configuration(1, 1024),
    Configuration(1, 1024, has_ranks=True),
    Configuration(128, 8),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """CPU seconds and waiting time of each scrape, for one configuration."""

    series_count: int
    size_bytes: int
    cpu_s: list[float]
    took_s: list[float]


def _planned(job_id: str, rank_count: int) -> JobMachine:
    """Return a job with a plan in force."""
    cluster = TimedCluster(rank_count, job_id)
    cluster.join_all()
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(8)
    return cluster.machine


@asynccontextmanager
async def _serving(machines: Iterable[JobMachine], *, has_ranks: bool) -> AsyncIterator[str]:
    """Serve the metrics of a coordinator with these jobs; yield their URL."""
    with tempfile.TemporaryDirectory(prefix="perseus-scrape-") as folder:
        store = await SqlStore.open(Path(folder) / "jobs.db")
        job_solver, request_solver = WorkerPool(JOBS, 1, 60.0), WorkerPool(REQUESTS, 1, 60.0)
        try:
            coordinator = Coordinator(
                store, job_solver, request_solver, Rules(lease_s=30.0, baseline_iterations=3), Retention()
            )
            await coordinator.start()
            for machine in machines:
                coordinator.live.begin(machine, [], [])
            collector = CoordinatorCollector(
                coordinator, has_ranks=has_ranks, late_limit_s=10.0, expiries_s=dict, refusal_counts={}
            )
            app = make_app(Scrape(collector.collect), None)
            async with listening(app, bind("127.0.0.1:0"), None, 1.0) as url:
                yield f"{url}/metrics"
        finally:
            job_solver.close()
            request_solver.close()
            await store.close()


async def measure(wanted: Configuration) -> Outcome:
    """Scrape an idle coordinator."""
    machines = [_planned(f"job-{number}", wanted.rank_count) for number in range(wanted.job_count)]
    cpu_s: list[float] = []
    took_s: list[float] = []
    series_count = size_bytes = 0
    async with _serving(machines, has_ranks=wanted.has_ranks) as url:
        scraper = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.load.scraper",
            url,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert scraper.stdin is not None
        assert scraper.stdout is not None
        for number in range(_SCRAPES + 1):
            before_s, began_s = time.process_time(), time.monotonic()
            scraper.stdin.write(b"\n")
            one_took_s, series_count, size_bytes = json.loads(await scraper.stdout.readline())
            await asyncio.sleep(max(0.0, began_s + _MOMENT_S - time.monotonic()))
            scraped_s = time.process_time()
            await asyncio.sleep(_MOMENT_S)
            if number:  # the first one also loads modules
                cpu_s.append((scraped_s - before_s) - (time.process_time() - scraped_s))
                took_s.append(one_took_s)
        scraper.stdin.close()
        await scraper.wait()
    return Outcome(series_count, size_bytes, cpu_s, took_s)


def run() -> list[Table]:
    """Measure all configurations."""
    rows: list[tuple[Cell, ...]] = []
    for wanted in CONFIGURATIONS:
        outcome = asyncio.run(measure(wanted))
        cpu_s = quantile(outcome.cpu_s, 0.5)
        rows.append(
            (
                wanted.job_count,
                wanted.job_count * wanted.rank_count,
                "yes" if wanted.has_ranks else "no",
                outcome.series_count,
                outcome.size_bytes / 1024,
                1e3 * cpu_s,
                100 * cpu_s / EVERY_S,
                1e3 * quantile(outcome.took_s, 0.5),
            )
        )
        print(rows[-1], flush=True)
    return [
        Table(
            "Scraping a coordinator",
            (
                Column("jobs"),
                Column("ranks"),
                Column("every rank included"),
                Column("series"),
                Column("answer [KiB]", ".0f"),
                Column("CPU per scrape [ms]", ".2f"),
                Column(f"of a core, every {EVERY_S:g} s [%]", ".2f"),
                Column("answered after [ms]", ".1f"),
            ),
            tuple(rows),
            f"Medians of {_SCRAPES} scrapes. All jobs are planned, and have not ended. These ranks report no "
            "statistics of their clocks, and so have two of the four series.",
        )
    ]


if __name__ == "__main__":
    main("scrape_cost", run)
