"""One real training job under a real coordinator and real agents, from stock to its plan."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest

from perseus import solver
from perseus.demo.cluster import Cluster
from perseus.demo.observation import Observer
from perseus.demo.summary import Measurements
from perseus.demo.workload import Workload
from perseus.emulation.gpu import EmulatedGpu
from perseus.service.api.translate_problems import KIND_FROM_PROTO, problem_from_proto
from perseus.v1 import (
    frontier_pb2,
    frontier_service_pb2,
    frontier_service_pb2_grpc,
    job_pb2,
    job_service_pb2,
    job_service_pb2_grpc,
    rank_pb2,
)
from tests.frameworks.cases import Case, Orders
from tests.frameworks.trainers import TrainerTask

PLAN_TIMEOUT_S = 300.0
STEP_TIMEOUT_S = 120.0
GUARD_TOLERANCE_PERCENT = 10.0
"""Waits between stages depend on the machine, and predictions exclude them: with other work on the machine,
the guard would withdraw plans."""
_QUICK_SET_S = 0.015
"""On a machine so busy that setting a clock takes longer, short computations rightly stay at stock."""
_POLL_S = 0.1


@dataclass(slots=True)
class RealRun:
    """A case's training in a cluster, and what its coordinator says."""

    case: Case
    task: TrainerTask
    cluster: Cluster
    observer: Observer
    channel: grpc.aio.Channel

    async def until_planned(self) -> None:
        """Wait until the plan after profiling is in force on every rank."""
        observer = self.observer
        await observer.until(
            "a plan in force",
            lambda: observer.state == job_pb2.JOB_STATE_PLANNED and observer.is_in_force(),
            PLAN_TIMEOUT_S,
        )

    async def until_newer_plan(
        self, what: str, than: int, is_true: Callable[[], bool] = lambda: True
    ) -> None:
        """Wait until a plan is in force that begins after an iteration, and something is true."""
        observer = self.observer
        await observer.until(
            what,
            lambda: is_true() and observer.is_in_force() and observer.in_force_since() > than,
            STEP_TIMEOUT_S,
        )

    async def set_budget(self, slowdown_percent: float) -> None:
        """Permit a slowdown."""
        policy = job_pb2.OperatingPolicy(max_slowdown_percent=slowdown_percent)
        request = job_service_pb2.SetPolicyRequest(job_id=self.observer.job_id, policy=policy)
        stub = job_service_pb2_grpc.JobServiceStub(self.channel)
        await stub.SetPolicy(request, timeout=STEP_TIMEOUT_S)

    async def job(self) -> job_pb2.Job:
        """Return the job as it is now."""
        request = job_service_pb2.GetJobRequest(job_id=self.observer.job_id)
        stub = job_service_pb2_grpc.JobServiceStub(self.channel)
        return (await stub.GetJob(request, timeout=STEP_TIMEOUT_S)).job

    def registered(self) -> Orders:
        """Return the registered order of every stage."""
        assert self.observer.job is not None
        stages = self.observer.job.spec.schedule.explicit.stages
        return [[(c.kind, c.microbatch, c.chunk) for c in stage.computations] for stage in stages]

    async def planned(self) -> tuple[job_pb2.Job, frontier_pb2.Frontier]:
        """Return the job and its frontier of one moment at which its plans are in force on every rank.

        The one that was waited for may be withdrawn: on a machine that was busy during stock's measurement,
        plans are faster than stock, which is then measured again, and the frontier becomes another one.
        """
        jobs = job_service_pb2_grpc.JobServiceStub(self.channel)
        request = job_service_pb2.ListRanksRequest(job_id=self.observer.job_id)
        async with asyncio.timeout(PLAN_TIMEOUT_S):
            while True:
                await self.until_planned()
                frontier = await self.observer.frontier()
                ranks = (await jobs.ListRanks(request, timeout=STEP_TIMEOUT_S)).ranks
                job = await self.job()
                assert len(ranks) == self.task.rank_count
                assert {rank.state for rank in ranks} == {rank_pb2.RANK_STATE_CONNECTED}
                are_in_force = all(rank.in_force_version == rank.offered_version > 0 for rank in ranks)
                is_latest = frontier == await self.observer.frontier()
                if are_in_force and is_latest and job.planned_iteration_time_s:
                    return job, frontier
                await asyncio.sleep(_POLL_S)

    async def check_plan(self) -> None:
        """Check that everything is measured, and that the fastest plan in force is not slower than stock."""
        job, frontier = await self.planned()
        problem, fastest = problem_from_proto(frontier.problem), frontier.points[0]
        keys = {(c.stage, c.chunk, c.kind) for c in problem.schedule.computations}
        assert problem.profiles.keys() == keys
        assert min(len(measured) for measured in problem.profiles.values()) > 1, "at several clocks"
        assert fastest.iteration_time_s == pytest.approx(frontier.t_min_s)
        stub = frontier_service_pb2_grpc.FrontierServiceStub(self.channel)
        request = frontier_service_pb2.GetPlanRequest(
            job_id=self.observer.job_id, iteration_time_s=fastest.iteration_time_s
        )
        plan = (await stub.GetPlan(request, timeout=STEP_TIMEOUT_S)).plan
        clocks_mhz = {
            solver.Computation(stage, KIND_FROM_PROTO[c.kind], c.microbatch, c.chunk): c.clock_mhz
            for stage, planned in enumerate(plan.stages)
            for c in planned.computations
        }
        replayed = solver.replay(problem, clocks_mhz)
        late = solver.replay_with_latency(problem, replayed, frontier.set_latency_s)
        assert replayed.iteration_time_s <= 1.0001 * fastest.iteration_time_s
        planned_s, stock_s = job.min_planned_iteration_time_s, job.no_slowdown_time.iteration_time_s
        assert 0.9999 * fastest.iteration_time_s <= planned_s <= 1.0001 * stock_s
        most_j = frontier.baseline.energy_j
        assert late.energy_j <= 1.0001 * most_j
        if frontier.set_latency_s < _QUICK_SET_S:
            assert frontier.points[-1].energy_j < 0.95 * most_j
            assert late.energy_j < 0.97 * most_j or not self.case.has_slack

    async def check_identities(self, expected: Orders) -> None:
        """Check that iterations consisted of the expected computations, in order.

        Agents compare what trainers mark with the registered order, and a difference makes an iteration
        irregular: all of them, or those of one kind. A few are so for other reasons: they had begun when
        ranks joined, no energy was known yet, or a mark was lost on a busy machine.
        """
        assert self.registered() == expected
        stub = job_service_pb2_grpc.JobServiceStub(self.channel)
        request = job_service_pb2.GetReportRequest(job_id=self.observer.job_id)
        report = await stub.GetReport(request, timeout=STEP_TIMEOUT_S)
        counts = [(period.irregular_count, period.iteration_count) for period in report.periods]
        irregular_count, iteration_count = map(sum, zip(*counts, strict=True))
        assert iteration_count > 15, counts
        assert irregular_count <= 0.1 * iteration_count, counts


@asynccontextmanager
async def real_run(case: Case, folder: Path) -> AsyncIterator[RealRun]:
    """Train a case under coordinator and agents on loopback; the job finishes with the block, and then all
    GPUs are at stock.
    """
    async with services(case.nodes, folder / "logs") as (cluster, run_dir, channel):
        task = case.under(cluster, run_dir, folder / "attached")
        cluster.start_trainer("trainers", *case.command(task))
        observer = Observer(channel, task.job_id, Measurements(case.pipeline_count), lambda: None)
        run = RealRun(case, task, cluster, observer, channel)
        async with asyncio.TaskGroup() as group:
            watchers = [group.create_task(watching) for watching in (observer.follow(), _keep_watch(cluster))]
            yield run
            await asyncio.to_thread(cluster.stop_training)
            await observer.until(
                "the end of the job", lambda: observer.state == job_pb2.JOB_STATE_FINISHED, STEP_TIMEOUT_S
            )
            for watcher in watchers:
                watcher.cancel()
        await until_at_stock(case.nodes, cluster)


@asynccontextmanager
async def services(nodes: Workload, log_dir: Path) -> AsyncIterator[tuple[Cluster, Path, grpc.aio.Channel]]:
    """Run coordinator and agents; yield them, the folder of the run, and a channel to the coordinator."""
    with (
        tempfile.TemporaryDirectory(prefix="perseus-") as folder,
        Cluster(
            nodes,
            Path(folder),
            log_dir,
            guard_tolerance_percent=GUARD_TOLERANCE_PERCENT,
        ) as cluster,
    ):
        address = await asyncio.to_thread(cluster.start_coordinator)
        await asyncio.to_thread(cluster.start_agents, address)
        async with cluster.security.channels(address).open() as channel:
            yield cluster, Path(folder), channel
        await asyncio.to_thread(cluster.stop_services)


async def until_at_stock(nodes: Workload, cluster: Cluster) -> None:
    """Wait until all GPUs are at stock, which must happen soon after the trainers have gone."""
    deadline_s = time.monotonic() + STEP_TIMEOUT_S
    for rank in nodes.ranks:
        with closing(EmulatedGpu(cluster.gpu_file(*rank))) as gpu:
            while gpu.sm_clock_mhz() != nodes.gpu.highest_clock_mhz:
                assert time.monotonic() < deadline_s, f"GPU of {rank} (pipeline, stage): not at stock"
                await asyncio.sleep(_POLL_S)


async def _keep_watch(cluster: Cluster) -> None:
    while True:
        cluster.check()
        await asyncio.sleep(0.5)
