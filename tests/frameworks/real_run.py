"""One real training job under a real coordinator and real agents, from stock to its plan, as values.

The frameworks' tests start their own trainer on it, and judge what it found.
"""

import asyncio
import math
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import grpc.aio

from perseus.demo.cluster import Cluster
from perseus.demo.observation import Observer
from perseus.demo.summary import Measurements
from perseus.demo.workload import Workload
from perseus.v1 import (
    event_pb2,
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
GUARD_TOLERANCE_PERCENT = 10.0
"""What stages and parts wait for each other is the machine's, and in no prediction: where it does other work,
the guard would withdraw plans that are no slower than stock at the same moment, which the tests look at."""
_NORMAL_DEVIATIONS = 1.4826
"""A normal standard deviation, in median absolute deviations."""
_MEDIAN_ERRORS = 1.2533
"""The standard error of a normal sample's median, in that of its mean."""

Identity = tuple[int, int, int]
"""(kind, microbatch, chunk) of a computation, by the wire's numbers."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians over some iterations of the whole job: seconds, and joules of all its GPUs.

    `time_se_s` is the standard error of the time, by the median deviation.
    """

    iteration_count: int
    time_s: float
    time_se_s: float
    energy_j: float


def is_no_slower(found: Figures, than: Figures, allowed: float = 1.02) -> bool:
    """Whether iterations take no longer than others by a factor, as far as their spread tells."""
    error_s = math.hypot(found.time_se_s, allowed * than.time_se_s)
    return found.time_s <= allowed * than.time_s + 2 * error_s


@dataclass(slots=True)
class RealRun:
    """What a run has shown so far, and the way to ask for more."""

    workload: Workload
    cluster: Cluster
    observer: Observer
    run_dir: Path
    channel: grpc.aio.Channel
    stock: Figures | None = None
    seen: dict[tuple[int, int], list[list[Identity]]] = field(default_factory=dict)
    """(pipeline, iteration) → what the coordinator knows that each stage has executed, in order."""

    async def until_planned(self) -> None:
        """Wait until every rank has the plan in force that follows from profiling."""
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

    def why_unmeasured(self) -> str | None:
        """Why profiling gave clocks up, if it has ended without enough to plan on."""
        events = self.observer.events
        is_enough = all(
            event.profiling_ended.is_enough
            for event in events
            if event.type == event_pb2.JOB_EVENT_TYPE_PROFILING_ENDED
        )
        given_up = [event for event in events if event.type == event_pb2.JOB_EVENT_TYPE_CLOCK_GIVEN_UP]
        return None if is_enough or not given_up else given_up[-1].message

    async def watch(self, count: int) -> Figures:
        """Watch the next `count` iterations that begin from now on."""
        first = self.observer.next_whole_iteration
        return await self.when_known(range(first, first + count))

    async def plan_beside_stock(self, count: int) -> Figures:
        """Watch so many iterations of the plan, which are to be no slower than stock; return them.

        What else the machine does may change between the first baseline and the plan: where the plan seems
        slower, stock is measured again, and the plan right after it. A plan that is slower is so every time.
        """
        plan = await self.watch(count)
        assert self.stock is not None
        for _ in range(2):
            if is_no_slower(plan, self.stock):
                break
            self.stock = await self._measure_stock_again()
            plan = await self.watch(count)
        assert is_no_slower(plan, self.stock)
        return plan

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
        """The figures of these iterations, once all pipelines have reported them."""
        measurements = self.observer.measurements
        await self.observer.until(
            f"iterations {numbers[0]} to {numbers[-1]}",
            lambda: measurements.are_complete(numbers),
            STEP_TIMEOUT_S,
        )
        return self.figures(numbers)

    def figures(self, numbers: Sequence[int]) -> Figures:
        """The medians over these iterations, of those that all pipelines reported."""
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
        """The frontier that the coordinator plans on."""
        stub = frontier_service_pb2_grpc.FrontierServiceStub(self.channel)
        request = frontier_service_pb2.GetFrontierRequest(job_id=self.workload.job_id)
        return (await stub.GetFrontier(request, timeout=STEP_TIMEOUT_S)).frontier

    async def set_policy(self, policy: job_pb2.OperatingPolicy) -> None:
        """Set the operating policy, and wait until the plan that follows from it is in force."""
        stub = job_service_pb2_grpc.JobServiceStub(self.channel)
        observer = self.observer
        request = job_service_pb2.SetPolicyRequest(job_id=self.workload.job_id, policy=policy)
        before = observer.in_force_since()
        await stub.SetPolicy(request, timeout=STEP_TIMEOUT_S)
        await self._until_newer_plan(f"a plan of the policy {policy} in force", before)

    async def report_no_straggler(self, pipeline: int) -> None:
        """Say that a pipeline is as fast as planned, which overrides what is found; wait for that plan."""
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
        """The order of every stage, as the job was registered with it."""
        assert self.observer.job is not None
        stages = self.observer.job.spec.schedule.explicit.stages
        return [[(c.kind, c.microbatch, c.chunk) for c in stage.computations] for stage in stages]

    def paths(self) -> list[list[tuple[int, int]]]:
        """How activations flow, as the job was registered with it."""
        assert self.observer.job is not None
        paths = self.observer.job.spec.schedule.explicit.paths
        return [[(step.stage, step.chunk) for step in path.steps] for path in paths]

    async def keep_timelines(self) -> None:
        """Keep what was executed in every iteration, as long as this runs."""
        kept = dict.fromkeys(range(self.workload.pipeline_count), -1)
        while True:
            for pipeline, before in kept.items():
                iteration = self.observer.measurements.latest_of(pipeline)
                if iteration is not None and iteration.number > before:
                    kept[pipeline] = await self._keep_timeline(pipeline, before)
            await asyncio.sleep(0.1)

    async def _keep_timeline(self, pipeline: int, before: int) -> int:
        """Keep the latest iteration of a pipeline; its number, or `before` if no whole one is there yet."""
        try:
            found = await self.observer.timeline(pipeline)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise
            return before
        stages: list[list[Identity]] = [[] for _ in range(self.workload.stage_count)]
        for entry in found.entries:
            c = entry.computation
            stages[entry.stage].append((c.kind, c.microbatch, c.chunk))
        self.seen[pipeline, found.iteration] = stages
        return found.iteration


@asynccontextmanager
async def real_run(
    workload: Workload,
    log_dir: Path,
    start_trainers: Callable[[Cluster, Path], None],
) -> AsyncIterator[RealRun]:
    """Coordinator, agents and trainers on loopback, observed; the job ends in good order with the block."""
    with (
        tempfile.TemporaryDirectory(prefix="perseus-") as folder,
        Cluster(workload, Path(folder), log_dir, guard_tolerance_percent=GUARD_TOLERANCE_PERCENT) as cluster,
    ):
        address = await asyncio.to_thread(cluster.start_coordinator)
        await asyncio.to_thread(cluster.start_agents, address)
        start_trainers(cluster, Path(folder))
        async with cluster.security.channels(address).open() as channel:
            observer = Observer(channel, workload.job_id, Measurements(workload.pipeline_count), lambda: None)
            run = RealRun(workload, cluster, observer, Path(folder), channel)
            async with asyncio.TaskGroup() as group:
                watchers = [
                    group.create_task(watching)
                    for watching in (observer.follow(), run.keep_timelines(), _keep_watch(cluster))
                ]
                yield run
                await asyncio.to_thread(cluster.stop_training)
                await observer.until(
                    "the end of the job", lambda: observer.state == job_pb2.JOB_STATE_FINISHED, STEP_TIMEOUT_S
                )
                for watcher in watchers:
                    watcher.cancel()
        await asyncio.to_thread(cluster.stop_services)


async def _keep_watch(cluster: Cluster) -> None:
    while True:
        cluster.check()
        await asyncio.sleep(0.5)
