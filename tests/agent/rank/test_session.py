"""A session from its trainer's hello to its end, by exact command lists."""

import pytest

from perseus.agent.clocks.sets import ResetClock, SetClock
from perseus.agent.link.packets import Edge, Finish
from perseus.agent.rank.commands import Send
from perseus.agent.rank.events import (
    AgentStops,
    Connected,
    Disconnected,
    Event,
    GpuFailed,
    Heard,
    SetNotPermitted,
    Tick,
    TrainerGone,
    TrainerJoined,
    TrainerSpecified,
)
from perseus.agent.rank.join_state import JOIN_RETRY_S, MAX_JOIN_RETRY_S, MIN_JOIN_RETRY_S
from perseus.agent.rank.messages import (
    Hold,
    PlanId,
    PlanRefusalReason,
    RankAccepted,
    RankLeftReason,
    RankRefused,
    Stock,
    rank_left,
)
from tests.agent.rank.bench import (
    B0,
    F0,
    LEASE_S,
    ORDER,
    RANK,
    Bench,
    accepted,
    clock_set,
    in_force,
    joined,
    refusal,
)


def test_a_rank_is_reset_announced_and_accepted() -> None:
    bench = Bench()
    assert bench.do(TrainerJoined()) == [ResetClock()]
    assert bench.do(Connected(LEASE_S)) == [joined(-1)]
    assert bench.do(RankAccepted(RANK, ORDER)) == []


def test_a_refused_rank_is_announced_again_until_accepted() -> None:
    bench = Bench()
    announcement = [joined(-1)]
    bench.do(Connected(LEASE_S))
    assert bench.do(RankRefused(RANK, "JOB_NOT_FOUND", "")) == []
    assert bench.after(JOIN_RETRY_S / 2, Tick()) == []
    assert bench.after(JOIN_RETRY_S / 2, Tick()) == announcement
    assert bench.after(JOIN_RETRY_S, Tick()) == [], "there is no answer yet"
    bench.do(RankRefused(RANK, "JOB_NOT_FOUND", ""))
    assert bench.after(2 * JOIN_RETRY_S, Tick()) == announcement
    bench.do(RankAccepted(RANK, ORDER))
    assert bench.after(MAX_JOIN_RETRY_S, Tick()) == []


def test_a_refused_rank_is_announced_again_when_the_other_agents_lease_ends() -> None:
    bench = Bench()
    bench.do(Connected(LEASE_S))
    bench.do(RankRefused(RANK, "RANK_ALREADY_SERVED", "", lease_left_s=0.5))
    assert bench.after(0.4, Tick()) == []
    assert bench.after(0.1, Tick()) == [joined(-1)]
    bench.do(RankRefused(RANK, "RANK_ALREADY_SERVED", "", lease_left_s=LEASE_S))
    assert bench.after(2 * JOIN_RETRY_S, Tick()) == [joined(-1)], "the other rank may leave before"
    bench.do(RankRefused(RANK, "RANK_ALREADY_SERVED", "", lease_left_s=0.0))
    assert bench.after(0.0, Tick()) == [], "a lease that has just run out makes no loop of announcements"
    assert bench.after(MIN_JOIN_RETRY_S, Tick()) == [joined(-1)]


def test_a_repeatedly_refused_rank_is_announced_less_and_less_often() -> None:
    bench = Bench()
    bench.do(Connected(LEASE_S))
    waits_s = [bench.refused_for_s() for _ in range(6)]
    assert waits_s == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    bench.do(RankAccepted(RANK, ORDER))
    assert bench.refused_for_s() == JOIN_RETRY_S
    bench.refused_for_s()
    bench.do(Disconnected())
    bench.do(Connected(LEASE_S))
    assert bench.refused_for_s() == JOIN_RETRY_S, "another coordinator perhaps"


def test_a_rank_is_announced_once_its_trainer_has_declared_its_job() -> None:
    bench = Bench(is_registered=False)
    announcement = [joined(-1, spec_fingerprint="work")]
    assert bench.do(Connected(LEASE_S)) == []
    assert bench.after(10 * JOIN_RETRY_S, Tick()) == []
    assert bench.do(TrainerSpecified("work")) == announcement
    assert bench.do(TrainerSpecified("work")) == [], "declared again, after it lost the agent"
    bench.do(Disconnected())
    assert bench.do(Connected(LEASE_S)) == announcement


def test_a_declaration_without_a_coordinator_is_announced_later() -> None:
    bench = Bench(is_registered=False)
    assert bench.do(TrainerSpecified("work")) == []
    assert bench.do(Connected(LEASE_S)) == [joined(-1, spec_fingerprint="work")]


def test_a_plan_ends_with_its_specification(bench: Bench) -> None:
    bench.offer(1, 0, Hold(1000))
    bench.iteration(Edge.BEGIN, 0)
    assert bench.do(TrainerSpecified("other work")) == [
        ResetClock(),
        in_force(0, 1),
        joined(0, spec_fingerprint="other work"),
    ]
    assert refusal(bench.offer(2, 5, Hold(1000)))[0] is PlanRefusalReason.UNKNOWN_RANK


def test_reconnecting_announces_the_plan_in_force(bench: Bench) -> None:
    bench.offer(1, 0, Hold(1000))
    bench.iteration(Edge.BEGIN, 0)
    assert bench.do(Disconnected()) == []
    assert bench.do(Connected(LEASE_S)) == [joined(0, PlanId("e", 1))]
    assert refusal(bench.offer(2, 5, Stock()))[0] is PlanRefusalReason.UNKNOWN_RANK
    assert bench.do(RankAccepted(RANK, ORDER)) == [], "the plan stays"


def test_another_order_ends_a_plan(bench: Bench) -> None:
    bench.offer(1, 0, Hold(1000))
    bench.iteration(Edge.BEGIN, 0)
    assert bench.do(RankAccepted(RANK, (F0, B0))) == [ResetClock(), in_force(0, 1)]
    assert bench.iteration(Edge.BEGIN, 1) == []


def test_a_refused_rank_goes_to_stock(bench: Bench) -> None:
    bench.offer(1, 0, Hold(1000))
    bench.iteration(Edge.BEGIN, 0)
    commands = bench.do(RankRefused(RANK, "RANK_ALREADY_SERVED", ""))
    assert commands == [ResetClock(), in_force(0, 1)]


def test_an_expired_lease_means_stock(bench: Bench) -> None:
    bench.offer(1, 0, Hold(1000))
    bench.iteration(Edge.BEGIN, 0)
    assert bench.after(LEASE_S, Heard()) == []
    assert bench.after(LEASE_S, Tick()) == []
    assert bench.after(0.1, Tick()) == [ResetClock(), in_force(0, 1)]
    assert bench.after(0.1, Tick()) == []
    assert bench.iteration(Edge.BEGIN, 1) == []


def test_a_lease_that_expires_while_disconnected_is_reported_afterwards(bench: Bench) -> None:
    bench.offer(1, 0, Hold(1000))
    bench.iteration(Edge.BEGIN, 0)
    bench.do(Disconnected())
    assert bench.after(LEASE_S + 0.1, Tick()) == [ResetClock()]
    assert bench.do(Connected(LEASE_S)) == [joined(0)]
    bench.do(RankAccepted(RANK, ORDER))
    assert bench.offer(1, 1, Hold(1000)) == [accepted(1, 0)]
    assert bench.iteration(Edge.BEGIN, 1) == [in_force(1, 1), SetClock(1000)]


def test_a_pending_plan_has_a_lease_too(bench: Bench) -> None:
    bench.offer(1, 1, Hold(1000))
    bench.iteration(Edge.BEGIN, 0)
    assert bench.after(LEASE_S + 0.1, Tick()) == [in_force(0, 1)]  # otherwise the session would wait for it
    assert bench.iteration(Edge.BEGIN, 1) == []


def test_an_accepted_plan_that_can_not_be_kept_is_withdrawn(bench: Bench) -> None:
    bench.offer(1, 1, Hold(1000))
    bench.iteration(Edge.BEGIN, 0)
    assert bench.do(SetNotPermitted("needs root")) == [in_force(0, 1)]


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (Finish(0), RankLeftReason.FINISHED),
        (TrainerGone(), RankLeftReason.TRAINER_GONE),
        (GpuFailed("fell off the bus"), RankLeftReason.GPU_FAILED),
    ],
)
def test_every_end_resets_the_clock_and_reports_the_reason(
    bench: Bench, event: Event, reason: RankLeftReason
) -> None:
    bench.offer(1, 0, Hold(1000))
    bench.iteration(Edge.BEGIN, 0)
    assert bench.do(event) == [ResetClock(), Send(rank_left(RANK, reason))]
    assert bench.session.has_ended
    for late in (TrainerGone(), Tick(), Connected(LEASE_S), clock_set(1000, 0.0)):
        assert bench.do(late) == []
    assert bench.offer(2, 9, Hold(800)) == []


def test_an_agent_that_stops_resets_and_leaves_the_goodbye_to_the_stream(bench: Bench) -> None:
    bench.offer(1, 0, Hold(1000))
    bench.iteration(Edge.BEGIN, 0)
    assert bench.do(AgentStops()) == [ResetClock()]
    assert bench.session.has_ended
