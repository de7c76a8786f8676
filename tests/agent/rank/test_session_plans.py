"""The offers that a session accepts, and when they come into force, by exact command lists."""

import pytest

from perseus.agent.clocks.sets import SetClock
from perseus.agent.link.computation import Computation
from perseus.agent.link.packets import Edge, Finish
from perseus.agent.rank.commands import Send
from perseus.agent.rank.events import Connected, SetNotPermitted, Tick, TrainerJoined
from perseus.agent.rank.messages import (
    Hold,
    PlanRefusalReason,
    RankAccepted,
    RankLeftReason,
    StageClocks,
    Stock,
    rank_left,
)
from perseus.v1 import agent_service_pb2 as wire
from tests.agent.rank.bench import (
    B0,
    B1,
    F0,
    F1,
    LEASE_S,
    ORDER,
    RANK,
    Bench,
    accepted,
    in_force,
    refusal,
    stage,
)


def test_an_offer_comes_into_force_as_a_whole_at_its_start(bench: Bench) -> None:
    assert bench.offer(1, 2, Hold(1000)) == [accepted(1, -1)]
    assert bench.run(0) == []
    assert bench.run(1) == []
    assert bench.iteration(Edge.BEGIN, 2) == [in_force(1, 2), SetClock(1000)]


def test_an_offer_whose_start_mark_was_lost_comes_into_force_at_the_next(bench: Bench) -> None:
    bench.offer(1, 2, Hold(1000))
    bench.run(0)
    assert bench.iteration(Edge.BEGIN, 4) == [in_force(1, 4), SetClock(1000)]


def test_a_computation_of_the_start_iteration_is_enough(bench: Bench) -> None:
    bench.offer(1, 0, Hold(1000))
    assert bench.mark(Edge.BEGIN, 0, F0) == [in_force(1, 0), SetClock(1000)]


def test_a_newer_offer_replaces_a_pending_one(bench: Bench) -> None:
    bench.offer(1, 1, Hold(1000))
    bench.offer(2, 1, Hold(800))
    bench.iteration(Edge.BEGIN, 0)
    assert bench.iteration(Edge.BEGIN, 1) == [in_force(2, 1), SetClock(800)]


def test_the_plan_in_force_offered_again_is_accepted_and_changes_nothing(bench: Bench) -> None:
    bench.offer(1, 0, Hold(1000))
    bench.iteration(Edge.BEGIN, 0)
    bench.offer(2, 1, Hold(800))
    assert bench.offer(1, 0, Hold(1000)) == [accepted(1, 0)]
    assert bench.iteration(Edge.BEGIN, 1) == [], "the other is no longer pending"


def test_an_offer_that_begins_too_early_is_refused(bench: Bench) -> None:
    bench.iteration(Edge.BEGIN, 4)
    reason, message = refusal(bench.offer(1, 4, Hold(1000)))
    assert reason is PlanRefusalReason.PAST_START
    assert message == (
        "job[pipeline 0, stage 1, tensor 0]: expected a start after iteration 4, which has begun, found 4"
    )
    assert bench.offer(1, 5, Hold(1000)) == [accepted(1, 4)]


@pytest.mark.parametrize(
    ("clocks", "found"),
    [(Hold(900), (900,)), (stage(1400, 0, 800, 7), (0, 7))],
)
def test_an_unsupported_clock_is_refused_by_name(
    bench: Bench, clocks: Hold | StageClocks, found: tuple[int, ...]
) -> None:
    (command,) = bench.offer(1, 0, clocks)
    assert isinstance(command, Send)
    refused = command.message
    assert isinstance(refused, wire.PlanAnswer)
    assert PlanRefusalReason(refused.refusal_reason) is PlanRefusalReason.CLOCK_NOT_SUPPORTED
    assert tuple(refused.refused_clocks_mhz) == found
    assert refused.message.endswith(f"GPU GPU-1 supports, found {list(found)} MHz")


@pytest.mark.parametrize(
    ("order", "found"),
    [
        ((F0, F1, B0), "the registered order of 4 computations, found 3"),
        ((F0, F1, B1, B0), "computation 2: expected BACKWARD 0.0, as registered, found BACKWARD 1.0"),
    ],
)
def test_another_order_is_refused(bench: Bench, order: tuple[Computation, ...], found: str) -> None:
    reason, message = refusal(bench.offer(1, 0, StageClocks(order, (1000,) * len(order))))
    assert reason is PlanRefusalReason.ORDER_MISMATCH
    assert message.endswith(found)


def test_an_observing_session_accepts_stock_only_and_sets_nothing() -> None:
    bench = Bench(observe=True)
    assert bench.do(TrainerJoined()) == []
    bench.do(Connected(LEASE_S))
    bench.do(RankAccepted(RANK, ORDER))
    reason, message = refusal(bench.offer(1, 0, Hold(1000)))
    assert reason is PlanRefusalReason.NOT_PERMITTED
    assert message.endswith("the agent only observes")
    assert bench.offer(2, 0, Stock()) == [accepted(2, -1)]
    assert bench.run(0) == [in_force(2, 0)]
    assert bench.do(Finish(0))[-1] == Send(rank_left(RANK, RankLeftReason.FINISHED))


def test_without_permission_the_plan_in_force_ends(bench: Bench) -> None:
    bench.offer(1, 0, Hold(1000))
    assert bench.iteration(Edge.BEGIN, 0) == [in_force(1, 0), SetClock(1000)]
    assert bench.do(SetNotPermitted("needs root")) == [in_force(0, 1)]
    assert refusal(bench.offer(2, 5, Hold(1000))) == (PlanRefusalReason.NOT_PERMITTED, f"{RANK}: needs root")
    assert bench.run(1) == []


def test_marks_may_be_packed_only_where_no_clock_depends_on_them(bench: Bench) -> None:
    assert bench.is_packing_allowed, "nothing was ever set"
    bench.offer(1, 2, Stock())
    assert bench.is_packing_allowed
    bench.run(0, duration_s=0.01)
    bench.offer(2, 3, Hold(1000))
    assert not bench.is_packing_allowed, "before it comes into force"
    for number in (1, 2, 3):
        bench.run(number, duration_s=0.01)
    bench.do(Tick())
    assert not bench.is_packing_allowed
    bench.offer(3, 4, Stock())
    bench.run(4, duration_s=0.01)
    bench.do(Tick())
    assert bench.is_packing_allowed
    bench.limit(1200)
    assert not bench.is_packing_allowed, "the fallback after a silence depends on marks"
    bench.limit(None)
    assert bench.is_packing_allowed
    bench.offer(4, 5, Hold(1000))
    bench.do(SetNotPermitted("not root"))
    assert bench.is_packing_allowed
