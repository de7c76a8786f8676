"""The gateway's gRPC client of the coordinator: power budgets and feeds, as plain values."""

import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from perseus.grid.dsx_flex.budgets import Budget, KnownBudget, Stage
from perseus.grid.dsx_flex.values import FeedReading
from perseus.tls.channels import Channels
from perseus.v1 import job_service_pb2, power_service_pb2
from perseus.v1.info_service_pb2 import ListCoordinatorsRequest
from perseus.v1.info_service_pb2_grpc import InfoServiceStub
from perseus.v1.job_service_pb2_grpc import JobServiceStub
from perseus.v1.power_service_pb2_grpc import PowerServiceStub

if TYPE_CHECKING:
    from perseus.v1.info_service_pb2_grpc import InfoServiceAsyncStub
    from perseus.v1.job_service_pb2_grpc import JobServiceAsyncStub
    from perseus.v1.power_service_pb2_grpc import PowerServiceAsyncStub

TIMEOUT_S = 10.0
_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]
_PAGE_SIZE = 1000
_TRANSIENT = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
}
_STAGES = {
    power_service_pb2.BUDGET_STATE_SCHEDULED: Stage.CURRENT,
    power_service_pb2.BUDGET_STATE_IN_FORCE: Stage.CURRENT,
    power_service_pb2.BUDGET_STATE_ENDED: Stage.ENDED,
    power_service_pb2.BUDGET_STATE_CANCELLED: Stage.CANCELLED,
}


def is_transient(error: grpc.aio.AioRpcError) -> bool:
    """Return whether the call failed without the coordinator refusing it."""
    return error.code() in _TRANSIENT


class PowerClient:
    """A channel to the coordinator, open within the context. Methods raise `grpc.aio.AioRpcError`.

    Of a fleet, it is to the coordinator of slot 0, which keeps the budgets and knows feeds whole.
    """

    _power: "PowerServiceAsyncStub"

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> "PowerClient":
        keeper = await self._keeper()
        self._power = PowerServiceStub(await self._opened.enter_async_context(keeper.open(_OPTIONS)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._opened.aclose()

    async def _keeper(self) -> Channels:
        """Return the way to the coordinator that keeps the budgets."""
        try:
            async with self._channels.open(_OPTIONS) as channel:
                stub: InfoServiceAsyncStub = InfoServiceStub(channel)
                fleet = await stub.ListCoordinators(ListCoordinatorsRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:  # an older one, which keeps all
                return self._channels
            raise
        for each in fleet.coordinators:
            if each.HasField("slot") and each.slot == 0:
                keeper = self._channels if each.is_answering else self._channels.at(each.address)
                if keeper is not None:
                    return keeper
        code, details = (
            grpc.StatusCode.UNAVAILABLE,
            "the coordinator of slot 0, which keeps budgets, is absent",
        )
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)

    async def feeds(self) -> tuple[FeedReading, ...]:
        """Return readings of all feeds."""
        answer = await self._power.ListFeeds(power_service_pb2.ListFeedsRequest(), timeout=TIMEOUT_S)
        return tuple(_reading(feed) for feed in answer.feeds)

    async def watch(self) -> AsyncIterator[FeedReading]:
        """Yield a reading of each feed, and another whenever it changes."""
        async for answer in self._power.WatchFeeds(power_service_pb2.WatchFeedsRequest()):
            yield _reading(answer.feed)

    async def budgets(self) -> dict[str, KnownBudget]:
        """Return all budgets, by identifier."""
        request = power_service_pb2.ListBudgetsRequest(page_size=_PAGE_SIZE)
        found: dict[str, KnownBudget] = {}
        while True:
            page = await self._power.ListBudgets(request, timeout=TIMEOUT_S)
            found |= {each.budget_id: _known(each) for each in page.budgets}
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token

    async def set(self, budget: Budget) -> KnownBudget:
        """Set a budget, in place of any with its identifier; return it."""
        request = power_service_pb2.SetBudgetRequest(
            budget_id=budget.budget_id,
            request_id=budget.request_id,
            feed=budget.feed,
            limit_w=budget.limit_w,
            start_time=_timestamp(budget.start_s),
            correlation_id=budget.correlation_id,
        )
        if budget.end_s < math.inf:
            request.end_time.CopyFrom(_timestamp(budget.end_s))
        return _known((await self._power.SetBudget(request, timeout=TIMEOUT_S)).budget)

    async def cancel(self, budget_id: str) -> KnownBudget:
        """Cancel a budget; return it."""
        request = power_service_pb2.CancelBudgetRequest(budget_id=budget_id)
        return _known((await self._power.CancelBudget(request, timeout=TIMEOUT_S)).budget)

    async def nodes(self, job_id: str) -> tuple[str, ...]:
        """Return the names of the hosts that a job runs on."""
        channels = self._channels.beside()
        while True:
            async with channels.open(_OPTIONS) as channel:
                try:
                    return await _nodes(JobServiceStub(channel), job_id)
                except grpc.aio.AioRpcError as error:
                    if not channels.follow(error):  # to the coordinator that serves the job
                        raise


async def _nodes(jobs: "JobServiceAsyncStub", job_id: str) -> tuple[str, ...]:
    request = job_service_pb2.ListRanksRequest(job_id=job_id, page_size=_PAGE_SIZE)
    found: dict[str, None] = {}
    while True:
        page = await jobs.ListRanks(request, timeout=TIMEOUT_S)
        found |= dict.fromkeys(rank.hostname for rank in page.ranks if rank.hostname)
        if not page.next_page_token:
            return tuple(found)
        request.page_token = page.next_page_token


def _reading(feed: power_service_pb2.FeedState) -> FeedReading:
    return FeedReading(
        feed=feed.feed,
        maximum_w=feed.own_limit_w if feed.HasField("own_limit_w") else None,
        default_w=feed.default_w if feed.HasField("default_w") else None,
        limit_w=feed.limit_w if feed.HasField("limit_w") else math.inf,
        power_cap_w=feed.power_cap_w if feed.HasField("power_cap_w") else math.inf,
        measured_w=feed.measured_w,
        judged_w=feed.judged_w if feed.HasField("judged_w") else None,
        calculated_w=feed.managed_w + feed.unmanaged_w,
        in_transition=feed.is_in_transition,
        is_compliant=feed.is_compliant,
        to_pause=tuple(feed.job_ids_to_pause),
        held=tuple(feed.slowed_job_ids),
    )


def _known(budget: power_service_pb2.Budget) -> KnownBudget:
    found = Budget(
        budget_id=budget.budget_id,
        feed=budget.feed,
        limit_w=budget.limit_w,
        start_s=_seconds(budget.start_time),
        end_s=_seconds(budget.end_time) if budget.HasField("end_time") else math.inf,
        correlation_id=budget.correlation_id,
    )
    # A state that only a newer coordinator knows counts as current.
    return KnownBudget(found, _STAGES.get(budget.state, Stage.CURRENT))


def _timestamp(time_s: float) -> Timestamp:
    whole_s = math.floor(time_s)
    return Timestamp(seconds=whole_s, nanos=min(999_999_999, round((time_s - whole_s) * 1e9)))


def _seconds(time: Timestamp) -> float:
    return time.seconds + time.nanos / 1e9
