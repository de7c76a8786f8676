"""One real training job under a real coordinator and real agents, from stock to its plan, with its figures.

The frameworks' tests start their own trainer on it, and check its figures.
"""

import asyncio
import math
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import grpc.aio

from perseus import solver
from perseus.demo.cluster import Cluster
from perseus.demo.observation import Observer
from perseus.demo.summary import Measurements
from perseus.demo.workload import Workload
from perseus.emulation.gpu import EmulatedGpu
from perseus.service.api.translate_problems import KIND_FROM_PROTO
from perseus.v1 import (
    frontier_pb2,
    frontier_service_pb2,
    frontier_service_pb2_grpc,
    job_pb2,
    job_service_pb2,
    job_service_pb2_grpc,
)

_START_TIMEOUT_S = 60.0
_PROFILING_TIMEOUT_S = 240.0
STEP_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 30.0
_POLL_S = 0.1
GUARD_TOLERANCE_PERCENT = 10.0
"""Waits between stages and parts depend on the machine, and predictions exclude them: with other work on the
machine, the guard would withdraw plans that the tests compare with stock at the same time."""
_NORMAL_DEVIATIONS = 1.4826
"""A normal standard deviation, in median absolute deviations."""
_MEDIAN_ERRORS = 1.2533
"""Standard error of a normal sample's median, relative to that of its mean."""

Identity = tuple[int, int, int]
"""(kind, microbatch, chunk) of a computation, as numbers on the wire."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians over some iterations of the whole job: seconds, and joules of all its GPUs.

    `time_se_s` is the standard error of the time, by the median deviation. `energy_errors_percent`: of a
    plan's predictions, as in `CaseResult`.
    """

    iteration_count: int
    time_s: float
    time_se_s: float
    energy_j: float
    energy_errors_percent: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Whole:
    """The mean time and energy of an iteration and the gap before it: seconds, and joules of all GPUs.

    Later stages end their own iterations earlier, and wait for the first one in their gap. Its energy counts
    in predictions. And the counter is too slow to tell how much of the energy around an iteration's end was
    drawn before it; over iterations and gaps together that averages out.
    """

    time_s: float
    energy_j: float


def is_no_slower(found: Figures, than: Figures, allowed: float = 1.02) -> bool:
    """Whether iterations exceed others by no more than a factor, given their spread."""
    error_s = math.hypot(found.time_se_s, allowed * than.time_se_s)
    return found.time_s <= allowed * than.time_s + 2 * error_s


@dataclass(slots=True)
class RealRun:
    """A run's observations so far, and methods to get more."""

    workload: Workload
    cluster: Cluster
    observer: Observer
    run_dir: Path
    channel: grpc.aio.Channel
    stock: Figures | None = None

    async def until_planned(self) -> None:
        """Wait until the plan after profiling is in force on every rank."""
        observer = self.observer
        await observer.until(
            "the stock baseline", lambda: observer.state >= job_pb2.JOB_STATE_PROFILING, _START_TIMEOUT_S
        )
        self.stock = self.figures(observer.measurements.at_stock())
        await observer.until(
            "a plan in force",
            lambda: observer.state == job_pb2.JOB_STATE_PLANNED and observer.is_in_force(),
            _PROFILING_TIMEOUT_S,
        )

    async def watch(self, count: int) -> Figures:
        """Measure the next `count` iterations that begin after now."""
        first = self.observer.next_whole_iteration
        return await self.when_known(range(first, first + count))

    async def plan_beside_stock(self, count: int) -> Figures:
        """Measure `count` iterations of the plan, which must be no slower than stock; return them.

        Other load on the machine may change between the first baseline and the plan. If the plan seems
        slower, measure stock again, and the plan right after it. A plan that really is slower is so every
        time.
        """
        plan = await self.watch(count)
        assert self.stock is not None
        for _ in range(2):
            if is_no_slower(plan, self.stock):
                break
            plan = await self.measure_again(count)
        assert is_no_slower(plan, self.stock)
        return plan

    async def measure_again(self, count: int) -> Figures:
        """Measure stock again, and then `count` iterations of the plan; return those."""
        self.stock = await self._measure_stock_again()
        return await self.watch(count)

    async def _measure_stock_again(self) -> Figures:
        stub = job_service_pb2_grpc.JobServiceStub(self.channel)
        observer = self.observer
        known_count = len(observer.events)
        request = job_service_pb2.MeasureBaselineRequest(
            job_id=self.workload.job_id, request_id=f"after-event-{known_count}"
        )
        before = observer.in_force_since()
        await stub.MeasureBaseline(request, timeout=STEP_TIMEOUT_S)
        await self._until_newer_plan("stock in force", before)
        stock = observer.in_force_version(0)
        await observer.until(
            "the plan in force again",
            lambda: observer.in_force_version(0) != stock and observer.is_in_force(),
            STEP_TIMEOUT_S,
        )
        return self.figures(observer.measurements.under(stock))

    async def when_known(self, numbers: Sequence[int]) -> Figures:
        """Return the figures of these iterations, once all pipelines have reported them."""
        measurements = self.observer.measurements
        await self.observer.until(
            f"iterations {numbers[0]} to {numbers[-1]}",
            lambda: measurements.are_complete(numbers),
            STEP_TIMEOUT_S,
        )
        return self.figures(numbers)

    def figures(self, numbers: Sequence[int]) -> Figures:
        """Return the medians over those of these iterations that all pipelines reported."""
        rows = self.observer.measurements.whole(numbers)
        times_s = [max(each.time_s for each in row.values()) for row in rows]
        time_s = median(times_s)
        deviation_s = _NORMAL_DEVIATIONS * median(abs(each - time_s) for each in times_s)
        return Figures(
            len(rows),
            time_s,
            _MEDIAN_ERRORS * deviation_s / math.sqrt(len(rows)),
            median(sum(each.energy_j for each in row.values()) for row in rows),
        )

    async def frontier(self) -> frontier_pb2.Frontier:
        """Return the coordinator's frontier."""
        stub = frontier_service_pb2_grpc.FrontierServiceStub(self.channel)
        request = frontier_service_pb2.GetFrontierRequest(job_id=self.workload.job_id)
        return (await stub.GetFrontier(request, timeout=STEP_TIMEOUT_S)).frontier

    async def planned_mhz(self, iteration_time_s: float) -> dict[solver.Computation, int]:
        """Return the clocks of the coordinator's plan for an iteration time."""
        stub = frontier_service_pb2_grpc.FrontierServiceStub(self.channel)
        request = frontier_service_pb2.GetPlanRequest(
            job_id=self.workload.job_id, iteration_time_s=iteration_time_s
        )
        plan = (await stub.GetPlan(request, timeout=STEP_TIMEOUT_S)).plan
        return {
            solver.Computation(stage, KIND_FROM_PROTO[c.kind], c.microbatch, c.chunk): c.clock_mhz
            for stage, planned in enumerate(plan.stages)
            for c in planned.computations
        }

    async def whole(self, *, at_stock: bool) -> Whole:
        """Return what a whole iteration of the latest stock baseline, or of the plan in force, takes."""
        state = job_pb2.JOB_STATE_BASELINE if at_stock else job_pb2.JOB_STATE_PLANNED
        period = [period for period in (await self.report()).periods if period.state == state][-1]
        # From end to end. One iteration's timeline would show a pause that the mean energy hardly contains.
        lasted = period.end_time.ToDatetime() - period.start_time.ToDatetime()
        time_s = lasted.total_seconds() / (period.last_iteration - period.first_iteration)
        return Whole(time_s, period.energy_j + period.gap_energy_j)

    async def report(self) -> job_service_pb2.GetReportResponse:
        """Return the job's report."""
        stub = job_service_pb2_grpc.JobServiceStub(self.channel)
        request = job_service_pb2.GetReportRequest(job_id=self.workload.job_id)
        return await stub.GetReport(request, timeout=STEP_TIMEOUT_S)

    async def set_policy(self, policy: job_pb2.OperatingPolicy) -> None:
        """Set the operating policy, and wait until its plan is in force."""
        stub = job_service_pb2_grpc.JobServiceStub(self.channel)
        observer = self.observer
        request = job_service_pb2.SetPolicyRequest(job_id=self.workload.job_id, policy=policy)
        before = observer.in_force_since()
        await stub.SetPolicy(request, timeout=STEP_TIMEOUT_S)
        await self._until_newer_plan(f"a plan of the policy {policy} in force", before)

    async def report_no_straggler(self, pipeline: int) -> None:
        """Report that a pipeline is as fast as planned, which overrides detection; wait for that plan."""
        stub = job_service_pb2_grpc.JobServiceStub(self.channel)
        request = job_service_pb2.ReportStragglerRequest(
            job_id=self.workload.job_id, pipeline=pipeline, slowdown_factor=1.0
        )
        before = self.observer.in_force_since()
        await stub.ReportStraggler(request, timeout=STEP_TIMEOUT_S)
        await self._until_newer_plan("the answer to the straggler to be taken back", before)

    async def _until_newer_plan(self, what: str, before: int) -> None:
        observer = self.observer
        await observer.until(
            what, lambda: observer.in_force_since() > before and observer.is_in_force(), STEP_TIMEOUT_S
        )

    def registered(self) -> list[list[Identity]]:
        """The registered order of every stage."""
        assert self.observer.job is not None
        stages = self.observer.job.spec.schedule.explicit.stages
        return [[(c.kind, c.microbatch, c.chunk) for c in stage.computations] for stage in stages]

    def paths(self) -> list[list[tuple[int, int]]]:
        """The registered paths of activations."""
        assert self.observer.job is not None
        paths = self.observer.job.spec.schedule.explicit.paths
        return [[(step.stage, step.chunk) for step in path.steps] for path in paths]


@asynccontextmanager
async def real_run(
    workload: Workload,
    log_dir: Path,
    start_trainers: Callable[[Cluster, Path], None],
    *,
    nodes: Workload | None = None,
    observing: Collection[int] = (),
) -> AsyncIterator[RealRun]:
    """Run and observe coordinator, agents and trainers on loopback; the job finishes with the block, and then
    all GPUs are at stock.

    `nodes`: the agents and their GPUs, a stage for each, if not those of the workload. `observing`: agents
    that never set clocks.
    """
    nodes = nodes or workload
    with (
        tempfile.TemporaryDirectory(prefix="perseus-") as folder,
        Cluster(
            nodes,
            Path(folder),
            log_dir,
            guard_tolerance_percent=GUARD_TOLERANCE_PERCENT,
            observing=observing,
        ) as cluster,
    ):
        address = await asyncio.to_thread(cluster.start_coordinator)
        await asyncio.to_thread(cluster.start_agents, address)
        start_trainers(cluster, Path(folder))
        async with cluster.security.channels(address).open() as channel:
            observer = Observer(channel, workload.job_id, Measurements(workload.pipeline_count), lambda: None)
            run = RealRun(workload, cluster, observer, Path(folder), channel)
            async with asyncio.TaskGroup() as group:
                watchers = [
                    group.create_task(watching) for watching in (observer.follow(), _keep_watch(cluster))
                ]
                yield run
                await asyncio.to_thread(cluster.stop_training)
                await observer.until(
                    "the end of the job", lambda: observer.state == job_pb2.JOB_STATE_FINISHED, STEP_TIMEOUT_S
                )
                for watcher in watchers:
                    watcher.cancel()
        await until_at_stock(nodes, cluster)
        await asyncio.to_thread(cluster.stop_services)


async def until_at_stock(nodes: Workload, cluster: Cluster) -> None:
    """Wait until all GPUs are at stock, which must happen soon after the trainers have gone."""
    deadline_s = time.monotonic() + _END_TIMEOUT_S
    for rank in nodes.ranks:
        with closing(EmulatedGpu(cluster.gpu_file(*rank))) as gpu:
            while gpu.sm_clock_mhz() != nodes.gpu.highest_clock_mhz:
                assert time.monotonic() < deadline_s, f"GPU of {rank} (pipeline, stage): not at stock"
                await asyncio.sleep(_POLL_S)


async def _keep_watch(cluster: Cluster) -> None:
    while True:
        cluster.check()
        await asyncio.sleep(0.5)
