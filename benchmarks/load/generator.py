"""Thousands of agents in one process: `python -m benchmarks.load.generator HOST:PORT`.

It takes commands, one line of JSON each, from standard input, and answers each by a line on standard output:
`{"command": NAME, …}` calls the method of that name below. `benchmarks.load.control` is the other side.
Messages are serialised beforehand, and the generator reports its own lateness.
"""

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks.load.agents import Agent, Findings
from benchmarks.load.job import Job, JobTask, channel, until
from perseus.tls.channels import Channels
from perseus.v1 import job_service_pb2, job_service_pb2_grpc

_FIND_TIMEOUT_S, _FIND_PAUSE_S = 2.0, 0.2
_JOIN_LIMIT_S = 120.0
_REPORTED_TOGETHER = 8
"""Agents that report their power at the same moment."""


@dataclass(slots=True)
class Figures:
    """The figures of a time span. Latencies are from sending a batch to its acknowledgement."""

    agent_count: int
    rank_count: int
    batch_count: int
    acknowledged_count: int
    latency_p50_s: float
    latency_p99_s: float
    latency_max_s: float
    lateness_p99_s: float
    server_cpu_s: float
    generator_cpu_s: float
    wall_s: float


@dataclass(slots=True)
class RetryPolicy:
    """Seconds from a time until all were connected, welcomed, joined, and had resent batches acknowledged."""

    connected_s: float
    welcomed_s: float
    joined_s: float
    resent_s: float


class Generator:
    """The commands. Each returns a JSON value."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._channels = Channels(target)
        self._open()
        self._jobs: dict[str, Job] = {}
        self._findings = Findings()
        self._nudges: set[asyncio.Task[None]] = set()

    def _open(self) -> None:
        self._channel = channel(self._channels.address)
        self._stub = job_service_pb2_grpc.JobServiceStub(self._channel)

    async def find(self, job_id: str, limit_s: float) -> None:
        """Find the one of several coordinators that serves a job, which need not be registered."""
        ends_s = time.monotonic() + limit_s
        while True:
            try:
                request = job_service_pb2.GetJobRequest(job_id=job_id)
                await self._stub.GetJob(request, timeout=_FIND_TIMEOUT_S)
                return
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return
                if time.monotonic() > ends_s:
                    raise
                is_round_over = self._channels.move_on(error)
                await self._channel.close()
                self._open()
                if is_round_over:
                    await asyncio.sleep(_FIND_PAUSE_S)

    async def leave_silent(self) -> None:
        """Let the agents leave a coordinator that does not answer."""
        for agent in self._agents():
            agent.leave_if_silent(self._target)

    async def add(self, **task: Any) -> None:
        """Register a job, connect its agents, and let them report."""
        job = self._jobs[task["job_id"]] = Job(JobTask(**task), self._findings)
        await job.join(self._stub, self._target, _JOIN_LIMIT_S)
        job.start()
        gc.collect()
        gc.freeze()  # garbage collections need not scan thousands of permanent agents

    async def planned(self, job_id: str, limit_s: float) -> None:
        await self._jobs[job_id].planned(self._stub, limit_s)

    async def state(self, job_id: str) -> str:
        return await self._jobs[job_id].state(self._stub)

    async def entered(self, job_id: str, state: str, limit_s: float) -> None:
        """Wait until a job is in a state."""
        async with asyncio.timeout(limit_s):
            while await self.state(job_id) != state:  # noqa: ASYNC110 - the coordinator is asked
                await asyncio.sleep(0.5)

    async def thinned(self, job_id: str) -> int:
        """Return how many of a job's batches were thinned."""
        return await self._jobs[job_id].thinned_count(self._stub)

    async def set_period(self, job_id: str, period_s: float) -> None:
        """Let each rank of a job report once per this period."""
        self._jobs[job_id].set_period(period_s)

    async def measure(self, seconds: float, server_pid: int) -> dict[str, Any]:
        """Measure for a while."""
        agents = list(self._agents())
        for agent in agents:
            agent.latencies_s.clear()
        for job in self._jobs.values():
            job.lateness_s.clear()
        sent, acknowledged = _counts(agents)
        cpu_s, own_cpu_s, begun_s = _cpu_s(server_pid), time.process_time(), time.perf_counter()
        await asyncio.sleep(seconds)
        now_sent, now_acknowledged = _counts(agents)
        figures = Figures(
            agent_count=len(agents),
            rank_count=sum(len(agent.ranks) for agent in agents),
            batch_count=now_sent - sent,
            acknowledged_count=now_acknowledged - acknowledged,
            latency_p50_s=0.0,
            latency_p99_s=0.0,
            latency_max_s=0.0,
            lateness_p99_s=0.0,
            server_cpu_s=_cpu_s(server_pid) - cpu_s,
            generator_cpu_s=time.process_time() - own_cpu_s,
            wall_s=time.perf_counter() - begun_s,
        )
        latencies_s = np.concatenate([agent.latencies_s for agent in agents])
        if latencies_s.size:
            quantiles = np.quantile(latencies_s, [0.5, 0.99, 1.0]).tolist()
            figures.latency_p50_s, figures.latency_p99_s, figures.latency_max_s = quantiles
        lateness_s = np.concatenate([job.lateness_s for job in self._jobs.values()])
        figures.lateness_p99_s = float(np.quantile(lateness_s, 0.99)) if lateness_s.size else 0.0
        return asdict(figures)

    async def report_power(self, seconds: float, server_pid: int, power_w: float | None) -> dict[str, float]:
        """Let all agents report power once a second, or nothing; return the server's cost."""
        agents = list(self._agents())
        reported = 0
        cpu_s, begun_s = _cpu_s(server_pid), time.perf_counter()
        while (second := time.perf_counter() - begun_s) < seconds:
            for number, agent in enumerate(agents if power_w is not None else ()):
                agent.report_power(power_w or 0.0)
                reported += 1
                if number % _REPORTED_TOGETHER == 0:
                    await asyncio.sleep(0.9 * _REPORTED_TOGETHER / len(agents))
            await asyncio.sleep(max(0.0, 1.0 - (time.perf_counter() - begun_s - second)))
        wall_s = time.perf_counter() - begun_s
        return {"message_count": reported, "server_cpu_s": _cpu_s(server_pid) - cpu_s, "wall_s": wall_s}

    async def straggle(self, job_id: str, factor: float, quiet_s: float) -> dict[str, Any]:
        return asdict(await self._jobs[job_id].straggle(self._stub, factor, quiet_s))

    async def clear(self, job_id: str) -> None:
        await self._jobs[job_id].clear(self._stub)

    async def straggler(self, job_id: str, factor: float) -> None:
        """Report pipeline 0 slow, or no longer slow (factor 0), once the coordinator answers; don't wait."""
        task = asyncio.create_task(self._jobs[job_id].set_straggler(self._stub, factor))
        self._nudges.add(task)
        task.add_done_callback(self._nudges.discard)

    async def slow(self, job_id: str, factor: float) -> None:
        """Report pipeline 0 slow, or no longer slow (factor 0), and wait for the answer."""
        await self._jobs[job_id].set_straggler(self._stub, factor)

    async def back(self, since_s: float, limit_s: float) -> dict[str, Any]:
        """Wait until all agents are back on streams opened after a time of the monotonic clock."""
        agents = list(self._agents())

        def missing() -> list[Agent]:
            return [a for a in agents if not (a.back.opened_s >= since_s and a.is_joined and a.back.resent_s)]

        try:
            await until(lambda: not missing(), limit_s, "all agents back")
        except TimeoutError as error:
            some = [f"{agent.instance_id} {agent.standing}" for agent in missing()[:5]]
            raise TimeoutError(f"{error}: {len(missing())} of {len(agents)} are not: {some}") from None
        retry = RetryPolicy(
            max(a.back.opened_s for a in agents) - since_s,
            max(a.back.welcomed_s for a in agents) - since_s,
            max(a.back.joined_s for a in agents) - since_s,
            max(a.back.resent_s for a in agents) - since_s,
        )
        return asdict(retry)

    async def rest(self, limit_s: float, job_id: str | None = None) -> None:
        """Pause one job or all, once everything is acknowledged and every straggler report has arrived."""
        await asyncio.gather(*self._nudges)
        jobs = self._jobs.values() if job_id is None else [self._jobs[job_id]]
        await asyncio.gather(*(job.rest(limit_s) for job in jobs))

    async def account(self, job_id: str) -> dict[str, Any]:
        """Compare a paused job's report with its acknowledged batches."""
        return asdict(await self._jobs[job_id].account(self._stub))

    async def finish(self, job_id: str) -> None:
        """End a paused job."""
        await self._jobs.pop(job_id).finish(self._stub)

    async def counts(self, job_id: str) -> dict[str, int]:
        """Return a job's counts of sent, acknowledged and waiting batches."""
        job = self._jobs[job_id]
        agents = job.agents
        sent, acknowledged = _counts(agents)
        waiting = sum(agent.unacknowledged_count for agent in agents)
        connections = sum(agent.connection_count for agent in agents)
        return {
            "sent": sent,
            "acknowledged": acknowledged,
            "waiting": waiting,
            "connections": connections,
            "ranks": len(job.ranks),
            "versions": sum(rank.version_count for rank in job.ranks),
        }

    async def findings(self) -> dict[str, Any]:
        """Return the coordinator's violations."""
        return asdict(self._findings)

    async def close(self) -> None:
        """Drop all connections."""
        for task in self._nudges:
            task.cancel()
        for job in self._jobs.values():
            job.close()
        await self._channel.close()

    def _agents(self) -> Iterable[Agent]:
        return (agent for job in self._jobs.values() for agent in job.agents)


def _counts(agents: Iterable[Agent]) -> tuple[int, int]:
    some = list(agents)
    return sum(agent.sequence for agent in some), sum(agent.acknowledged for agent in some)


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process so far, including its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _main(target: str) -> None:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    generator = Generator(target)
    try:
        while line := await lines.readline():
            arguments = json.loads(line)
            method: Callable[..., Awaitable[Any]] = getattr(generator, arguments.pop("command"))
            try:
                answer = {"answer": await method(**arguments)}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)
    finally:
        await generator.close()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
