"""Power budgets over gRPC, on a real coordinator with a real store: set, listed, cancelled, kept, watched."""

import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, closing
from functools import partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import grpc
import pytest
from structlog.testing import capture_logs

from perseus.service.domain.power import FeedStatus
from perseus.service.fleet.power import machine as machine_module
from perseus.service.fleet.power.allocation import Allocation, allocate
from perseus.service.fleet.power.machine import FleetMachine
from perseus.service.fleet.power.messages import Command, Input
from perseus.service.shell.power import Power
from perseus.service.storage.checking import check_database
from perseus.v1 import agent_service_pb2 as pb_agents
from perseus.v1 import job_pb2, job_service_pb2, rank_pb2
from perseus.v1 import power_service_pb2 as pb
from perseus.v1.power_service_pb2_grpc import PowerServiceStub
from tests.service import service_fakes
from tests.service.grpc_fakes import (
    ALL_PLACES,
    TIMEOUT_S,
    Client,
    FakeAgent,
    connected,
    make_settings,
    refusal,
    until,
)

if TYPE_CHECKING:
    from perseus.v1.power_service_pb2_grpc import PowerServiceAsyncStub

KINDS_OF_CLOCKS: tuple[Literal["hold", "stage_plan"], ...] = ("hold", "stage_plan")
FEEDS = {"hall": {"hosts": ["ho*"], "limit_w": 5000.0}}


class Budgets:
    """The calls of one client."""

    def __init__(self, client: Client) -> None:
        self.stub: PowerServiceAsyncStub = PowerServiceStub(client.channel)

    async def set(self, budget_id: str = "b", request_id: str = "r", **parts: Any) -> pb.Budget:
        wanted: dict[str, Any] = {} if {"limit_w", "percent"} & parts.keys() else {"limit_w": 1000.0}
        start_s, end_s = parts.pop("start_s", None), parts.pop("end_s", None)
        request = pb.SetBudgetRequest(budget_id=budget_id, request_id=request_id, **wanted, **parts)
        if start_s is not None:
            request.start_time.FromNanoseconds(round(start_s * 1e9))
        if end_s is not None:
            request.end_time.FromNanoseconds(round(end_s * 1e9))
        found: pb.Budget = (await self.stub.SetBudget(request, timeout=TIMEOUT_S)).budget
        return found

    async def cancel(self, budget_id: str = "b") -> pb.Budget:
        request = pb.CancelBudgetRequest(budget_id=budget_id)
        found: pb.Budget = (await self.stub.CancelBudget(request, timeout=TIMEOUT_S)).budget
        return found

    async def listed(self, **wanted: Any) -> pb.ListBudgetsResponse:
        answer: pb.ListBudgetsResponse = await self.stub.ListBudgets(
            pb.ListBudgetsRequest(**wanted), timeout=TIMEOUT_S
        )
        return answer

    async def feed(self, name: str = "default") -> pb.FeedState:
        feeds = (await self.stub.ListFeeds(pb.ListFeedsRequest(), timeout=TIMEOUT_S)).feeds
        return next(feed for feed in feeds if feed.feed == name)


@asynccontextmanager
async def serving(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Client, Budgets]]:
    async with connected(make_settings(tmp_path, **settings)) as client:
        yield client, Budgets(client)


@asynccontextmanager
async def planned(client: Client) -> AsyncIterator[FakeAgent]:
    """Return a job under plans, whose ranks report that each draws 100 W."""
    await client.register()
    agent = FakeAgent(client, "agent", ALL_PLACES)
    await agent.join()
    await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
    await agent.iterate(4)
    yield agent
    await agent.end()


class FleetClock:
    """The time by which budgets begin and end, which a test advances."""

    def __init__(self) -> None:
        self.ahead_s = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FleetClock:
    clock = FleetClock()
    shifted = partialmethod(Power.__init__, clock=lambda: time.time() + clock.ahead_s)
    monkeypatch.setattr(Power, "__init__", shifted)
    return clock


async def is_held(client: Client) -> bool:
    return (await client.job()).HasField("budget_target_iteration_time_s")


async def is_free(client: Client) -> bool:
    return not await is_held(client)


async def test_a_request_sets_a_budget_once_and_another_one_replaces_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, power):
        first = await power.set(limit_w=900.0, ramp_w_per_s=5.0, correlation_id="evt-1")
        assert (first.limit_w, first.ramp_w_per_s, first.correlation_id) == (900.0, 5.0, "evt-1")
        assert first.state == pb.BUDGET_STATE_IN_FORCE
        assert first.feed == "default"
        assert not first.HasField("end_time")
        assert await power.set(limit_w=1.0) == first, "the same request again"
        second = await power.set(request_id="another", limit_w=800.0, start_s=time.time() + 60)
        assert (second.limit_w, second.state) == (800.0, pb.BUDGET_STATE_SCHEDULED)
        assert list((await power.listed()).budgets) == [second]
        third = await power.stub.SetBudget(
            pb.SetBudgetRequest(budget_id="b", request_id="third", limit_w=700.0), timeout=TIMEOUT_S
        )
        assert (third.budget.limit_w, third.replaced) == (700.0, second)
        await power.cancel()
        fourth = await power.stub.SetBudget(
            pb.SetBudgetRequest(budget_id="b", request_id="fourth", limit_w=600.0), timeout=TIMEOUT_S
        )
        assert not fourth.HasField("replaced"), "it was cancelled"


async def test_budgets_are_listed_in_pages_and_cancelled_once(tmp_path: Path) -> None:
    async with serving(tmp_path, feeds=FEEDS) as (_, power):
        for number in range(3):
            await power.set(f"b{number}", feed="hall" if number else "")
        first = await power.listed(page_size=2)
        assert [budget.budget_id for budget in first.budgets] == ["b0", "b1"]
        second = await power.listed(page_size=2, page_token=first.next_page_token)
        assert [budget.budget_id for budget in second.budgets] == ["b2"]
        assert not second.next_page_token
        assert [budget.budget_id for budget in (await power.listed(feed="hall")).budgets] == ["b1", "b2"]
        cancelled = await power.cancel("b1")
        assert cancelled.state == pb.BUDGET_STATE_CANCELLED
        assert await power.cancel("b1") == cancelled
        assert (await power.set("b1", "anew")).state == pb.BUDGET_STATE_IN_FORCE


@pytest.mark.parametrize(
    ("parts", "reason", "expected"),
    [
        ({"budget_id": ""}, "INVALID_FIELD", {"field": "budget_id"}),
        ({"budget_id": "\u00e4"}, "INVALID_FIELD", {"field": "budget_id"}),
        ({"request_id": ""}, "INVALID_FIELD", {"field": "request_id"}),
        ({"limit_w": -1.0}, "INVALID_FIELD", {"field": "limit_w"}),
        ({"limit_w": float("nan")}, "INVALID_FIELD", {"field": "limit_w"}),
        ({"percent": 1001.0, "feed": "hall"}, "INVALID_FIELD", {"field": "percent"}),
        ({"percent": 50.0}, "INVALID_FIELD", {"field": "percent", "found": "none"}),
        ({"ramp_w_per_s": 0.0}, "INVALID_FIELD", {"field": "ramp_w_per_s"}),
        ({"end_s": 1.0}, "INVALID_FIELD", {"field": "end_time"}),
        ({"start_s": 4e9, "end_s": 3e9}, "INVALID_FIELD", {"field": "end_time"}),
        ({"correlation_id": "x" * 257}, "INVALID_FIELD", {"field": "correlation_id"}),
        ({"feed": "cellar"}, "FEED_NOT_FOUND", {"feed": "cellar", "expected": "default, hall"}),
    ],
)
async def test_invalid_budgets_are_refused(
    tmp_path: Path, parts: dict[str, Any], reason: str, expected: dict[str, str]
) -> None:
    async with serving(tmp_path, feeds=FEEDS) as (_, power):
        _, found, metadata = await refusal(power.set(**parts))
        assert found == reason
        assert expected.items() <= metadata.items()
        assert not (await power.listed()).budgets


async def test_a_budget_needs_an_amount_and_an_unknown_one_is_not_cancelled(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as (_, power):
        bare = pb.SetBudgetRequest(budget_id="b", request_id="r")
        assert (await refusal(power.stub.SetBudget(bare, timeout=TIMEOUT_S)))[1:] == (
            "INVALID_FIELD",
            {"field": "amount", "expected": "limit_w or percent", "found": "neither"},
        )
        assert await refusal(power.cancel("no")) == (
            grpc.StatusCode.NOT_FOUND,
            "BUDGET_NOT_FOUND",
            {"budget_id": "no"},
        )


async def test_the_budgets_of_a_principal_are_limited(tmp_path: Path) -> None:
    async with serving(tmp_path, limit_budgets=2) as (_, power):
        await power.set("b0")
        await power.set("b1")
        assert (await refusal(power.set("b2")))[:2] == (grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_REACHED")
        await power.set("b1", "replaced")
        await power.cancel("b0")
        await power.set("b2")


async def test_a_percentage_refers_to_the_feeds_limit(tmp_path: Path) -> None:
    async with serving(tmp_path, feeds=FEEDS) as (_, power):
        budget = await power.set(percent=75.0, feed="hall")
        assert (budget.limit_w, budget.percent) == (3750.0, 75.0)

        async def is_limited() -> bool:
            feed = await power.feed("hall")
            return (feed.reference_w, feed.limit_w) == (5000.0, 3750.0)

        await until(is_limited)


async def test_ranks_are_on_the_feed_of_their_hosts(tmp_path: Path) -> None:
    async with serving(tmp_path, feeds=FEEDS) as (client, power), planned(client):

        async def is_measured() -> bool:
            return (await power.feed("hall")).managed_w > 0

        await until(is_measured)
        hall, default = await power.feed("hall"), await power.feed()
        assert hall.measured_w > 0 == default.measured_w
        assert (hall.limit_w, hall.is_compliant) == (5000.0, True)
        assert not default.HasField("limit_w")


@pytest.mark.parametrize(("fail_safe", "lease_s"), [("stock", 30.0), ("last plan", 1e6)])
async def test_plans_outlast_the_coordinator_where_the_last_plan_is_the_fail_safe(
    tmp_path: Path, fail_safe: str, lease_s: float
) -> None:
    feeds = {"hall": {"hosts": ["ho*"], "fail_safe": fail_safe}}
    async with serving(tmp_path, feeds=feeds) as (client, _), planned(client) as agent:
        leases_s = {kind: {o.lease_s for o in agent.offers if o.HasField(kind)} for kind in KINDS_OF_CLOCKS}
        assert leases_s == {"hold": {30.0}, "stage_plan": {lease_s}}


async def test_a_budget_slows_a_job_down_survives_a_restart_and_releases_it(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    async with connected(settings) as client:
        power = Budgets(client)
        async with planned(client) as agent:
            before = await client.job()
            await power.set(limit_w=1.0, correlation_id="evt-1")
            await until(lambda: is_held(client))
            await agent.settle()
            held = await client.job()
            assert held.min_planned_iteration_time_s > before.max_planned_iteration_time_s
            assert held.budget_target_iteration_time_s == pytest.approx(held.t_slow_s)
            feed = await power.feed()
            assert (feed.limit_w, list(feed.slowed_job_ids)) == (1.0, ["job"])
            offers = len(agent.offers)

    async with connected(settings) as client:
        power = Budgets(client)
        (budget,) = (await power.listed()).budgets
        assert (budget.state, budget.correlation_id) == (pb.BUDGET_STATE_IN_FORCE, "evt-1")
        assert (await client.job()).budget_target_iteration_time_s == held.budget_target_iteration_time_s
        agent.use(client)
        await agent.join()

        async def is_solved() -> bool:
            await agent.iterate()
            return bool((await client.job()).t_min_s)

        await until(is_solved)
        await agent.iterate(4)
        again = await client.job()
        assert again.min_planned_iteration_time_s == held.min_planned_iteration_time_s
        assert len(agent.offers) == offers, "the plans in force stay as they are"

        await power.cancel()
        await until(lambda: is_free(client))
        await agent.iterate(4)
        free = await client.job()
        assert free.max_planned_iteration_time_s == before.max_planned_iteration_time_s
        await agent.end()
        await client.finish()
        reported = [
            event.budget_target_set for event in await client.events() if event.HasField("budget_target_set")
        ]
        assert reported[0].iteration_time_s == held.budget_target_iteration_time_s
        assert reported[0].is_urgent
        assert not reported[-1].HasField("iteration_time_s")


@pytest.mark.parametrize(
    ("damage", "limits_w"),
    [
        # Nothing of it is readable, neither its feed nor its limit.
        ("UPDATE budgets SET budget = substr(budget, 5)", {"default": 0.0, "hall": 0.0}),
        # For example, one of another version.
        ("""UPDATE budgets SET budget = replace(budget, '"principal"', '"who"')""", {"hall": 1000.0}),
        ("""UPDATE budgets SET budget = replace(budget, '"limit_w":', '"limit_w":-')""", {"hall": 0.0}),
        (
            f"""UPDATE budgets SET budget = replace(budget, '"limit_w":', '"limit_w":{"9" * 400}')""",
            {"hall": 0.0},
        ),
        ("UPDATE budgets SET over_time_s = 'soon'", {"hall": 1000.0}),
    ],
)
async def test_an_unreadable_budget_is_enforced_conservatively_until_it_is_cancelled(
    tmp_path: Path, damage: str, limits_w: dict[str, float]
) -> None:
    settings = make_settings(tmp_path, feeds=FEEDS)
    async with connected(settings) as client:
        await Budgets(client).set("lost", feed="hall")
    with closing(sqlite3.connect(settings.database)) as connection, connection:
        assert connection.execute(damage).rowcount == 1
    with capture_logs() as logs:
        async with connected(settings) as client:
            power = Budgets(client)

            async def found_w() -> dict[str, float]:
                feeds = (await power.stub.ListFeeds(pb.ListFeedsRequest(), timeout=TIMEOUT_S)).feeds
                return {feed.feed: feed.limit_w for feed in feeds if feed.HasField("limit_w")}

            async def is_limited() -> bool:
                return await found_w() == limits_w

            await until(is_limited)
            listed = (await power.listed()).budgets
            assert {budget.feed: budget.limit_w for budget in listed} == limits_w
            assert listed[0].budget_id == "lost"
            for budget in listed:
                assert (await power.cancel(budget.budget_id)).state == pb.BUDGET_STATE_CANCELLED

            async def is_lifted() -> bool:
                return await found_w() == {"hall": 5000.0}

            await until(is_lifted)
    (reported,) = [line for line in logs if line["event"].startswith("a power budget can't be read")]
    assert (reported["log_level"], reported["budget_ids"][0]) == ("error", "lost")
    assert check_database(settings.database) == []


def reading(agent: FakeAgent, each_w: float, **others_w: float) -> dict[str, pb_agents.PowerReading]:
    """Report the draw of the agent's GPUs, all the same, and of others."""
    powers_w = {
        service_fakes.make_gpu(place).uuid + agent.gpu_suffix: each_w for place in agent.ranks
    } | others_w
    return {
        "power_reading": pb_agents.PowerReading(
            duration_s=1.0, gpu_uuid=powers_w.keys(), power_w=powers_w.values()
        )
    }


async def test_agents_report_power_before_any_iteration(tmp_path: Path) -> None:
    async with serving(tmp_path, feeds=FEEDS) as (client, power):
        await client.register()
        agent = FakeAgent(client, "agent", ALL_PLACES)
        await agent.join()
        assert agent.welcome.power_interval_s == 1.0

        async def is_known() -> bool:
            await agent.send(**reading(agent, 250.0, idle=60.0, foreign=400.0))
            # Means over some seconds, the first of which had no readings.
            return 1100.0 < (await power.feed("hall")).unmanaged_w <= 4 * 250 + 460.001

        await until(is_known)
        await agent.end()


def max_clocks_mhz(agent: FakeAgent) -> list[int]:
    """Return all maximum clocks that the agent received since it joined; 0 for none."""
    reported = [(m.rank_accepted, m.rank_max_clock, m.WhichOneof("message")) for m in agent.received]
    return [
        (accepted if kind == "rank_accepted" else limited).max_clock.clock_mhz
        for accepted, limited, kind in reported
        if kind in ("rank_accepted", "rank_max_clock")
    ]


async def test_a_restart_lifts_no_max_clock_of_a_job_without_plans(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    async with connected(settings) as client:
        await client.register()
        agent = FakeAgent(client, "agent", ALL_PLACES)
        await agent.join()
        await Budgets(client).set(limit_w=600.0)

        async def is_held_down() -> bool:
            await agent.send(**reading(agent, 250.0))
            return 0 < max_clocks_mhz(agent)[-1] <= 0.6 * service_fakes.CLOCKS_MHZ[0]

        await until(is_held_down)
        held_mhz = max_clocks_mhz(agent)[-1]

    agent.received.clear()
    async with connected(settings) as client:
        agent.use(client)
        await agent.join()

        async def is_known() -> bool:
            await agent.send(**reading(agent, 100.0))  # there is room under the power cap
            return (await Budgets(client).feed()).unmanaged_w > 390.0

        await until(is_known)
        assert set(max_clocks_mhz(agent)) == {held_mhz}
        await agent.end()


class AgentOfAnother(FakeAgent):
    """An agent with other GPUs for the same ranks."""

    def joined(self, rank: service_fakes.FakeRank) -> pb_agents.RankJoined:
        message = super().joined(rank)
        message.gpu.uuid = f"{self.job_id}-{message.gpu.uuid}"
        return message


@asynccontextmanager
async def held_beside_another(tmp_path: Path) -> AsyncIterator[tuple[FakeAgent, float]]:
    """Run a coordinator until a budget slows a job down fully, beside an unplanned job; yield its remains."""
    async with connected(make_settings(tmp_path)) as client:
        async with planned(client) as agent:
            power_w = (await client.job()).figures.power_w
            await client.register(job_id="other")
            other = AgentOfAnother(client, "agent-other", ALL_PLACES, "other")
            await other.join()
            await other.iterate()
            await Budgets(client).set(limit_w=1.4 * power_w)

            async def is_slowest() -> bool:
                job = await client.job()
                return is_held_at(job, job.t_slow_s)

            await until(is_slowest)  # the other job's draw may become known a moment later
            slowest_s = (await client.job()).t_slow_s
            await agent.iterate(4)
        await other.end()
    yield agent, slowest_s


def is_held_at(job: job_pb2.Job, iteration_time_s: float) -> bool:
    return job.budget_target_iteration_time_s == pytest.approx(iteration_time_s)


async def has_managed_power(client: Client, agent: FakeAgent) -> bool:
    await agent.iterate()
    return (await Budgets(client).feed()).managed_w > 0


async def test_a_restart_lifts_no_target_while_another_jobs_power_is_unknown(
    tmp_path: Path, clock: FleetClock
) -> None:
    """That job may train on before its agent is back, and its draw would be given away otherwise."""
    async with (
        held_beside_another(tmp_path) as (agent, slowest_s),
        connected(make_settings(tmp_path, lease_s=10 * TIMEOUT_S)) as client,
    ):
        agent.use(client)
        await agent.join()
        await until(lambda: has_managed_power(client, agent))
        assert is_held_at(await client.job(), slowest_s)

        async def is_faster() -> bool:
            await agent.iterate()
            return (await client.job()).budget_target_iteration_time_s < 0.99 * slowest_s

        clock.ahead_s = 10 * TIMEOUT_S  # the other job's lease has expired
        await until(is_faster)
        await agent.end()


async def test_a_budget_that_ends_after_a_restart_releases_jobs_despite_unknown_power(tmp_path: Path) -> None:
    async with (
        held_beside_another(tmp_path) as (agent, _),
        connected(make_settings(tmp_path, lease_s=10 * TIMEOUT_S)) as client,
    ):
        agent.use(client)
        await agent.join()
        await until(lambda: has_managed_power(client, agent))
        assert await is_held(client)
        await Budgets(client).cancel()
        await until(lambda: is_free(client))
        await agent.end()


def asked_s(agent: FakeAgent) -> float:
    """Return the interval at which the agent is to report its GPUs' draw."""
    heartbeats_s = [
        m.heartbeat.power_interval_s for m in agent.received if m.WhichOneof("message") == "heartbeat"
    ]
    return max([agent.welcome.power_interval_s, *heartbeats_s])


async def test_without_a_budget_feeds_are_not_read_and_agents_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    handle_all = FleetMachine.handle_all

    def counting(self: FleetMachine, events: Iterable[Input], now_s: float) -> list[Command]:
        looks.append(now_s)
        return handle_all(self, events, now_s)

    monkeypatch.setattr(FleetMachine, "handle_all", counting)
    settings = make_settings(tmp_path)
    async with connected(settings) as client, planned(client) as agent:
        power = Budgets(client)
        await agent.send(heartbeat=pb_agents.Heartbeat())
        await agent.until(lambda: any(m.WhichOneof("message") == "heartbeat" for m in agent.received))
        assert asked_s(agent) == 0.0
        assert len(looks) == 1, "only at the start, to find the configured limits"
        idle, drawn_w = await power.feed(), (await client.job()).figures.power_w
        assert drawn_w > 0
        assert (idle.measured_w, idle.managed_w, idle.unmanaged_w) == pytest.approx((drawn_w, drawn_w, 0.0))
        await power.set(limit_w=1.0, ramp_w_per_s=0.001)
        await agent.until(lambda: asked_s(agent) == 1.0)

        async def is_falling() -> bool:
            return (await power.feed()).HasField("power_cap_w")

        await until(is_falling)
        assert (await power.feed()).power_cap_w == pytest.approx(drawn_w, rel=0.02), "starting at the draw"
    async with connected(settings) as client:
        agent.received.clear()
        agent.use(client)
        await agent.join()
        assert agent.welcome.power_interval_s == 1.0, "the budget is known"
        await agent.end()


async def test_watchers_of_feeds_see_the_power_without_any_configuration(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, power), planned(client) as agent:
        call: Any = power.stub.WatchFeeds(pb.WatchFeedsRequest(), timeout=TIMEOUT_S)
        assert (await call.read()).feed.managed_w > 0
        await agent.until(lambda: asked_s(agent) == 1.0)
        await agent.send(**reading(agent, 250.0, idle=60.0))
        while not (await call.read()).feed.unmanaged_w:
            pass
        call.cancel()


async def test_readings_of_this_second_count_instead_of_the_latest_iteration(tmp_path: Path) -> None:
    async with serving(tmp_path, feeds=FEEDS) as (client, power), planned(client) as agent:
        iteration_w = (await client.job()).figures.power_w

        async def is_more() -> bool:
            await agent.send(**reading(agent, iteration_w))
            return (await power.feed("hall")).measured_w > 2 * iteration_w

        await until(is_more)


async def test_an_invalid_reading_is_refused_by_itself(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, _):
        await client.register()
        agent = FakeAgent(client, "agent", ALL_PLACES)
        await agent.join()
        await agent.send(power_reading=pb_agents.PowerReading(duration_s=1.0, gpu_uuid=["g"], power_w=[-1.0]))
        await agent.until(lambda: bool(agent.messages_refused))
        refused = agent.messages_refused[0]
        assert (refused.reason, refused.field) == ("INVALID_FIELD", "power_reading.power_w[0]")
        await agent.end()


async def test_a_tolerance_is_kept_exactly_and_the_feed_reports_its_limit_as_not_kept(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, power), planned(client) as agent:
        before = await client.job()
        terms = job_pb2.BudgetTerms(tolerance_percent=5.0, weight=3.0)
        policy = job_pb2.OperatingPolicy(no_slowdown=job_pb2.NoSlowdown(), budget_terms=terms)
        request = job_service_pb2.SetPolicyRequest(job_id="job", policy=policy)
        job = (await client.jobs.SetPolicy(request, timeout=TIMEOUT_S)).job
        assert job.policy.budget_terms == terms
        await power.set(limit_w=1.0)
        await until(lambda: is_held(client))
        await agent.iterate(4)
        held = await client.job()
        overhead_s = max(0.0, before.baseline.iteration_time_s - before.no_slowdown_time.iteration_time_s)
        own_s = before.no_slowdown_time.iteration_time_s + overhead_s
        assert held.budget_target_iteration_time_s > before.max_planned_iteration_time_s
        assert held.budget_target_iteration_time_s + overhead_s <= own_s / 0.95 * (1 + 1e-9)

        async def is_sent() -> bool:
            feed = await power.feed()
            return not feed.is_compliant and list(feed.job_ids_to_pause) == ["job"]

        await until(is_sent)


async def test_the_end_of_a_budget_releases_its_jobs(tmp_path: Path, clock: FleetClock) -> None:
    async with serving(tmp_path) as (client, power), planned(client):
        await power.set(limit_w=1.0, end_s=time.time() + 10 * TIMEOUT_S)
        await until(lambda: is_held(client))
        clock.ahead_s = 10 * TIMEOUT_S
        await until(lambda: is_free(client))
        (budget,) = (await power.listed()).budgets
        assert budget.state == pb.BUDGET_STATE_ENDED


async def test_a_wall_clock_that_jumps_ahead_and_back_ends_no_budget(
    tmp_path: Path, clock: FleetClock
) -> None:
    day_s = 86_400.0
    async with serving(tmp_path) as (client, power), planned(client):
        end_s = time.time() + day_s / 4
        await power.set(limit_w=1.0, end_s=end_s)
        await until(lambda: is_held(client))
        clock.ahead_s = day_s
        await until(lambda: is_free(client))
        clock.ahead_s = 0.0
        await until(lambda: is_held(client))
        (budget,) = (await power.listed()).budgets
        assert budget.state == pb.BUDGET_STATE_IN_FORCE
        await power.set(budget_id="another", limit_w=2.0, end_s=end_s)


async def test_a_fault_of_the_fleets_machine_ends_nothing_and_budgets_still_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("made for the test")

    async with serving(tmp_path) as (client, power), planned(client):
        with capture_logs() as logs, monkeypatch.context() as patch:
            patch.setattr(FleetMachine, "_judge", fail)
            await power.set(limit_w=1.0)

            async def is_logged() -> bool:
                return any("restarts" in line["event"] for line in logs)

            await until(is_logged)
        await until(lambda: is_held(client))
        assert (await client.job()).state == job_pb2.JOB_STATE_PLANNED


RAMP_W_PER_S = 0.01
"""So slow that a power cap on its way differs from one that has jumped, however long a test takes."""


async def power_cap_w(power: Budgets) -> float:
    """Return a feed's power cap once there is one."""

    async def is_limited() -> bool:
        return (await power.feed("hall")).HasField("power_cap_w")

    await until(is_limited)
    return (await power.feed("hall")).power_cap_w


async def cap_on_its_way_w(power: Budgets, ramp: str) -> float:
    """Set a budget, and cancel it where the cap is to rise; return the cap, which will take hours."""
    if ramp == "ramp_down_w_per_s":
        await power.set(feed="hall", limit_w=1.0)
    else:
        await power.set(feed="hall", limit_w=590.0)  # of the 600 W that its plans may draw
        assert await power_cap_w(power) == 590.0
        await power.cancel()
    return await power_cap_w(power)


@pytest.mark.parametrize("ramp", ["ramp_down_w_per_s", "ramp_up_w_per_s"])
async def test_a_power_cap_goes_on_ramping_after_a_fault_of_the_fleets_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ramp: str
) -> None:
    feeds = {"hall": {"hosts": ["*"], ramp: RAMP_W_PER_S}}
    async with serving(tmp_path, feeds=feeds) as (client, power), planned(client):
        before_w = await cap_on_its_way_w(power, ramp)
        judge, judged = FleetMachine._judge, []

        def fail_once(self: FleetMachine, now_s: float) -> list[Command]:
            judged.append(self)
            if len(judged) == 1:
                raise ZeroDivisionError("made for the test")
            return judge(self, now_s)

        monkeypatch.setattr(FleetMachine, "_judge", fail_once)

        async def is_anew() -> bool:
            return len(judged) > 3 and judged[-1] is not judged[0]

        await until(is_anew)
        assert await power_cap_w(power) == pytest.approx(before_w, rel=0.05)
        assert (await power_cap_w(power) - before_w) * (1 if "up" in ramp else -1) >= 0, "on its way"


@pytest.mark.parametrize("ramp", ["ramp_down_w_per_s", "ramp_up_w_per_s"])
async def test_a_power_cap_goes_on_ramping_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ramp: str
) -> None:
    """Also before any agent is back, when nobody knows what is drawn."""
    settings = make_settings(tmp_path, feeds={"hall": {"hosts": ["*"], ramp: RAMP_W_PER_S}})
    async with connected(settings) as client, planned(client):
        power = Budgets(client)
        before_w = await cap_on_its_way_w(power, ramp)
    judge, judged = FleetMachine._judge, []

    def note(self: FleetMachine, now_s: float) -> list[Command]:
        judged.append(self)
        return judge(self, now_s)

    monkeypatch.setattr(FleetMachine, "_judge", note)

    async def is_ticking() -> bool:
        return len(judged) > 3

    async with connected(settings) as client:
        await until(is_ticking)
        assert await power_cap_w(Budgets(client)) == pytest.approx(before_w, rel=0.05)


async def test_watchers_get_the_state_of_feeds_and_their_changes(tmp_path: Path) -> None:
    async with serving(tmp_path, feeds=FEEDS) as (_, power):
        call: Any = power.stub.WatchFeeds(pb.WatchFeedsRequest(), timeout=TIMEOUT_S)
        first = [(await call.read()).feed for _ in range(2)]
        assert [feed.feed for feed in first] == ["default", "hall"]
        assert not first[0].HasField("limit_w")
        await power.set(limit_w=700.0)
        while not (reported := (await call.read()).feed).HasField("limit_w") or reported.feed != "default":
            pass
        assert reported.limit_w == 700.0
        call.cancel()
        other = power.stub.WatchFeeds(pb.WatchFeedsRequest(feed="cellar"), timeout=TIMEOUT_S)
        assert (await refusal(other.read()))[1] == "FEED_NOT_FOUND"


async def test_allocations_run_beside_the_loop_and_statuses_are_made_once_for_all_watchers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_in = set()
    count = 0
    status = FleetMachine._status

    def found(*args: Any) -> Allocation:
        found_in.add(threading.current_thread())
        return allocate(*args)

    def counted(self: FleetMachine, name: str, now_s: float) -> FeedStatus:
        nonlocal count
        count += 1
        return status(self, name, now_s)

    monkeypatch.setattr(machine_module, "allocate", found)
    async with serving(tmp_path) as (client, power), planned(client):
        await power.set(limit_w=1.0)
        await until(lambda: is_held(client))
        assert found_in
        assert threading.current_thread() not in found_in
        monkeypatch.setattr(FleetMachine, "_status", counted)
        for _ in range(100):
            await power.feed()
        assert count < 50, "one per tick, once a second, and not one per reader"


async def test_a_feed_shows_its_limit_and_its_default(tmp_path: Path) -> None:
    feeds = {"hall": {"hosts": ["*"], "limit_w": 5000.0, "default_w": 4000.0}}
    async with serving(tmp_path, feeds=feeds) as (_, power):
        hall = await power.feed("hall")
        assert (hall.own_limit_w, hall.default_w) == (5000.0, 4000.0)
        other = await power.feed()
        for name in ("own_limit_w", "default_w", "judged_w"):
            assert not other.HasField(name)


async def has_no_target(client: Client) -> bool:
    request = job_service_pb2.ListJobEventsRequest(job_id="job", page_size=1000)
    events = (await client.jobs.ListJobEvents(request, timeout=TIMEOUT_S)).events
    changes = [event.budget_target_set for event in events if event.HasField("budget_target_set")]
    return not changes[-1].HasField("iteration_time_s")


async def test_a_budget_that_ends_releases_a_job_that_has_no_plan_at_present(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, power), planned(client) as agent:
        await power.set(limit_w=1.0)
        await until(lambda: is_held(client))
        request = job_service_pb2.MeasureBaselineRequest(job_id="job", request_id="again")
        await client.jobs.MeasureBaseline(request, timeout=TIMEOUT_S)
        await agent.iterate()
        assert await is_free(client), "no plan is slowed down"
        assert not await has_no_target(client), "the next plan will be"
        await power.cancel()
        await until(lambda: has_no_target(client))


async def test_a_budget_that_ends_releases_a_job_whose_ranks_are_lost(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, power), planned(client) as agent:
        await power.set(limit_w=1.0)
        await until(lambda: is_held(client))
        for place in ALL_PLACES:
            reason = rank_pb2.RANK_LEFT_REASON_TRAINER_GONE
            left = pb_agents.RankLeft(job_id="job", rank=agent.place(place), reason=reason)
            await agent.send(rank_left=left)

        async def are_lost() -> bool:
            return (await client.job()).rank_counts.lost_count == len(ALL_PLACES)

        await until(are_lost)
        await power.cancel()
        await until(lambda: has_no_target(client))
