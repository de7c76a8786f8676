"""One job under load: all its agents, their reporting period, and the checks of its final report."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc
import numpy as np
from numpy.typing import NDArray

from benchmarks.load import wire
from benchmarks.load.agents import Agent, Bodies, Findings, Rank
from perseus.solver import one_forward_one_backward
from perseus.v1 import computation_pb2, job_pb2, job_service_pb2, job_service_pb2_grpc

Jobs: TypeAlias = "job_service_pb2_grpc.JobServiceAsyncStub"

_WAKE_S = 0.002
"""Shortest sleep between two checks of due agents: below it, sleeping costs more than the work."""
_CALL_TIMEOUT_S = 60.0
_OFFER_LIMIT_S = 30.0
_RETRY_S = 0.1
_TRANSIENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL)


@dataclass(frozen=True, slots=True)
class JobTask:
    """One job's size and reporting period. Each rank reports once a period."""

    job_id: str
    pipeline_count: int
    stage_count: int = 4
    microbatch_count: int = 10
    ranks_per_agent: int = 1
    period_s: float = 1.0
    reconnect_within_s: float = 1.0
    is_echo: bool = False
    slot: int = 0
    """The slot of the fleet's jobs that it belongs to."""


@dataclass(slots=True)
class StragglerAnswer:
    """Seconds from a report to the first offer at each other pipeline that gets one.

    `late_count`: pipelines where that came after its start iteration had begun, so that another one follows.
    """

    offer_s: list[float] = field(default_factory=list)
    late_count: int = 0
    pipeline_count: int = 0


@dataclass(slots=True)
class Account:
    """A report compared with the acknowledged batches.

    `expected_count`: iterations within the report's periods whose rows all ranks sent under the same versions
    as those of the previous one; `counted_count`: the count in the periods; `outside`: such iterations in no
    period.
    """

    iteration_count: int = 0
    expected_count: int = 0
    counted_count: int = 0
    outside: list[int] = field(default_factory=list)
    short_periods: list[str] = field(default_factory=list)
    energy_error: float = 0.0
    """The largest relative difference of a period's energy, among periods with an equal count."""


class Job:
    """A job, its agents and their reporting period."""

    def __init__(self, task: JobTask, findings: Findings) -> None:
        self.task = task
        self._findings = findings
        bodies = Bodies(one_forward_one_backward(task.stage_count, task.microbatch_count))
        self.ranks = [
            Rank(task.job_id, wire.Place(pipeline, stage))
            for pipeline in range(task.pipeline_count)
            for stage in range(task.stage_count)
        ]
        size = task.ranks_per_agent
        self.agents = [
            Agent(
                f"{task.job_id}-{number}",
                self.ranks[first : first + size],
                bodies,
                findings,
                task.reconnect_within_s,
                task.is_echo,
                task.slot,
            )
            for number, first in enumerate(range(0, len(self.ranks), size))
        ]
        self.lateness_s: list[float] = []
        self._beating: asyncio.Task[None] | None = None
        self._has_to_rest = False
        self._period_s = task.period_s
        self._next_s = 0.0

    async def join(self, jobs: Jobs, target: str, limit_s: float) -> None:
        """Register it, and connect all agents."""
        if not self.task.is_echo:
            await jobs.RegisterJob(self._registration(), timeout=_CALL_TIMEOUT_S)
        for agent in self.agents:
            agent.connect(target)
            await asyncio.sleep(0.001)
        await until(lambda: all(agent.is_joined for agent in self.agents), limit_s, "all ranks joined")

    def start(self) -> None:
        """Let all agents report from now on."""
        self._has_to_rest = False
        self._beating = asyncio.get_running_loop().create_task(self._heartbeat())

    async def rest(self, limit_s: float) -> None:
        """Stop after an iteration that all ranks have reported, and wait until everything is acknowledged."""
        self._has_to_rest = True
        if self._beating is not None:
            await self._beating
            self._beating = None
        await until(
            lambda: not any(agent.unacknowledged_count for agent in self.agents), limit_s, "all acknowledged"
        )

    async def planned(self, jobs: Jobs, limit_s: float) -> None:
        """Wait until it is planned and no rank waits for a start iteration."""
        ends_s = time.monotonic() + limit_s
        while True:
            state = await self.state(jobs)
            waiting_count = sum(not rank.version or rank.pending is not None for rank in self.ranks)
            if state == "JOB_STATE_PLANNED" and not waiting_count:
                return
            if time.monotonic() > ends_s:
                unanswered_count = sum(agent.unacknowledged_count for agent in self.agents)
                raise TimeoutError(
                    f"{self.task.job_id} is {state} after {limit_s:g} s, {waiting_count} of "
                    f"{len(self.ranks)} ranks under no plan, {unanswered_count} batches unanswered"
                )
            await asyncio.sleep(0.5)

    async def state(self, jobs: Jobs) -> str:
        """Return the name of its state."""
        return job_pb2.JobState.Name((await self._get(jobs)).state)

    async def thinned_count(self, jobs: Jobs) -> int:
        """Return how many of its batches were thinned."""
        return (await self._get(jobs)).thinned_batch_count

    async def _get(self, jobs: Jobs) -> job_pb2.Job:
        request = job_service_pb2.GetJobRequest(job_id=self.task.job_id)
        return (await jobs.GetJob(request, timeout=_CALL_TIMEOUT_S, wait_for_ready=True)).job

    async def finish(self, jobs: Jobs) -> None:
        """Let all ranks leave, and end the job; look back at whose offers it has followed."""
        for pipeline in range(self.task.pipeline_count):
            own = {rank.place.stage: rank.history for rank in self.ranks if rank.place.pipeline == pipeline}
            for found in outdated_offers(own):
                self._findings.add("two holders", f"{self.task.job_id}, pipeline {pipeline}: {found}")
        for agent in self.agents:
            agent.leave()
        request = job_service_pb2.FinishJobRequest(job_id=self.task.job_id)
        await jobs.FinishJob(request, timeout=_CALL_TIMEOUT_S)
        self.close()

    def close(self) -> None:
        """Drop everything."""
        if self._beating is not None:
            self._beating.cancel()
        for agent in self.agents:
            agent.close()

    async def straggle(self, jobs: Jobs, factor: float, quiet_s: float) -> StragglerAnswer:
        """Report pipeline 0 slow, and time the offers at all others, until `quiet_s` pass without one."""
        task = self.task
        first_s: dict[int, float] = {}
        begun_s = time.perf_counter()

        late: set[int] = set()

        def note(rank: Rank, is_late: bool) -> None:
            if rank.place.pipeline > 0:
                if is_late and rank.place.pipeline not in first_s:
                    late.add(rank.place.pipeline)
                first_s.setdefault(rank.place.pipeline, time.perf_counter() - begun_s)

        for agent in self.agents:
            agent.offered = note
        report = job_service_pb2.ReportStragglerRequest(
            job_id=task.job_id, pipeline=0, slowdown_factor=factor
        )
        await jobs.ReportStraggler(report, timeout=_CALL_TIMEOUT_S)
        ends_s = begun_s + _OFFER_LIMIT_S
        while len(first_s) < task.pipeline_count - 1 and time.perf_counter() < ends_s:
            if first_s and time.perf_counter() - begun_s > max(first_s.values()) + quiet_s:
                break
            await asyncio.sleep(0.02)
        for agent in self.agents:
            agent.offered = None
        return StragglerAnswer(sorted(first_s.values()), len(late), task.pipeline_count - 1)

    async def set_straggler(self, jobs: Jobs, factor: float) -> None:
        """Report pipeline 0 slow by a factor, or not slow at 0; retry until it is answered."""
        while True:
            try:
                if factor:
                    report = job_service_pb2.ReportStragglerRequest(
                        job_id=self.task.job_id, pipeline=0, slowdown_factor=factor
                    )
                    await jobs.ReportStraggler(report, timeout=_CALL_TIMEOUT_S)
                else:
                    await self.clear(jobs)
                return
            except grpc.aio.AioRpcError as error:
                if error.code() not in _TRANSIENT:
                    raise
                await asyncio.sleep(_RETRY_S)

    async def clear(self, jobs: Jobs) -> None:
        """Report that pipeline 0 is no longer slow."""
        request = job_service_pb2.ClearStragglerRequest(job_id=self.task.job_id, pipeline=0)
        await jobs.ClearStraggler(request, timeout=_CALL_TIMEOUT_S)

    async def account(self, jobs: Jobs) -> Account:
        """Compare the report with the sent batches; the job is paused, and everything is acknowledged."""
        periods: list[job_pb2.ReportPeriod] = []
        token = ""
        while True:
            request = job_service_pb2.GetReportRequest(
                job_id=self.task.job_id, page_size=1000, page_token=token
            )
            page = await jobs.GetReport(request, timeout=_CALL_TIMEOUT_S, wait_for_ready=True)
            periods += page.periods
            if not (token := page.next_page_token):
                break
        at_stock = set().union(*(rank.stock_versions for rank in self.ranks))
        return account(self._versions(), periods, self.task.stage_count, at_stock)

    def _versions(self) -> NDArray[np.int64]:
        """Return the version that each rank reported for each iteration, one row per iteration."""
        count = min(agent.iteration for agent in self.agents)
        versions = np.zeros((max(0, count), len(self.ranks)), np.int64)
        for index, rank in enumerate(self.ranks):
            for first, version, _ in rank.history:
                versions[first:, index] = version
        return versions

    def _registration(self) -> job_service_pb2.RegisterJobRequest:
        task = self.task
        return job_service_pb2.RegisterJobRequest(
            spec=job_pb2.JobSpec(
                job_id=task.job_id,
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
            request_id=task.job_id,
        )

    def set_period(self, period_s: float) -> None:
        """Let each rank report once per this period from now on."""
        self._period_s, self._next_s = period_s, time.perf_counter()

    async def _heartbeat(self) -> None:
        """Let every agent report in turn, repeatedly; agents due between two checks report together."""
        agents, lateness_s = self.agents, self.lateness_s
        self._next_s = time.perf_counter()
        number = 0
        while True:
            now_s = time.perf_counter()
            # More at once would be a burst: if late, read answers in between.
            for _ in range(64):
                if self._next_s > now_s:
                    break
                if number == 0 and self._has_to_rest:
                    return
                lateness_s.append(now_s - self._next_s)
                agents[number].report()
                number = (number + 1) % len(agents)
                self._next_s += self._period_s / len(agents)
            await asyncio.sleep(_WAKE_S if self._next_s > now_s else 0)


def account(
    versions: NDArray[np.int64],
    periods: list[job_pb2.ReportPeriod],
    stage_count: int,
    stock_versions: Iterable[int] = (),
) -> Account:
    """Compare a report's periods with the versions of all ranks (one row per iteration).

    Those of `stock_versions` that have no period are of blocks at stock beside plans, which no period counts.
    """
    found = Account(iteration_count=len(versions))
    by_stage = versions.reshape(len(versions), -1, stage_count)
    by_pipeline = by_stage.max(axis=2)
    # The first iteration under new versions is not measured, nor is one in which a pipeline's ranks differ.
    is_counted = (by_stage.min(axis=2) == by_pipeline).all(axis=1)
    is_counted[:1] = False
    is_counted[1:] &= (versions[1:] == versions[:-1]).all(axis=1)
    is_inside = np.zeros(len(versions), np.bool_)
    for period in periods:
        own = slice(period.first_iteration, period.last_iteration + 1)
        is_inside[own] = True
        is_meant = is_counted[own] & (by_pipeline[own] == list(period.plan_versions)).all(axis=1)
        expected = int(is_meant.sum())
        found.expected_count += expected
        found.counted_count += period.iteration_count
        if expected != period.iteration_count:
            found.short_periods.append(
                f"{period.number}: iterations {period.first_iteration} to {period.last_iteration}, "
                f"expected {expected}, found {period.iteration_count}"
            )
            continue
        iterations = np.flatnonzero(is_meant) + period.first_iteration
        energy_j = versions.shape[1] * sum(wire.iteration_energy_j(each) for each in iterations.tolist())
        error = abs(period.iteration_count * period.energy_j - energy_j) / max(energy_j, 1.0)
        found.energy_error = max(found.energy_error, error)
    known = [{*period.plan_versions} for period in periods]
    beside = [version for version in stock_versions if {version} not in known]
    is_beside = np.isin(by_pipeline, beside).all(axis=1)
    found.outside = np.flatnonzero(is_counted & ~is_inside & ~is_beside).tolist()
    return found


def outdated_offers(histories: Mapping[int, Sequence[tuple[int, int, int]]]) -> list[str]:
    """Return where a rank of a pipeline took up an older holder's offer beside or after a newer holder's.

    Histories are `Rank.history` by stage. The same version from both is the same stored offer, sent again. A
    rank that a newer plan leaves as it is takes up nothing, and may be under an older holder's offer.
    """
    found = []
    newest = (0, 0, 0)
    taken = (
        (iteration, -lease_epoch, version, stage)
        for stage, history in histories.items()
        for iteration, version, lease_epoch in history
        if lease_epoch
    )
    for iteration, negative, version, stage in sorted(taken):
        own = (-negative, version, iteration)
        if own[0] < newest[0] and version != newest[1]:
            found.append(
                f"stage {stage} takes up version {version} of lease epoch {own[0]} in iteration {iteration}, "
                f"after version {newest[1]} of lease epoch {newest[0]} in iteration {newest[2]}"
            )
        newest = max(newest, own)
    return found


async def until(is_so: Callable[[], bool], limit_s: float, what: str) -> None:
    """Wait for a condition. TimeoutError after `limit_s`."""
    try:
        async with asyncio.timeout(limit_s):
            while not is_so():  # noqa: ASYNC110 - many sources can fulfil the condition
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise TimeoutError(f"{what}: not within {limit_s:g} s") from None


def channel(target: str) -> grpc.aio.Channel:
    """Open a channel for unary calls that reconnects soon after a restart."""
    options = (
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.min_reconnect_backoff_ms", 10_000),  # how long one attempt may take
    )
    return grpc.aio.insecure_channel(target, options=options)
