"""The cost of 20 open pages and a scraper for a coordinator with a job of 1,024 ranks.

The job's machine was brought into its planned state beforehand. The coordinator around it is real: it stores
all reports and serves HTTP in this process, which also passes in the ranks' telemetry. Another process runs
the pages and a scraper: ten pages show the list of jobs and ten the job, with the live page's requests at its
rate. Turns with and without them alternate; the CPU time of a turn with them is compared with the mean of the
turns before and after it.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.batch_cost import STAGES, TimedCluster
from benchmarks.harness import Cell, Column, Table, main
from benchmarks.load.control import quantile
from benchmarks.load.pages import SCRAPE_S
from perseus.service.api.calls import unary_calls
from perseus.service.api.frontier_service import FrontierService
from perseus.service.api.job_service import JobService
from perseus.service.domain.commands import Command
from perseus.service.domain.inputs import Input
from perseus.service.domain.model import JobState
from perseus.service.domain.retention import Retention
from perseus.service.job.rules import Rules
from perseus.service.server import collect_rarely
from perseus.service.shell.coordinator import Coordinator
from perseus.service.solving.worker_pool import JOBS, REQUESTS, WorkerPool
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import NewRun
from perseus.service.web.app import make_app
from perseus.service.web.collector import CoordinatorCollector
from perseus.service.web.listening import bind, listening
from perseus.service.web.page_api import PageApi
from perseus.service.web.scrape import Scrape
from perseus.v1 import frontier_service_pb2 as frontier_pb
from perseus.v1 import job_service_pb2 as job_pb

RANKS = 1024
LIST_PAGES = 10
JOB_PAGES = 10
PERIOD_S = 1.0
"""Period of the job's iterations."""

_TURN_S = 20.0
_SETTLE_S = 3.0
_PAIRS = 6


class LiveCluster(TimedCluster):
    """Ranks that send their telemetry to a coordinator once their job is planned."""

    coordinator: Coordinator | None = None

    def handle(self, event: Input) -> list[Command]:
        if self.coordinator is None:
            return super().handle(event)
        self.coordinator.live.handle(self.coordinator.live.find(self.spec.job_id), event)
        return []

    async def run(self) -> None:
        """Let all ranks report an iteration every second, in groups."""
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        for iteration in count():
            next_s += PERIOD_S
            for number, rank in enumerate(self.ranks.values()):
                rank.begin()
                # No two iterations take the same time: the shown job changes every time.
                self.send(rank.end(0.8 + 1e-4 * (iteration % 7)))
                if number % 16 == 15:
                    await asyncio.sleep(0)
            await asyncio.sleep(max(0.0, next_s - loop.time()))


async def _turn(seconds: float) -> float:
    """Return the share of a core that this process uses over some seconds."""
    began_s, cpu_s = time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    return (time.process_time() - cpu_s) / (time.monotonic() - began_s)


@asynccontextmanager
async def _serving(cluster: LiveCluster) -> AsyncIterator[str]:
    """Serve the page of a coordinator with this running job; yield its URL."""
    with TemporaryDirectory(prefix="perseus-pages-") as folder:
        store = await SqlStore.open(Path(folder) / "jobs.db")
        job_solver, request_solver = WorkerPool(JOBS, 1, 60.0), WorkerPool(REQUESTS, 1, 60.0)
        coordinator = Coordinator(
            store, job_solver, request_solver, Rules(lease_s=30.0, baseline_iterations=3), Retention()
        )
        try:
            await coordinator.start()
            machine = cluster.machine
            coordinator.live.begin(machine, [], [NewRun(machine.spec, 1, machine.create_time_s)])
            cluster.coordinator = coordinator
            collector = CoordinatorCollector(
                coordinator, has_ranks=False, late_limit_s=10.0, expiries_s=dict, refusal_counts={}
            )
            jobs, quotas = coordinator.jobs, coordinator.quotas
            services = {**job_pb.DESCRIPTOR.services_by_name, **frontier_pb.DESCRIPTOR.services_by_name}
            calls = [
                *unary_calls(services["JobService"], JobService(jobs, quotas)),
                *unary_calls(services["FrontierService"], FrontierService(jobs, quotas), but_for=("Solve",)),
            ]
            app = make_app(Scrape(collector.collect), None, PageApi(coordinator, calls, None))
            background = asyncio.ensure_future(coordinator.run())
            reporting = asyncio.ensure_future(cluster.run())
            async with listening(app, bind("127.0.0.1:0"), None, 1.0) as url:
                yield url
            for task in (reporting, background):
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await coordinator.close()
        finally:
            job_solver.close()
            request_solver.close()
            await store.close()


async def measure() -> tuple[list[float], list[float], dict[str, float]]:
    """Return the shares of a core without and with pages, and the data sent to one page in a second."""
    cluster = LiveCluster(RANKS)
    cluster.now_s = time.monotonic()  # the coordinator's time: leases continue
    cluster.join_all()
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(8)
    alone: list[float] = []
    looked_at: list[float] = []
    reported: dict[str, float] = {}
    collect_rarely()
    async with _serving(cluster) as url:
        command = (sys.executable, "-m", "benchmarks.load.pages", url, str(LIST_PAGES), str(JOB_PAGES))
        pipe = asyncio.subprocess.PIPE
        pages = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert pages.stdin is not None
        assert pages.stdout is not None
        await asyncio.sleep(_SETTLE_S)
        for _ in range(_PAIRS):
            alone.append(await _turn(_TURN_S))
            pages.stdin.write(b"open\n")
            await asyncio.sleep(_SETTLE_S)
            looked_at.append(await _turn(_TURN_S))
            pages.stdin.write(b"close\n")
            reported = json.loads(await pages.stdout.readline())
            await asyncio.sleep(_SETTLE_S)
        alone.append(await _turn(_TURN_S))
        pages.stdin.close()
        await pages.wait()
    return alone, looked_at, reported


def run() -> list[Table]:
    """Measure it."""
    alone, looked_at, reported = asyncio.run(measure())
    costs = [
        share - (before + after) / 2
        for share, before, after in zip(looked_at, alone, alone[1:], strict=False)
    ]
    row: tuple[Cell, ...] = (
        LIST_PAGES,
        JOB_PAGES,
        100 * quantile(alone, 0.5),
        100 * quantile(looked_at, 0.5),
        100 * quantile(costs, 0.5),
        100 * min(costs),
        100 * max(costs),
        reported["list_bytes_per_s"] / 1024,
        reported["job_bytes_per_s"] / 1024,
        1e3 * reported["slowest_answer_s"],
    )
    print(row, costs, flush=True)
    return [
        Table(
            "Open pages",
            (
                Column("on the list"),
                Column("on the job"),
                Column("without [% of a core]", ".1f"),
                Column("with [% of a core]", ".1f"),
                Column("difference [% of a core]", ".2f"),
                Column("least", ".2f"),
                Column("most", ".2f"),
                Column("sent per list page [KiB/s]", ".1f"),
                Column("sent per job page [KiB/s]", ".1f"),
                Column("slowest answer [ms]", ".0f"),
            ),
            (row,),
            f"A job of {RANKS:,} ranks in {RANKS // STAGES} pipelines, which reports every {PERIOD_S:g} s; "
            "its pages also request ranks, timelines, the job, its report and frontier, and a scraper reads "
            f"every {SCRAPE_S:g} s. Medians over {_PAIRS} pairs of turns of {_TURN_S:g} s.",
        )
    ]


if __name__ == "__main__":
    main("page_cost", run)
