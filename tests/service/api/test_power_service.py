"""Power budgets over gRPC, on a real coordinator with a real store: set, listed, cancelled, kept, watched.

What the fleet's machine decides about them is tested in `tests/service/fleet/power`.
"""

import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, closing
from functools import partialmethod
from pathlib import Path
from typing import Any

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
from perseus.v1 import job_pb2
from perseus.v1 import power_service_pb2 as pb
from tests.service import service_fakes
from tests.service.grpc_fakes import (
    TIMEOUT_S,
    Client,
    FakeAgent,
    connected,
    job_once,
    joined,
    make_settings,
    planned,
    refusal,
    until,
)
from tests.service.sites import Clock

FEEDS = {"hall": {"hosts": ["ho*"], "limit_w": 5000.0}}


class Budgets:
    """The calls of one client about budgets and feeds."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def answered(self, budget_id: str = "b", request_id: str = "r", **parts: Any) -> Any:
        """Set a budget; return the whole answer."""
        for name in ("start", "end"):
            if (time_s := parts.pop(f"{name}_s", None)) is not None:
                parts[f"{name}_time"] = {"seconds": int(time_s), "nanos": int(time_s % 1 * 1e9)}
        wanted: dict[str, Any] = {} if {"limit_w", "percent"} & parts.keys() else {"limit_w": 1000.0}
        return await self.client.ask(
            "SetBudget", budget_id=budget_id, request_id=request_id, **wanted, **parts
        )

    async def set(self, budget_id: str = "b", request_id: str = "r", **parts: Any) -> pb.Budget:
        budget: pb.Budget = (await self.answered(budget_id, request_id, **parts)).budget
        return budget

    async def cancel(self, budget_id: str = "b") -> pb.Budget:
        budget: pb.Budget = (await self.client.ask("CancelBudget", budget_id=budget_id)).budget
        return budget

    async def listed(self, **wanted: Any) -> pb.ListBudgetsResponse:
        answer: pb.ListBudgetsResponse = await self.client.ask("ListBudgets", **wanted)
        return answer

    async def feeds(self) -> list[pb.FeedState]:
        return list((await self.client.ask("ListFeeds")).feeds)

    async def feed(self, name: str = "default") -> pb.FeedState:
        return next(feed for feed in await self.feeds() if feed.feed == name)

    async def feed_once(self, is_so: Callable[[pb.FeedState], bool], name: str = "default") -> pb.FeedState:
        """Wait until a feed is so; return it."""
        latest = pb.FeedState()

        async def is_it_so() -> bool:
            nonlocal latest
            latest = await self.feed(name)
            return is_so(latest)

        await until(is_it_so)
        return latest


@asynccontextmanager
async def serving(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Client, Budgets]]:
    async with connected(make_settings(tmp_path, **settings)) as client:
        yield client, Budgets(client)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time by which budgets begin and end."""
    clock = Clock()
    monkeypatch.setattr(Power, "__init__", partialmethod(Power.__init__, clock=clock))
    return clock


def is_held(job: job_pb2.Job) -> bool:
    return job.HasField("budget_target_iteration_time_s")


def is_free(job: job_pb2.Job) -> bool:
    return not is_held(job)


# ---------------------------------------------------------------------- requests


async def test_a_request_sets_a_budget_once_and_another_one_replaces_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, power):
        first = await power.set(limit_w=900.0, ramp_w_per_s=5.0, correlation_id="evt-1")
        assert (first.limit_w, first.ramp_w_per_s, first.correlation_id) == (900.0, 5.0, "evt-1")
        assert (first.state, first.feed) == (pb.BUDGET_STATE_IN_FORCE, "default")
        assert not first.HasField("end_time")
        assert await power.set(limit_w=1.0) == first, "the same request again"
        second = await power.set(request_id="another", limit_w=800.0, start_s=time.time() + 60)
        assert (second.limit_w, second.state) == (800.0, pb.BUDGET_STATE_SCHEDULED)
        assert list((await power.listed()).budgets) == [second]
        third = await power.answered(request_id="third", limit_w=700.0)
        assert (third.budget.limit_w, third.replaced) == (700.0, second)
        await power.cancel()
        fourth = await power.answered(request_id="fourth", limit_w=600.0)
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


async def test_invalid_requests_about_budgets_are_refused(tmp_path: Path) -> None:
    """Beside numbers out of bounds (`test_bounds_of_requests`) and absent parts (`test_required_fields`)."""
    cases: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"budget_id": "\u00e4"}, {"field": "budget_id"}),
        ({"percent": 1001.0, "feed": "hall"}, {"field": "percent", "found": "1001.0"}),
        ({"percent": 50.0}, {"field": "percent", "found": "none"}),
        ({"ramp_w_per_s": 0.0}, {"field": "ramp_w_per_s"}),
        ({"end_s": 1.0}, {"field": "end_time"}),
        ({"start_s": 4e9, "end_s": 3e9}, {"field": "end_time"}),
        ({"correlation_id": "x" * 257}, {"field": "correlation_id"}),
    ]
    async with serving(tmp_path, feeds=FEEDS) as (_, power):
        for parts, expected in cases:
            _, reason, metadata = await refusal(power.set(**parts))
            assert reason == "INVALID_FIELD", parts
            assert expected.items() <= metadata.items(), parts
        assert (await refusal(power.set(feed="cellar")))[1:] == (
            "FEED_NOT_FOUND",
            {"feed": "cellar", "expected": "default, hall"},
        )
        not_found = (grpc.StatusCode.NOT_FOUND, "BUDGET_NOT_FOUND", {"budget_id": "no"})
        assert await refusal(power.cancel("no")) == not_found
        assert not (await power.listed()).budgets


async def test_the_budgets_of_a_principal_are_limited(tmp_path: Path) -> None:
    async with serving(tmp_path, limit_budgets=2) as (_, power):
        await power.set("b0")
        await power.set("b1")
        assert (await refusal(power.set("b2")))[:2] == (grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_REACHED")
        await power.set("b1", "replaced")
        await power.cancel("b0")
        await power.set("b2")


# ---------------------------------------------------------------------- feeds


async def test_feeds_show_their_limits_and_a_percentage_refers_to_one(tmp_path: Path) -> None:
    feeds = {"hall": {"hosts": ["*"], "limit_w": 5000.0, "default_w": 4000.0}}
    async with serving(tmp_path, feeds=feeds) as (_, power):
        default, hall = await power.feeds()
        assert (hall.own_limit_w, hall.default_w) == (5000.0, 4000.0)
        for name in ("own_limit_w", "default_w", "judged_w", "limit_w"):
            assert not default.HasField(name)
        budget = await power.set(percent=75.0, feed="hall")
        assert (budget.limit_w, budget.percent) == (3750.0, 75.0)
        await power.feed_once(lambda feed: (feed.reference_w, feed.limit_w) == (5000.0, 3750.0), "hall")


async def test_ranks_are_on_the_feed_of_their_hosts(tmp_path: Path) -> None:
    async with serving(tmp_path, feeds=FEEDS) as (client, power):
        agent = await planned(client)
        hall = await power.feed_once(lambda feed: feed.managed_w > 0, "hall")
        default = await power.feed()
        assert hall.measured_w > 0 == default.measured_w
        assert (hall.limit_w, hall.is_compliant) == (5000.0, True)
        watching = client.ask("WatchFeeds")
        assert [(await watching.read()).feed.feed for _ in range(2)] == ["default", "hall"]
        watching.cancel()

        async def is_read() -> bool:
            await agent.send(**reading(agent, hall.managed_w))
            return (await power.feed("hall")).measured_w > 2 * hall.managed_w

        await until(is_read)


@pytest.mark.parametrize(("fail_safe", "lease_s"), [("stock", 30.0), ("last plan", 1e6)])
async def test_plans_outlast_the_coordinator_where_the_last_plan_is_the_fail_safe(
    tmp_path: Path, fail_safe: str, lease_s: float
) -> None:
    feeds = {"hall": {"hosts": ["ho*"], "fail_safe": fail_safe}}
    async with serving(tmp_path, feeds=feeds) as (client, _):
        agent = await planned(client)
        assert {o.lease_s for o in agent.offers if o.HasField("hold")} == {30.0}
        assert {o.lease_s for o in agent.offers if o.HasField("stage_plan")} == {lease_s}


# ---------------------------------------------------------------------- what is drawn


def reading(agent: FakeAgent, each_w: float, **others_w: float) -> dict[str, Any]:
    """Report the draw of the agent's GPUs, all the same, and of others."""
    powers_w = {
        service_fakes.make_gpu(place).uuid + agent.gpu_suffix: each_w for place in agent.ranks
    } | others_w
    figures = {"duration_s": 1.0, "gpu_uuid": list(powers_w), "power_w": list(powers_w.values())}
    return {"power_reading": figures}


async def test_agents_report_power_before_any_iteration(tmp_path: Path) -> None:
    async with serving(tmp_path, feeds=FEEDS) as (client, power):
        agent = await joined(client)
        assert agent.welcome.power_interval_s == 1.0

        async def is_known() -> bool:
            await agent.send(**reading(agent, 250.0, idle=60.0, foreign=400.0))
            # Means over some seconds, the first of which had no readings.
            return 1100.0 < (await power.feed("hall")).unmanaged_w <= 4 * 250 + 460.001

        await until(is_known)

        async def is_impossible() -> bool:
            await agent.send(**reading(agent, 1e7))
            feed = await power.feed("hall")
            return feed.conflicting_gpu_count == 4 and 9_000.0 < feed.unmanaged_w <= 4 * 2500.001

        await until(is_impossible)


def asked_s(agent: FakeAgent) -> float:
    """Return the interval at which the agent is to report its GPUs' draw."""
    heartbeats_s = [heartbeat.power_interval_s for heartbeat in agent.got("heartbeat")]
    return float(max([agent.welcome.power_interval_s, *heartbeats_s]))


async def test_without_a_budget_feeds_are_not_read_and_agents_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    handle_all = FleetMachine.handle_all

    def counting(self: FleetMachine, events: Iterable[Input], now_s: float) -> list[Command]:
        looks.append(now_s)
        return handle_all(self, events, now_s)

    monkeypatch.setattr(FleetMachine, "handle_all", counting)
    async with serving(tmp_path) as (client, power):
        agent = await planned(client)
        await agent.beat()
        assert asked_s(agent) == 0.0
        assert len(looks) == 1, "only at the start, to find the configured limits"
        idle, drawn_w = await power.feed(), (await client.job()).figures.power_w
        assert drawn_w > 0
        assert (idle.measured_w, idle.managed_w, idle.unmanaged_w) == pytest.approx((drawn_w, drawn_w, 0.0))
        await power.set(limit_w=1.0, ramp_w_per_s=0.001)
        await agent.until(lambda: asked_s(agent) == 1.0)
        falling = await power.feed_once(lambda feed: feed.HasField("power_cap_w"))
        assert falling.power_cap_w == pytest.approx(drawn_w, rel=0.02), "starting at the draw"
    async with serving(tmp_path) as (client, _):
        agent.received.clear()
        agent.use(client)
        await agent.join()
        assert agent.welcome.power_interval_s == 1.0, "the budget is known"


async def test_watchers_of_feeds_see_the_power_without_any_configuration_and_changes(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, power):
        agent = await planned(client)
        call = client.ask("WatchFeeds")
        assert (await call.read()).feed.managed_w > 0
        await agent.until(lambda: asked_s(agent) == 1.0)
        await agent.send(**reading(agent, 250.0, idle=60.0))
        while not (await call.read()).feed.unmanaged_w:
            pass
        await power.set(limit_w=700.0)
        while not (reported := (await call.read()).feed).HasField("limit_w"):
            pass
        assert reported.limit_w == 700.0
        call.cancel()
        assert (await refusal(client.ask("WatchFeeds", feed="cellar")))[1] == "FEED_NOT_FOUND"


# ---------------------------------------------------------------------- jobs under a budget


async def test_a_budget_slows_a_job_down_survives_a_restart_and_releases_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, power):
        agent = await planned(client)
        before = await client.job()
        await power.set(limit_w=1.0, correlation_id="evt-1")
        await job_once(client, is_held)
        await agent.settle()
        held = await client.job()
        assert held.min_planned_iteration_time_s > before.max_planned_iteration_time_s
        assert held.budget_target_iteration_time_s == pytest.approx(held.t_slow_s)
        feed = await power.feed_once(lambda feed: not feed.is_compliant)
        assert feed.limit_w == 1.0
        assert list(feed.slowed_job_ids) == list(feed.job_ids_to_pause) == ["job"]
        offers = len(agent.offers)

    async with serving(tmp_path) as (client, power):
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

        # Its owner lets a budget take less than that.
        terms = job_pb2.BudgetTerms(tolerance_percent=5.0, weight=3.0)
        policy = {"no_slowdown": {}, "budget_terms": terms}
        assert (await client.ask("SetPolicy", job_id="job", policy=policy)).job.policy.budget_terms == terms
        own_s = before.no_slowdown_time.iteration_time_s
        overhead_s = max(0.0, before.baseline.iteration_time_s - own_s)
        most_s = (own_s + overhead_s) / 0.95 * (1 + 1e-9) - overhead_s

        def is_tolerated(job: job_pb2.Job) -> bool:
            return before.max_planned_iteration_time_s < job.budget_target_iteration_time_s <= most_s

        await job_once(client, is_tolerated)

        await power.cancel()
        await job_once(client, is_free)
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


async def test_the_end_of_a_budget_releases_its_jobs_unless_the_clock_that_ended_it_goes_back(
    tmp_path: Path, clock: Clock
) -> None:
    day_s = 86_400.0
    async with serving(tmp_path) as (client, power):
        await planned(client)
        end_s = time.time() + day_s / 4
        await power.set(limit_w=1.0, end_s=end_s)
        await job_once(client, is_held)
        clock.ahead_s = day_s
        await job_once(client, is_free)
        assert [budget.state for budget in (await power.listed()).budgets] == [pb.BUDGET_STATE_ENDED]
        clock.ahead_s = 0.0
        await job_once(client, is_held)
        assert [budget.state for budget in (await power.listed()).budgets] == [pb.BUDGET_STATE_IN_FORCE]
        await power.set(budget_id="another", limit_w=2.0, end_s=end_s)


async def has_no_target(client: Client) -> bool:
    events = (await client.ask("ListJobEvents", job_id="job", page_size=1000)).events
    changes = [event.budget_target_set for event in events if event.HasField("budget_target_set")]
    return not changes[-1].HasField("iteration_time_s")


async def lose_plan(client: Client, agent: FakeAgent) -> None:
    await client.ask("MeasureBaseline", job_id="job", request_id="again")
    await agent.iterate()
    assert is_free(await client.job()), "no plan is slowed down"
    assert not await has_no_target(client), "the next plan will be"


async def lose_ranks(client: Client, agent: FakeAgent) -> None:
    await agent.leave()
    await client.all_lost()


@pytest.mark.parametrize("lose", [lose_plan, lose_ranks])
async def test_a_budget_that_ends_releases_a_job_that_has_no_plan_or_rank_at_present(
    tmp_path: Path, lose: Any
) -> None:
    async with serving(tmp_path) as (client, power):
        agent = await planned(client)
        await power.set(limit_w=1.0)
        await job_once(client, is_held)
        await lose(client, agent)
        await power.cancel()
        await until(lambda: has_no_target(client))


# ---------------------------------------------------------------------- restarts


@pytest.mark.parametrize(
    ("damage", "limits_w"),
    [
        # Nothing of it is readable, neither its feed nor its limit.
        ("UPDATE budgets SET budget = substr(budget, 5)", {"default": 0.0, "hall": 0.0}),
        (
            f"""UPDATE budgets SET budget = replace(budget, '"limit_w":', '"limit_w":{"9" * 400}')""",
            {"hall": 0.0},
        ),
        ("UPDATE budgets SET over_time_s = 'soon'", {"hall": 1000.0}),
    ],
    ids=["all", "too large a limit", "end"],
)
async def test_an_unreadable_budget_is_enforced_conservatively_until_it_is_cancelled(
    tmp_path: Path, damage: str, limits_w: dict[str, float]
) -> None:
    async with serving(tmp_path, feeds=FEEDS) as (_, power):
        await power.set("lost", feed="hall")
    database = tmp_path / "perseus.db"
    with closing(sqlite3.connect(database)) as connection, connection:
        assert connection.execute(damage).rowcount == 1
    with capture_logs() as logs:
        async with serving(tmp_path, feeds=FEEDS) as (_, power):

            async def are_limited(expected_w: dict[str, float]) -> bool:
                feeds = await power.feeds()
                return {feed.feed: feed.limit_w for feed in feeds if feed.HasField("limit_w")} == expected_w

            await until(lambda: are_limited(limits_w))
            listed = (await power.listed()).budgets
            assert {budget.feed: budget.limit_w for budget in listed} == limits_w
            assert listed[0].budget_id == "lost"
            for budget in listed:
                assert (await power.cancel(budget.budget_id)).state == pb.BUDGET_STATE_CANCELLED
            await until(lambda: are_limited({"hall": 5000.0}))
    (reported,) = [line for line in logs if line["event"].startswith("a power budget can't be read")]
    assert (reported["log_level"], reported["budget_ids"][0]) == ("error", "lost")
    assert check_database(database) == []


def max_clocks_mhz(agent: FakeAgent) -> list[int]:
    """Return all maximum clocks that the agent received since it joined; 0 for none."""
    carriers = [m for kind in ("rank_accepted", "rank_max_clock") for m in agent.got(kind)]
    return [carrier.max_clock.clock_mhz for carrier in carriers]


async def test_a_restart_lifts_no_max_clock_of_a_job_without_plans(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, power):
        agent = await joined(client)
        await power.set(limit_w=600.0)

        async def is_held_down() -> bool:
            await agent.send(**reading(agent, 250.0))
            return 0 < max_clocks_mhz(agent)[-1] <= 0.6 * service_fakes.CLOCKS_MHZ[0]

        await until(is_held_down)
        held_mhz = max_clocks_mhz(agent)[-1]

    async with serving(tmp_path) as (client, power):
        agent.use(client)
        await agent.join()

        async def is_known() -> bool:
            await agent.send(**reading(agent, 100.0))  # there is room under the power cap
            return (await power.feed()).unmanaged_w > 390.0

        await until(is_known)
        assert set(max_clocks_mhz(agent)) == {held_mhz}


@asynccontextmanager
async def held_beside_another(tmp_path: Path) -> AsyncIterator[tuple[Client, FakeAgent, float]]:
    """Let a budget slow a job down fully, beside an unplanned job; restart without that one's agent."""
    async with serving(tmp_path) as (client, power):
        agent = await planned(client)
        power_w = (await client.job()).figures.power_w
        await client.register(job_id="other")
        other = FakeAgent(client, "agent-other", job_id="other")
        other.gpu_suffix = " of another"
        await other.join()
        await other.iterate()
        await power.set(limit_w=1.4 * power_w)
        # The other job's draw may become known a moment later.
        slowest_s = (await job_once(client, lambda job: is_held_at(job, job.t_slow_s))).t_slow_s
        await agent.iterate(4)
    async with serving(tmp_path, lease_s=10 * TIMEOUT_S) as (client, power):
        agent.use(client)
        await agent.join()

        async def has_managed_power() -> bool:
            await agent.iterate()
            return (await power.feed()).managed_w > 0

        await until(has_managed_power)
        yield client, agent, slowest_s


def is_held_at(job: job_pb2.Job, iteration_time_s: float) -> bool:
    return job.budget_target_iteration_time_s == pytest.approx(iteration_time_s)


async def test_a_restart_lifts_no_target_while_another_jobs_power_is_unknown(
    tmp_path: Path, clock: Clock
) -> None:
    """That job may train on before its agent is back, and its draw would be given away otherwise."""
    async with held_beside_another(tmp_path) as (client, agent, slowest_s):
        assert is_held_at(await client.job(), slowest_s)

        async def is_faster() -> bool:
            await agent.iterate()
            return (await client.job()).budget_target_iteration_time_s < 0.99 * slowest_s

        clock.ahead_s = 10 * TIMEOUT_S  # the other job's lease has expired
        await until(is_faster)


async def test_a_budget_that_ends_after_a_restart_releases_jobs_despite_unknown_power(tmp_path: Path) -> None:
    async with held_beside_another(tmp_path) as (client, _, _):
        assert is_held(await client.job())
        await Budgets(client).cancel()
        await job_once(client, is_free)


RAMP_W_PER_S = 0.01
"""So slow that a power cap on its way differs from one that has jumped, however long a test takes."""


async def power_cap_w(power: Budgets) -> float:
    """Return a feed's power cap once there is one."""
    return (await power.feed_once(lambda feed: feed.HasField("power_cap_w"), "hall")).power_cap_w


def judging_machines(monkeypatch: pytest.MonkeyPatch) -> list[FleetMachine]:
    """Return a list that each machine joins when it handles inputs; the first two machines fail then."""
    handle_all, judging = FleetMachine.handle_all, []

    def note(self: FleetMachine, events: Iterable[Input], now_s: float) -> list[Command]:
        judging.append(self)
        commands = handle_all(self, events, now_s)
        if len(set(judging)) <= 2:
            raise ZeroDivisionError("made for the test")
        return commands

    monkeypatch.setattr(FleetMachine, "handle_all", note)
    return judging


async def test_budgets_hold_after_faults_of_the_fleets_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (client, power):
        await planned(client)
        judging_machines(monkeypatch)
        await power.set(limit_w=1.0)
        assert (await job_once(client, is_held)).state == job_pb2.JOB_STATE_PLANNED


@pytest.mark.parametrize(("ramp", "sign"), [("ramp_down_w_per_s", -1), ("ramp_up_w_per_s", 1)])
async def test_a_power_cap_goes_on_ramping_after_faults_of_the_fleets_machine_and_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ramp: str, sign: int
) -> None:
    feeds = {"hall": {"hosts": ["*"], ramp: RAMP_W_PER_S}}
    async with serving(tmp_path, feeds=feeds) as (client, power):
        await planned(client)
        limit_w = 1.0 if sign < 0 else 590.0  # of the 600 W that its plans may draw
        await power.set(feed="hall", limit_w=limit_w)
        if sign > 0:
            assert await power_cap_w(power) == 590.0
            await power.cancel()
        before_w = await power_cap_w(power)
        with capture_logs() as logs:
            judging = judging_machines(monkeypatch)

            async def is_anew() -> bool:
                return len(judging) > 4 and judging[-1] not in judging[:2]

            await until(is_anew)
        assert sum("restarts" in line["event"] for line in logs) == 2
        assert await power_cap_w(power) == pytest.approx(before_w, rel=0.05)
        assert (await power_cap_w(power) - before_w) * sign >= 0, "on its way"
    before_count = len(judging)

    async def is_ticking() -> bool:
        return len(judging) > before_count + 3

    # Also before any agent is back, when nobody knows what is drawn.
    async with serving(tmp_path, feeds=feeds) as (_, power):
        await until(is_ticking)
        assert await power_cap_w(power) == pytest.approx(before_w, rel=0.05)


async def test_allocations_run_beside_the_loop_and_statuses_are_made_once_for_all_watchers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_in = set()
    count = 0
    status = FleetMachine._status

    def noted(*args: Any) -> Allocation:
        made_in.add(threading.current_thread())
        return allocate(*args)

    def counted(self: FleetMachine, name: str, now_s: float) -> FeedStatus:
        nonlocal count
        count += 1
        return status(self, name, now_s)

    monkeypatch.setattr(machine_module, "allocate", noted)
    async with serving(tmp_path) as (client, power):
        await planned(client)
        await power.set(limit_w=1.0)
        await job_once(client, is_held)
        assert made_in
        assert threading.current_thread() not in made_in
        monkeypatch.setattr(FleetMachine, "_status", counted)
        for _ in range(100):
            await power.feed()
        assert count < 50, "one per tick, once a second, and not one per reader"
