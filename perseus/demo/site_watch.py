"""Observations of a site once a second: its GPUs' power, and the coordinator's answers."""

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import grpc.aio

from perseus.demo.observation import ObservationError
from perseus.demo.power_log import PowerLog, Sample
from perseus.demo.site import PowerMeter, Site
from perseus.v1 import (
    job_pb2,
    job_service_pb2,
    job_service_pb2_grpc,
    power_service_pb2,
    power_service_pb2_grpc,
)

PERIOD_S = 1.0
_RPC_TIMEOUT_S = 10.0


@asynccontextmanager
async def watching(site: Site, notify: Callable[["SiteWatch"], None]) -> AsyncIterator["SiteWatch"]:
    """Watch a started site; if a process dies, end the context's body.

    Raises:
        ClusterError: a process has died.
    """
    async with site.security.channels(site.address).open() as channel:
        watch = SiteWatch(site, channel, lambda: notify(watch))
        try:
            async with asyncio.TaskGroup() as tasks:
                following = tasks.create_task(watch.follow())
                yield watch
                following.cancel()
        except ExceptionGroup as group:
            if len(group.exceptions) == 1:
                raise group.exceptions[0] from None
            raise


class SiteWatch:
    """Follows all jobs of a site. `notify` is called once a second; times count from its creation.

    Attributes:
        jobs: the latest answer for each job, by identifier.
        feed: the latest answer for the default feed.
        log: the power drawn, second by second.
    """

    def __init__(self, site: Site, channel: grpc.aio.Channel, notify: Callable[[], None]) -> None:
        self.jobs: dict[str, job_pb2.Job] = {}
        self.feed = power_service_pb2.FeedState(is_compliant=True)
        self.log = PowerLog()
        self._site = site
        self._jobs = job_service_pb2_grpc.JobServiceStub(channel)
        self._power = power_service_pb2_grpc.PowerServiceStub(channel)
        self._notify = notify
        self._begun_s = time.monotonic()

    def now_s(self) -> float:
        """Return the time since creation, in seconds."""
        return time.monotonic() - self._begun_s

    async def follow(self) -> None:
        """Poll once a second, until cancelled. While the coordinator is away, poll only the GPUs.

        Raises:
            ClusterError: a process has died.
        """
        with self._site.power_meter() as meter:
            while True:
                await asyncio.sleep(PERIOD_S - self.now_s() % PERIOD_S)
                with suppress(grpc.aio.AioRpcError):
                    await self._ask()
                self._tick(meter)
                self._notify()

    async def until(self, what: str, is_true: Callable[[], bool], timeout_s: float) -> None:
        """Wait until a condition holds.

        Raises:
            ObservationError: the condition did not hold in time.
        """
        end_s = self.now_s() + timeout_s
        while not is_true():
            if self.now_s() > end_s:
                states = {job_id: job_pb2.JobState.Name(job.state) for job_id, job in self.jobs.items()}
                raise ObservationError(f"expected {what} within {timeout_s:.0f} s, found {states}")
            await asyncio.sleep(PERIOD_S / 4)

    async def set_budget(self, budget_id: str, limit_w: float, ramp_w_per_s: float | None = None) -> None:
        """Limit the total power of all jobs from now on; a known identifier replaces that budget."""
        request = power_service_pb2.SetBudgetRequest(
            budget_id=budget_id, request_id=uuid.uuid4().hex, limit_w=limit_w, ramp_w_per_s=ramp_w_per_s
        )
        await self._power.SetBudget(request, timeout=_RPC_TIMEOUT_S)

    async def cancel_budget(self, budget_id: str) -> None:
        """End a budget."""
        request = power_service_pb2.CancelBudgetRequest(budget_id=budget_id)
        await self._power.CancelBudget(request, timeout=_RPC_TIMEOUT_S)

    async def set_terms(self, job_id: str, tolerance_percent: float, weight: float) -> None:
        """Set a job's terms for budgets."""
        terms = job_pb2.BudgetTerms(tolerance_percent=tolerance_percent, weight=weight)
        policy = job_pb2.OperatingPolicy(no_slowdown=job_pb2.NoSlowdown(), budget_terms=terms)
        request = job_service_pb2.SetPolicyRequest(job_id=job_id, policy=policy)
        await self._jobs.SetPolicy(request, timeout=_RPC_TIMEOUT_S)

    def are_planned(self) -> bool:
        """Whether all jobs run plans that were measured for at least one iteration."""
        return self.jobs.keys() == self._site.workloads.keys() and all(
            job.state == job_pb2.JOB_STATE_PLANNED and job.figures.HasField("mean_iteration_time_s")
            for job in self.jobs.values()
        )

    async def _ask(self) -> None:
        listed = await self._jobs.ListJobs(job_service_pb2.ListJobsRequest(), timeout=_RPC_TIMEOUT_S)
        found = {}
        for each in listed.jobs:
            request = job_service_pb2.GetJobRequest(job_id=each.job_id)
            found[each.job_id] = (await self._jobs.GetJob(request, timeout=_RPC_TIMEOUT_S)).job
        self.jobs = found
        feeds = await self._power.ListFeeds(power_service_pb2.ListFeedsRequest(), timeout=_RPC_TIMEOUT_S)
        (self.feed,) = feeds.feeds

    def _tick(self, meter: PowerMeter) -> None:
        self._site.check()
        feed = self.feed
        speeds = {
            job_id: job.baseline.iteration_time_s / job.figures.iteration_time_s
            for job_id, job in self.jobs.items()
            if job.HasField("baseline") and job.figures.iteration_time_s
        }
        self.log.samples.append(
            Sample(
                self.now_s(),
                meter.poll(),
                speeds,
                feed.limit_w if feed.HasField("limit_w") else math.inf,
                feed.power_cap_w if feed.HasField("power_cap_w") else math.inf,
                feed.is_compliant,
            )
        )
