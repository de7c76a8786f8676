"""`perseus.v1.PowerService`: a thin adapter over power budgets."""

# ruff: noqa: N802 (the contract names the methods)

from collections.abc import AsyncIterator
from typing import Any

import grpc

from perseus.service.api.authentication import caller
from perseus.service.api.paging import Page
from perseus.service.api.statuses import mapped, mapped_stream
from perseus.service.api.translate_power import budget_to_proto, feed_to_proto, wanted_from_proto
from perseus.service.domain.power import check_budget_id
from perseus.service.shell.power import Power
from perseus.service.shell.quotas import Quotas
from perseus.v1 import power_service_pb2 as pb
from perseus.v1 import power_service_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class PowerService(power_service_pb2_grpc.PowerServiceServicer):
    """Sets, lists and cancels power budgets, and reports the state of feeds."""

    def __init__(self, power: Power, quotas: Quotas) -> None:
        self._power = power
        self._quotas = quotas

    @mapped
    async def SetBudget(self, request: pb.SetBudgetRequest, context: Context) -> pb.SetBudgetResponse:
        """Set or replace a power budget."""
        record, replaced = await self._power.set_budget(wanted_from_proto(request), caller())
        now_s = self._power.now_s()
        return pb.SetBudgetResponse(
            budget=budget_to_proto(record, now_s),
            replaced=None if replaced is None else budget_to_proto(replaced, now_s),
        )

    @mapped
    async def ListBudgets(self, request: pb.ListBudgetsRequest, context: Context) -> pb.ListBudgetsResponse:
        """Return a page of power budgets."""
        page = Page.asked(request)
        now_s = self._power.now_s()
        budgets, next_page_token = page.fill(
            (record.budget.budget_id, budget_to_proto(record, now_s))
            for record in self._power.budgets(page.after, request.feed)
        )
        return pb.ListBudgetsResponse(budgets=budgets, next_page_token=next_page_token)

    @mapped
    async def CancelBudget(
        self, request: pb.CancelBudgetRequest, context: Context
    ) -> pb.CancelBudgetResponse:
        """Cancel a power budget."""
        check_budget_id(request.budget_id)
        record = await self._power.cancel_budget(request.budget_id, caller())
        return pb.CancelBudgetResponse(budget=budget_to_proto(record, self._power.now_s()))

    @mapped
    async def ListFeeds(self, request: pb.ListFeedsRequest, context: Context) -> pb.ListFeedsResponse:
        """Return all feeds with their state."""
        return pb.ListFeedsResponse(feeds=[feed_to_proto(*each) for each in self._power.feeds()])

    @mapped_stream
    async def WatchFeeds(
        self, request: pb.WatchFeedsRequest, context: Context
    ) -> AsyncIterator[pb.WatchFeedsResponse]:
        """Stream the state of feeds as it changes."""
        with self._quotas.stream(caller().name):
            async for feed, status in self._power.watch(request.feed):
                yield pb.WatchFeedsResponse(feed=feed_to_proto(feed, status))
