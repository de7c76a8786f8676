"""Repeated launches under one job identifier, with one coordinator and its agents, and the time of each.

Each launch measures stock itself: its first iterations run on the same emulated GPUs, by the same processes,
without an agent (`restart_trainer`). All later iterations are compared with that, except those of the stock
baseline and of profiling, which have their own budget.
"""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import BinaryIO

import grpc.aio

from perseus.agent.link.computation import Kind
from perseus.demo.cluster import Cluster
from perseus.demo.trainer import STOP_FILE
from perseus.demo.workload import Workload
from perseus.emulation.physics import A100_SXM, Work
from perseus.v1 import job_pb2, job_service_pb2, job_service_pb2_grpc, rank_pb2
from tests.frameworks.case_table import CaseResult
from tests.frameworks.real_run import until_at_stock
from tests.frameworks.restart_plan import MAX_RANKS, Launch, Layout, launches
from tests.frameworks.restart_trainer import RAMP_FILE, STOCK_ITERATIONS, report_file
from tests.frameworks.trainers import TrainerTask

JOB_ID = "restarted"
GPU = A100_SXM.with_clocks(4)
_FORWARD_S, _BACKWARD_S, _MEMORY_SHARE = 0.008, 0.016, 0.2  # of each layer, at the highest clock
_WORK = Work(compute_s=1.0, memory_s=0.0)
NODES = Workload(JOB_ID, 2, (1.0,) * 4, 1, _WORK, _WORK, 0.0, GPU)

MAX_SLOWDOWN_PERCENT = 2.0
PLAN_TIMEOUT_S = 240.0
WATCHED = 15
_END_TIMEOUT_S = 30.0
_POLL_S = 0.1
_RPC_TIMEOUT_S = 10.0
# Starting processes, and the call that registers the job, have nothing to do with clocks.
_WARMING_UP = 3
# A clock that profiling holds is released at the begin of a slightly later iteration.
_LETTING_GO = 3
_STANDSTILL = 1.5  # times the median
_MEASURING = (job_pb2.JOB_STATE_BASELINE, job_pb2.JOB_STATE_PROFILING)


@dataclass(frozen=True, slots=True)
class Reported:
    """An iteration from a rank's report; `energy_j` is its GPU's counter at the end."""

    begin_s: float
    end_s: float
    energy_j: float
    microbatch_count: int
    losses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Iterations evaluated together: their number, median time, and all GPUs' mean energy with its error."""

    iteration_count: int
    time_s: float
    energy_j: float
    energy_se_j: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a launch. `unplanned`: outside of baseline and profiling, but before its plan."""

    launch: Launch
    run_number: int
    stock: Stretch
    unplanned: Stretch | None
    planned: Stretch | None
    planned_after_s: float | None
    losses_are_equal: bool

    @property
    def slowdowns_percent(self) -> dict[str, float]:
        """Slowdowns of the counted stretches, against stock."""
        stretches = {"before its plan": self.unplanned, "under its plan": self.planned}
        return {
            name: 100 * (some.time_s / self.stock.time_s - 1)
            for name, some in stretches.items()
            if some is not None
        }

    @property
    def saving_percent(self) -> float | None:
        """Energy saving of an iteration under the plan, against stock."""
        return None if self.planned is None else 100 * (1 - self.planned.energy_j / self.stock.energy_j)

    @property
    def saving_error_percent(self) -> float:
        """Standard error of the saving: a launch has few iterations at stock."""
        if self.planned is None:
            return 0.0
        stretches = self.planned, self.stock
        relative = math.hypot(*(some.energy_se_j / some.energy_j for some in stretches))
        return 100 * relative * self.planned.energy_j / self.stock.energy_j

    def __str__(self) -> str:
        reported = [f"{self.launch}: run {self.run_number}, stock {self.stock.time_s:.4f} s"]
        reported += [f"{percent:+.2f} % {name}" for name, percent in self.slowdowns_percent.items()]
        if self.saving_percent is not None:
            error = f"± {self.saving_error_percent:.1f}"
            reported.append(
                f"{-self.saving_percent:+.1f} {error} % energy, planned after {self.planned_after_s:.1f} s"
            )
        return ", ".join(reported)


class Job:
    """The job under its coordinator, launch by launch."""

    def __init__(self, cluster: Cluster, folder: Path, channel: grpc.aio.Channel) -> None:
        self._cluster = cluster
        self._folder = folder
        self._jobs = job_service_pb2_grpc.JobServiceStub(channel)
        self._seen: list[tuple[float, int, int]] = []
        """(time, run, state) from the coordinator, polled repeatedly."""

    async def launch(self, launch: Launch, ramp: Sequence[int] = ()) -> list[Outcome]:
        """Train a launch and end it, then train as much again without Perseus to compare the losses.

        `ramp`: further numbers of microbatches during training, each after the previous plan was measured.
        There is an outcome for each number.
        """
        folder = self._folder / f"launch-{launch.number}"
        folder.mkdir()
        task = self._task(launch.layout, folder)
        self._seen = []
        planned_s: list[float | None] = []
        with (folder / "trainers.log").open("wb") as log:
            trainers = start_trainers(task, log)
            try:
                for count in (launch.layout.microbatch_count, *ramp):
                    if planned_s:
                        (folder / RAMP_FILE).write_text(str(count))
                    leg = replace(launch, layout=replace(launch.layout, microbatch_count=count))
                    planned_s.append(await self._watch(leg, folder, trainers))
                if not launch.is_killed:
                    (folder / STOP_FILE).touch()
                    assert await asyncio.to_thread(trainers.wait, _END_TIMEOUT_S) == 0
            finally:
                if trainers.poll() is None:
                    os.killpg(trainers.pid, signal.SIGKILL)
                    await asyncio.to_thread(trainers.wait)
        await until_at_stock(NODES, self._cluster)
        ranks = [(p, s) for p in range(task.pipeline_count) for s in range(task.stage_count)]
        reported = {rank: read_report(report_file(folder, *rank)) for rank in ranks}
        are_equal = await asyncio.to_thread(self._losses_are_equal, task, folder, reported)
        return [
            self._outcome(launch, leg, when_s, are_equal)
            for leg, when_s in zip(legs(list(reported.values())), planned_s, strict=True)
        ]

    async def _watch(self, launch: Launch, folder: Path, trainers: subprocess.Popen[bytes]) -> float | None:
        """Wait until the end of a launch; return when all its ranks had its plan."""
        first, planned_s = report_file(folder, 0, 0), None
        begun = len(read_report(first))
        enough: int | None = None
        if launch.short_iterations is not None:
            enough = begun + STOCK_ITERATIONS + launch.short_iterations
        deadline_s = time.monotonic() + PLAN_TIMEOUT_S
        while enough is None or len(read_report(first)) < enough:
            is_planned = await self._is_planned(launch.layout)
            if planned_s is None and is_planned:
                planned_s = time.monotonic()
                enough = enough or len(read_report(first)) + _LETTING_GO + WATCHED
            assert trainers.poll() is None, f"the trainers have ended, see {folder}"
            assert time.monotonic() < deadline_s, f"{launch}: {await self._why()}"
            await asyncio.sleep(_POLL_S)
        await self._is_planned(launch.layout)
        return planned_s

    async def _is_planned(self, layout: Layout) -> bool:
        """Record the job's state; return whether all ranks of this layout have its plan."""
        try:
            request = job_service_pb2.GetJobRequest(job_id=JOB_ID)
            job = (await self._jobs.GetJob(request, timeout=_RPC_TIMEOUT_S)).job
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            return False
        self._seen.append((time.monotonic(), job.run_number, job.state))
        lengths = [len(stage.computations) for stage in job.spec.schedule.explicit.stages]
        if job.state != job_pb2.JOB_STATE_PLANNED or lengths != layout.stage_count * [
            2 * layout.microbatch_count
        ]:
            return False
        ask = job_service_pb2.ListRanksRequest(job_id=JOB_ID)
        ranks = (await self._jobs.ListRanks(ask, timeout=_RPC_TIMEOUT_S)).ranks
        return len(ranks) == layout.pipeline_count * layout.stage_count and all(
            rank.state == rank_pb2.RANK_STATE_CONNECTED and rank.in_force_version == rank.offered_version > 0
            for rank in ranks
        )

    async def _why(self) -> str:
        """Return the coordinator's reason why the job isn't planned."""
        job = (
            await self._jobs.GetJob(job_service_pb2.GetJobRequest(job_id=JOB_ID), timeout=_RPC_TIMEOUT_S)
        ).job
        return f"expected a plan, found {job_pb2.JobState.Name(job.state)}: {job.state_reason}"

    def _task(self, layout: Layout, folder: Path) -> TrainerTask:
        pipelines, stages = range(layout.pipeline_count), range(layout.stage_count)
        times_s = {Kind.FORWARD: _FORWARD_S, Kind.BACKWARD: _BACKWARD_S}
        return TrainerTask(
            run_dir=str(folder),
            losses_dir=str(folder),
            job_id=JOB_ID,
            schedule="1F1B",
            pipeline_count=layout.pipeline_count,
            stage_count=layout.stage_count,
            chunk_count=1,
            microbatch_count=layout.microbatch_count,
            iteration_count=0,
            sockets=[str(self._cluster.socket(pipeline)) for pipeline in pipelines],
            gpu_files=[
                [str(self._cluster.gpu_file(pipeline, stage)) for stage in stages] for pipeline in pipelines
            ],
            works=[
                [
                    (int(kind), 0, (1 - _MEMORY_SHARE) * time_s * count, _MEMORY_SHARE * time_s * count, 0.9)
                    for kind, time_s in times_s.items()
                ]
                for count in layout.layers
            ],
            layers=layout.layers,
        )

    def _losses_are_equal(
        self, task: TrainerTask, folder: Path, reported: dict[tuple[int, int], list[Reported]]
    ) -> bool:
        """Whether as many iterations without Perseus have the same losses, bit for bit."""
        alone = folder / "alone"
        alone.mkdir()
        count = min(len(iterations) for iterations in reported.values())
        counts = [each.microbatch_count for each in reported[0, 0][:count]]
        (alone / RAMP_FILE).write_text(json.dumps(counts))
        without = TrainerTask(
            run_dir=str(alone),
            losses_dir=str(alone),
            job_id=JOB_ID,
            schedule=task.schedule,
            pipeline_count=task.pipeline_count,
            stage_count=task.stage_count,
            chunk_count=1,
            microbatch_count=task.microbatch_count,
            iteration_count=0,
            layers=task.layers,
        )
        with (alone / "trainers.log").open("wb") as log:
            assert start_trainers(without, log).wait() == 0
        return all(
            [each.losses for each in read_report(report_file(alone, *rank))]
            == [each.losses for each in reported[rank][:count]]
            for rank in reported
        )

    def _outcome(
        self,
        launch: Launch,
        reported: Sequence[Sequence[Reported]],
        planned_s: float | None,
        losses_are_equal: bool,
    ) -> Outcome:
        first = reported[0]
        is_measuring = [self._is_measuring(each) for each in first]
        counting = [
            index
            for index in range(STOCK_ITERATIONS + _WARMING_UP, len(first))
            if not any(is_measuring[index - _LETTING_GO : index + 1])
        ]
        until_s = float("inf") if planned_s is None else planned_s
        stock = stretch(reported, range(_WARMING_UP, STOCK_ITERATIONS))
        assert stock is not None
        return Outcome(
            replace(launch, layout=replace(launch.layout, microbatch_count=first[0].microbatch_count)),
            max(run for at_s, run, _ in self._seen if at_s <= first[-1].end_s),
            stock,
            stretch(reported, [index for index in counting if first[index].end_s < until_s]),
            stretch(reported, [index for index in counting if first[index].begin_s >= until_s]),
            None if planned_s is None else planned_s - first[STOCK_ITERATIONS].begin_s,
            losses_are_equal,
        )

    def _is_measuring(self, iteration: Reported) -> bool:
        """Whether baseline or profiling was observed at any time of an iteration."""
        begin_s, end_s = iteration.begin_s - 2 * _POLL_S, iteration.end_s + 2 * _POLL_S
        return any(begin_s <= at_s <= end_s and state in _MEASURING for at_s, _, state in self._seen)


def legs(reported: Sequence[Sequence[Reported]]) -> list[list[Sequence[Reported]]]:
    """Split all ranks' reports at changes of the number of microbatches."""
    count = min(map(len, reported))
    first = reported[0][:count]
    cuts = [i for i in range(1, count) if first[i].microbatch_count != first[i - 1].microbatch_count]
    return [[rank[begin:end] for rank in reported] for begin, end in pairwise([0, *cuts, count])]


def stretch(reported: Sequence[Sequence[Reported]], indices: Sequence[int]) -> Stretch | None:
    """Return these iterations' figures, by the first rank's clock and all counters; None for too few."""
    if len(indices) < 3:
        return None
    times_s = [reported[0][index].end_s - reported[0][index].begin_s for index in indices]
    time_s = median(times_s)
    # Counters are updated every 100 ms and say little about single iterations, so means count. An iteration
    # in which the machine stalled for seconds has nothing to do with clocks.
    usual = [i for i, each_s in zip(indices, times_s, strict=True) if each_s <= _STANDSTILL * time_s]
    energies_j = [sum(rank[i].energy_j - rank[i - 1].energy_j for rank in reported) for i in usual]
    error_j = stdev(energies_j) / math.sqrt(len(energies_j)) if len(energies_j) > 1 else math.inf
    return Stretch(len(indices), time_s, fmean(energies_j), error_j)


def read_report(file: Path) -> list[Reported]:
    """Return a rank's iterations so far, without a line that a kill truncated."""
    if not file.exists():
        return []
    lines = file.read_text().split("\n")[:-1]
    reported = [
        Reported(begin_s, end_s, energy_j, count, tuple(losses))
        for begin_s, end_s, energy_j, count, losses in map(json.loads, lines)
    ]
    assert all(before.end_s <= after.begin_s for before, after in pairwise(reported))
    return reported


def start_trainers(task: TrainerTask, log: BinaryIO) -> subprocess.Popen[bytes]:
    """Start all ranks in their own process group."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.frameworks.restart_trainer", task.to_json()],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


async def check_launches(count: int, seed: int, folder: Path) -> list[Outcome]:
    """Check launches in sequence: none is more than 2 % slower than stock, every long one is planned."""
    outcomes: list[Outcome] = []
    async with restarted_job(folder) as job:
        for launch in launches(count, seed):
            (outcome,) = await job.launch(launch)
            print(outcome, flush=True)
            outcomes.append(outcome)
    check_outcomes(outcomes)
    return outcomes


async def check_ramp(counts: Sequence[int], folder: Path) -> list[Outcome]:
    """Check a training whose number of microbatches grows, with the same criteria for each."""
    launch = Launch(0, "nothing", Layout(1, (1, 2, 3), counts[0]), None, is_killed=False)
    async with restarted_job(folder) as job:
        outcomes = await job.launch(launch, counts[1:])
    print(*outcomes, sep="\n", flush=True)
    check_outcomes(outcomes)
    return outcomes


def check_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Check that none is more than 2 % slower than stock, losses are equal, every long one is planned, none
    certainly costs energy, and together they save."""
    too_slow = [
        str(each)
        for each in outcomes
        if max(each.slowdowns_percent.values(), default=0.0) > MAX_SLOWDOWN_PERCENT
    ]
    assert not too_slow, "\n".join(too_slow)
    assert [str(each) for each in outcomes if not each.losses_are_equal] == []
    long = [each for each in outcomes if each.launch.short_iterations is None]
    assert [str(each) for each in long if each.planned is None] == []
    savings = [(each, each.saving_percent) for each in outcomes if each.saving_percent is not None]
    assert [str(each) for each, percent in savings if percent + 2 * each.saving_error_percent < 0] == []
    assert fmean(percent for _, percent in savings) > 1


@asynccontextmanager
async def restarted_job(folder: Path) -> AsyncIterator[Job]:
    """Run coordinator and agents for the largest number of ranks of a launch."""
    assert len(NODES.ranks) >= MAX_RANKS
    with (
        tempfile.TemporaryDirectory(prefix="perseus-") as run_dir,
        Cluster(
            NODES, Path(run_dir), folder / "logs", guard_tolerance_percent=MAX_SLOWDOWN_PERCENT / 2
        ) as cluster,
    ):
        address = await asyncio.to_thread(cluster.start_coordinator)
        await asyncio.to_thread(cluster.start_agents, address)
        async with cluster.security.channels(address).open() as channel:
            yield Job(cluster, folder, channel)
        await asyncio.to_thread(cluster.stop_services)


def keep_launches(outcomes: Sequence[Outcome], name: str, position: int) -> None:
    """Write the result of a sequence of launches: the means of the planned ones. A single launch has few
    iterations at stock, and a counter that is updated every 100 ms, so its energy says little."""
    planned = [(each.stock, each.planned) for each in outcomes if each.planned is not None]
    slowest_percent = max(100 * (plan.time_s / stock.time_s - 1) for stock, plan in planned)
    killed_count = sum(each.launch.is_killed for each in outcomes)
    layouts = [each.launch.layout for each in outcomes]
    CaseResult(
        name,
        position,
        "torch, 1F1B, restarts with random changes",
        f"up to {max(each.pipeline_count for each in layouts)} × {max(each.stage_count for each in layouts)}",
        fmean(stock.time_s for stock, _ in planned),
        fmean(plan.time_s for _, plan in planned),
        fmean(stock.energy_j for stock, _ in planned),
        fmean(plan.energy_j for _, plan in planned),
        sum(plan.iteration_count for _, plan in planned),
        losses_are_equal=all(each.losses_are_equal for each in outcomes),
        note=f"{len(outcomes)} in sequence, {killed_count} killed, {len(planned)} planned; "
        f"their means, the slowest {slowest_percent:+.1f} %",
    ).keep()


def keep_ramp(outcomes: Sequence[Outcome], name: str, position: int) -> None:
    """Write the result of a ramp, for its last number of microbatches."""
    last = outcomes[-1]
    assert last.planned is not None
    counts = " to ".join(str(each.launch.layout.microbatch_count) for each in outcomes)
    layout = last.launch.layout
    CaseResult(
        name,
        position,
        "torch, 1F1B, a ramp",
        f"{layout.pipeline_count} × {layout.stage_count}",
        last.stock.time_s,
        last.planned.time_s,
        last.stock.energy_j,
        last.planned.energy_j,
        last.planned.iteration_count,
        losses_are_equal=last.losses_are_equal,
        note=f"{counts} microbatches; the last",
    ).keep()
