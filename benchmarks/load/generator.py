"""Agents by the thousand in one process: `python -m benchmarks.load.generator TASK`, a `Task` as JSON.

Each agent has a connection of its own, serves its ranks, follows offers and reports every rank once an
iteration; the agents' turns are spread evenly over it. The messages are serialised beforehand, and the
generator says how late it was itself. Its figures are one line of JSON on standard output.
"""

import asyncio
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import grpc
import numpy as np

from benchmarks.load import wire
from perseus.solver import Schedule, one_forward_one_backward
from perseus.v1 import agent_service_pb2 as pb
from perseus.v1 import computation_pb2, job_pb2, job_service_pb2, job_service_pb2_grpc, rank_pb2

_CONNECT = "/perseus.v1.AgentService/Connect"
_CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)

_PAST_START = rank_pb2.PLAN_REFUSAL_REASON_PAST_START
_JOIN_LIMIT_S = 120.0
_PLAN_LIMIT_S = 300.0
_OFFER_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Task:
    """What to load a server with. `server_pid`: whose CPU time is read. `is_echo`: it only echoes."""

    target: str
    server_pid: int
    is_echo: bool
    pipeline_count: int
    stage_count: int = 4
    microbatch_count: int = 10
    ranks_per_agent: int = 1
    period_s: float = 1.0
    measured_s: float = 20.0
    straggler_count: int = 0


@dataclass(slots=True)
class Figures:
    """What came of it. Latencies are from a batch's sending to its acknowledgement."""

    agent_count: int = 0
    rank_count: int = 0
    state: str = ""
    batch_count: int = 0
    acknowledged_count: int = 0
    latency_p50_s: float = 0.0
    latency_p99_s: float = 0.0
    lateness_p99_s: float = 0.0
    server_cpu_s: float = 0.0
    wall_s: float = 0.0
    straggler_answer_s: list[float] = field(default_factory=list)


class Bodies:
    """What the ranks of a stage say of an iteration, made once for all pipelines under the same clocks."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._made: dict[tuple[int, int, int, tuple[int, ...], int], bytes] = {}

    def get(self, stage: int, iteration: int, version: int, clocks: tuple[int, ...], since: int) -> bytes:
        """Made when it is first wanted; only those of the latest iterations are kept."""
        key = (iteration, stage, version, clocks, since)
        found = self._made.get(key)
        if found is None:
            order = self._schedule.orders[stage]
            is_one = len(clocks) == 1
            clocks_mhz = clocks * len(order) if is_one else clocks
            held = iteration - since + 1 if is_one else None
            found = self._made[key] = wire.stage_body(order, iteration, version, clocks_mhz, held)
            for old in [each for each in self._made if each[0] < iteration - 2]:
                del self._made[old]
        return found


@dataclass(slots=True)
class Rank:
    """One rank: what is in force, and what waits for its start iteration."""

    place: wire.Place
    prefix: bytes
    epoch: str = ""
    version: int = 0
    clocks: tuple[int, ...] = (0,)
    since: int = 0
    pending: pb.PlanOffer | None = None


class Agent:
    """One agent's stream."""

    def __init__(
        self, job_id: str, number: int, ranks: Sequence[Rank], bodies: Bodies, is_echo: bool
    ) -> None:
        self.ranks = ranks
        self.acknowledged = 0
        self.sequence = 0
        self.accepted = 0
        self.iteration = -1
        self.latencies_s: list[float] = []
        self.offered: Callable[[wire.Place], None] = lambda _: None
        self._job_id = job_id
        self._number = number
        self._bodies = bodies
        self._is_echo = is_echo
        self._by_place = {rank.place: rank for rank in ranks}
        self._sent_s: deque[tuple[int, float]] = deque()
        self._out: asyncio.Queue[bytes] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    async def connect(self, target: str) -> None:
        """Open the stream, and announce the ranks."""
        self._channel = grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
        self._call: grpc.aio.StreamStreamCall[bytes, bytes] = self._channel.stream_stream(_CONNECT)()
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]
        hello = pb.Hello(instance_id=f"load-{os.getpid()}-{self._number}", hostname="load")
        self._out.put_nowait(pb.ConnectRequest(hello=hello).SerializeToString())
        for rank in self.ranks:
            place = rank.place
            gpu = pb.Gpu(
                uuid=f"GPU-{place.pipeline}-{place.stage}",
                model="Loaded",
                supported_clocks_mhz=wire.CLOCKS_MHZ,
            )
            joined = pb.RankJoined(job_id=self._job_id, rank=place.to_proto(), gpu=gpu, iteration=-1)
            self._out.put_nowait(pb.ConnectRequest(rank_joined=joined).SerializeToString())

    def report(self, iteration: int) -> None:
        """Say that an iteration has ended on every rank, and that the next one begins."""
        self.iteration = iteration + 1
        for rank in self.ranks:
            self.sequence += 1
            body = self._bodies.get(rank.place.stage, iteration, rank.version, rank.clocks, rank.since)
            self._out.put_nowait(wire.telemetry(rank.prefix, body, self.sequence))
            self._sent_s.append((self.sequence, time.perf_counter()))
            if rank.pending is not None and rank.pending.start_iteration <= self.iteration:
                self._begin(rank, rank.pending)

    async def close(self) -> None:
        """Say goodbye."""
        self._out.put_nowait(pb.ConnectRequest(goodbye=pb.Goodbye(reason="done")).SerializeToString())
        await asyncio.sleep(0)
        for task in self._tasks:
            task.cancel()
        self._call.cancel()
        await self._channel.close()

    def _begin(self, rank: Rank, offer: pb.PlanOffer) -> None:
        rank.pending = None
        rank.epoch, rank.version, rank.since = offer.epoch, offer.version, self.iteration
        match offer.WhichOneof("clocks"):
            case "hold":
                rank.clocks = (offer.hold.clock_mhz,)
            case "stage_plan":
                rank.clocks = tuple(each.clock_mhz for each in offer.stage_plan.computations)
            case _:
                rank.clocks = (0,)
        in_force = pb.PlanInForce(
            job_id=self._job_id,
            rank=rank.place.to_proto(),
            epoch=offer.epoch,
            version=offer.version,
            iteration=self.iteration,
        )
        self._out.put_nowait(pb.ConnectRequest(plan_in_force=in_force).SerializeToString())

    async def _write(self) -> None:
        while True:
            await self._call.write(await self._out.get())

    async def _read(self) -> None:
        while True:
            answer = await self._call.read()
            if answer is grpc.aio.EOF:
                raise ConnectionError(f"agent {self._number}: the stream has ended")
            if self._is_echo:
                self._acknowledge(self._sent_s[0][0] if self._sent_s else 0)
                continue
            message = pb.ConnectResponse.FromString(cast(bytes, answer))
            match message.WhichOneof("message"):
                case "telemetry_ack":
                    self._acknowledge(message.telemetry_ack.sequence)
                case "rank_accepted":
                    self.accepted += 1
                case "rank_refused":
                    raise ConnectionError(f"agent {self._number}: {message.rank_refused.message}")
                case "plan_offer":
                    self._take_offer(message.plan_offer)

    def _acknowledge(self, sequence: int) -> None:
        now_s = time.perf_counter()
        while self._sent_s and self._sent_s[0][0] <= sequence:
            self.latencies_s.append(now_s - self._sent_s.popleft()[1])
            self.acknowledged += 1

    def _take_offer(self, offer: pb.PlanOffer) -> None:
        rank = self._by_place[wire.Place(offer.rank.pipeline, offer.rank.stage)]
        is_late = offer.start_iteration <= self.iteration and offer.version != rank.version
        answer = pb.PlanAnswer(
            job_id=self._job_id,
            rank=offer.rank,
            epoch=offer.epoch,
            version=offer.version,
            accepted=not is_late,
            refusal_reason=_PAST_START if is_late else rank_pb2.PLAN_REFUSAL_REASON_UNSPECIFIED,
            iteration=self.iteration,
        )
        self._out.put_nowait(pb.ConnectRequest(plan_answer=answer).SerializeToString())
        if not is_late:
            rank.pending = offer
            self.offered(rank.place)


class Load:
    """All agents of one job."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._job_id = f"load-{os.getpid()}"
        schedule = one_forward_one_backward(task.stage_count, task.microbatch_count)
        bodies = Bodies(schedule)
        ranks = [
            Rank(place := wire.Place(pipeline, stage), wire.rank_prefix(self._job_id, place))
            for pipeline in range(task.pipeline_count)
            for stage in range(task.stage_count)
        ]
        size = task.ranks_per_agent
        groups = [ranks[first : first + size] for first in range(0, len(ranks), size)]
        self.agents = [
            Agent(self._job_id, number, group, bodies, task.is_echo) for number, group in enumerate(groups)
        ]
        self._lateness_s: list[float] = []
        self._iteration = -1

    async def run(self) -> Figures:
        """Bring the job as far as it goes, then measure."""
        task, figures = self._task, Figures(len(self.agents), sum(len(a.ranks) for a in self.agents))
        async with grpc.aio.insecure_channel(task.target) as channel:
            jobs = job_service_pb2_grpc.JobServiceStub(channel)
            if not task.is_echo:
                await jobs.RegisterJob(self._registration())
            for agent in self.agents:
                await agent.connect(task.target)
                await asyncio.sleep(0.001)
            if not task.is_echo:
                await self._until(lambda: all(a.accepted == len(a.ranks) for a in self.agents), _JOIN_LIMIT_S)
            beating = asyncio.create_task(self._beat())
            if not task.is_echo:
                await self._until_planned(jobs)
            await self._measure(figures)
            for number in range(task.straggler_count):
                figures.straggler_answer_s.append(await self._straggle(jobs, number))
            if not task.is_echo:
                job = await jobs.GetJob(job_service_pb2.GetJobRequest(job_id=self._job_id))
                figures.state = job_pb2.JobState.Name(job.job.state)
            beating.cancel()
        return figures

    async def close(self) -> None:
        """Let all agents go."""
        await asyncio.gather(*(agent.close() for agent in self.agents), return_exceptions=True)

    def _registration(self) -> job_service_pb2.RegisterJobRequest:
        task = self._task
        return job_service_pb2.RegisterJobRequest(
            spec=job_pb2.JobSpec(
                job_id=self._job_id,
                parallelism=job_pb2.Parallelism(
                    pipeline_count=task.pipeline_count, stage_count=task.stage_count, tensor_count=1
                ),
                schedule=computation_pb2.Schedule(
                    named=computation_pb2.NamedSchedule(
                        name=computation_pb2.SCHEDULE_NAME_ONE_FORWARD_ONE_BACKWARD,
                        microbatch_count=task.microbatch_count,
                    )
                ),
            ),
            request_id=self._job_id,
        )

    async def _beat(self) -> None:
        """Every agent reports in its turn, over and over."""
        pace_s = self._task.period_s / len(self.agents)
        begun_s = time.perf_counter()
        for turn in range(sys.maxsize):
            iteration, number = divmod(turn, len(self.agents))
            due_s = begun_s + turn * pace_s
            if (wait_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            elif turn % 16 == 0:
                await asyncio.sleep(0)  # behind: let the others read and write all the same
            self._lateness_s.append(max(0.0, time.perf_counter() - due_s))
            self._iteration = iteration
            self.agents[number].report(iteration)

    async def _until(self, is_so: Callable[[], bool], limit_s: float) -> None:
        async with asyncio.timeout(limit_s):
            while not is_so():  # noqa: ASYNC110 - what it waits for is told by many
                await asyncio.sleep(0.1)

    async def _until_planned(self, jobs: "job_service_pb2_grpc.JobServiceAsyncStub") -> None:
        async with asyncio.timeout(_PLAN_LIMIT_S):
            while True:
                got = await jobs.GetJob(job_service_pb2.GetJobRequest(job_id=self._job_id))
                is_planned = got.job.state == job_pb2.JOB_STATE_PLANNED
                if is_planned and all(r.version and not r.pending for a in self.agents for r in a.ranks):
                    return
                await asyncio.sleep(1.0)

    async def _measure(self, figures: Figures) -> None:
        for agent in self.agents:
            agent.latencies_s.clear()
        self._lateness_s.clear()
        sent, acknowledged = self._counts()
        cpu_s, begun_s = _cpu_s(self._task.server_pid), time.perf_counter()
        await asyncio.sleep(self._task.measured_s)
        figures.server_cpu_s = _cpu_s(self._task.server_pid) - cpu_s
        figures.wall_s = time.perf_counter() - begun_s
        now_sent, now_acknowledged = self._counts()
        figures.batch_count = now_sent - sent
        figures.acknowledged_count = now_acknowledged - acknowledged
        latencies_s = np.concatenate([agent.latencies_s for agent in self.agents])
        figures.latency_p50_s, figures.latency_p99_s = np.quantile(latencies_s, [0.5, 0.99]).tolist()
        figures.lateness_p99_s = float(np.quantile(self._lateness_s, 0.99))

    async def _straggle(self, jobs: "job_service_pb2_grpc.JobServiceAsyncStub", number: int) -> float:
        """Seconds from a report to the last offer that it leads to; cleared again afterwards."""
        offered_s: list[float] = []

        def note(place: wire.Place) -> None:
            if place.pipeline > 0:
                offered_s.append(time.perf_counter())

        for agent in self.agents:
            agent.offered = note
        begun_s = time.perf_counter()
        report = job_service_pb2.ReportStragglerRequest(
            job_id=self._job_id, pipeline=0, slowdown_factor=1.3 + 0.1 * number
        )
        await jobs.ReportStraggler(report)
        quiet_s = 2 * self._task.period_s  # it is over once nothing more comes
        async with asyncio.timeout(_OFFER_LIMIT_S):
            while not offered_s or time.perf_counter() - offered_s[-1] < quiet_s:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        answer_s = offered_s[-1] - begun_s
        clear = job_service_pb2.ClearStragglerRequest(job_id=self._job_id, pipeline=0)
        await jobs.ClearStraggler(clear)
        await asyncio.sleep(5 * self._task.period_s)
        return answer_s

    def _counts(self) -> tuple[int, int]:
        return sum(a.sequence for a in self.agents), sum(a.acknowledged for a in self.agents)


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _main(task: Task) -> None:
    load = Load(task)
    try:
        print(json.dumps(asdict(await load.run())), flush=True)
    finally:
        await load.close()


if __name__ == "__main__":
    asyncio.run(_main(Task(**json.loads(sys.argv[1]))))
