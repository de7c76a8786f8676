"""A session from its trainer's hello to its end: its rank, the offers that it accepts, and when plans change.

Exact lists of commands.
"""

import pytest

from perseus.agent.clocks.sets import ResetClock, SetClock
from perseus.agent.link.computation import Computation
from perseus.agent.link.packets import Finish
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
    StageClocks,
    Stock,
    rank_left,
)
from tests.agent.rank.bench import (
    B0,
    B1,
    F0,
    F1,
    LEASE_S,
    ORDER,
    RANK,
    After,
    Bench,
    Run,
    Script,
    accepted,
    begin,
    clock_set,
    end,
    in_force,
    joined,
    limit,
    offer,
    refused,
    stage,
)

REFUSED = RankRefused(RANK, "JOB_NOT_FOUND", "")
UNKNOWN = (PlanRefusalReason.UNKNOWN_RANK, "not announced, or not accepted yet")
HELD: Script = [offer(1, 0, Hold(1000)), (begin(0), [in_force(1, 0), SetClock(1000)])]


def served_elsewhere(lease_left_s: float) -> RankRefused:
    return RankRefused(RANK, "RANK_ALREADY_SERVED", "", lease_left_s=lease_left_s)


FROM_HELLO: dict[str, Script] = {
    "a rank is reset, announced and accepted": [
        (TrainerJoined(), [ResetClock()]),
        (Connected(LEASE_S), [joined(-1)]),
        (RankAccepted(RANK, ORDER), []),
    ],
    "marks before the rank is accepted set nothing": [
        Connected(LEASE_S),
        (Run(0), []),
        begin(1),
        RankAccepted(RANK, ORDER),
        (end(F0), []),
        (end(1), []),
        (Run(2), []),
    ],
    "a refused rank is announced again until accepted": [
        Connected(LEASE_S),
        (REFUSED, []),
        (After(JOIN_RETRY_S / 2), []),
        (After(JOIN_RETRY_S / 2), [joined(-1)]),
        (After(JOIN_RETRY_S), []),  # there is no answer yet
        REFUSED,
        (After(2 * JOIN_RETRY_S), [joined(-1)]),
        RankAccepted(RANK, ORDER),
        (After(MAX_JOIN_RETRY_S), []),
    ],
    "a refused rank is announced again when the other agent's lease ends": [
        Connected(LEASE_S),
        served_elsewhere(0.5),
        (After(0.4), []),
        (After(0.1), [joined(-1)]),
        served_elsewhere(LEASE_S),
        (After(2 * JOIN_RETRY_S), [joined(-1)]),  # the other rank may leave before
        served_elsewhere(0.0),
        (Tick(), []),  # a lease that has just run out makes no loop of announcements
        (After(MIN_JOIN_RETRY_S), [joined(-1)]),
    ],
}
UNSPECIFIED: dict[str, Script] = {
    "a rank is announced once its trainer has declared its job": [
        (Connected(LEASE_S), []),
        (After(10 * JOIN_RETRY_S), []),
        (TrainerSpecified("work"), [joined(-1, spec_fingerprint="work")]),
        (TrainerSpecified("work"), []),  # declared again, after it lost the agent
        Disconnected(),
        (Connected(LEASE_S), [joined(-1, spec_fingerprint="work")]),
    ],
    "a declaration without a coordinator is announced later": [
        (TrainerSpecified("work"), []),
        (Connected(LEASE_S), [joined(-1, spec_fingerprint="work")]),
    ],
}
ACCEPTED: dict[str, Script] = {
    "a plan ends with its specification": [
        *HELD,
        (
            TrainerSpecified("other work"),
            [ResetClock(), in_force(0, 1), joined(0, spec_fingerprint="other work")],
        ),
        (offer(2, 5, Hold(1000)), [refused(2, *UNKNOWN, 0)]),
    ],
    "reconnecting announces the plan in force, which stays": [
        *HELD,
        (Disconnected(), []),
        (Connected(LEASE_S), [joined(0, PlanId("e", 1))]),
        (offer(2, 5, Stock()), [refused(2, *UNKNOWN, 0)]),
        (RankAccepted(RANK, ORDER), []),
    ],
    "another order ends a plan": [
        *HELD,
        (RankAccepted(RANK, (F0, B0)), [ResetClock(), in_force(0, 1)]),
        (begin(1), []),
    ],
    "a refused rank goes to stock": [*HELD, (REFUSED, [ResetClock(), in_force(0, 1)])],
    "an expired lease means stock": [
        *HELD,
        (After(LEASE_S, Heard()), []),
        (After(LEASE_S), []),
        (After(0.1), [ResetClock(), in_force(0, 1)]),
        (After(0.1), []),
        (begin(1), []),
    ],
    "a lease that expires while disconnected is reported afterwards": [
        *HELD,
        Disconnected(),
        (After(LEASE_S + 0.1), [ResetClock()]),
        (Connected(LEASE_S), [joined(0)]),
        RankAccepted(RANK, ORDER),
        (offer(1, 1, Hold(1000)), [accepted(1, 0)]),
        (begin(1), [in_force(1, 1), SetClock(1000)]),
    ],
    "a pending plan has a lease too": [
        offer(1, 1, Hold(1000)),
        begin(0),
        (After(LEASE_S + 0.1), [in_force(0, 1)]),  # otherwise the session would wait for it
        (begin(1), []),
    ],
    "an accepted plan that can't be kept is withdrawn": [
        offer(1, 1, Hold(1000)),
        begin(0),
        (SetNotPermitted("needs root"), [in_force(0, 1)]),
    ],
    "without permission the plan in force ends": [
        *HELD,
        (SetNotPermitted("needs root"), [in_force(0, 1)]),
        (offer(2, 5, Hold(1000)), [refused(2, PlanRefusalReason.NOT_PERMITTED, "needs root", 0)]),
        (limit(1000), []),
        (Run(1), []),
    ],
    "an agent that stops resets and leaves the goodbye to the stream": [
        *HELD,
        (AgentStops(), [ResetClock()]),
        (Tick(), []),
    ],
    # --- Offers -------------------------------------------------------------------------------------------
    "an offer comes into force as a whole at its start": [
        (offer(1, 2, Hold(1000)), [accepted(1, -1)]),
        (Run(0), []),
        (Run(1), []),
        (begin(2), [in_force(1, 2), SetClock(1000)]),
    ],
    "an offer whose start mark was lost comes into force at the next": [
        offer(1, 2, Hold(1000)),
        Run(0),
        (begin(4), [in_force(1, 4), SetClock(1000)]),
    ],
    "a computation of the start iteration is enough": [
        offer(1, 0, Hold(1000)),
        (begin(F0, iteration=0), [in_force(1, 0), SetClock(1000)]),
    ],
    "a newer offer replaces a pending one": [
        offer(1, 1, Hold(1000)),
        offer(2, 1, Hold(800)),
        begin(0),
        (begin(1), [in_force(2, 1), SetClock(800)]),
    ],
    "the plan in force offered again is accepted and changes nothing": [
        *HELD,
        offer(2, 1, Hold(800)),
        (offer(1, 0, Hold(1000)), [accepted(1, 0)]),
        (begin(1), []),  # the other is no longer pending
    ],
    "a plan of the same version of another epoch is another plan": [
        *HELD,
        (offer(1, 1, Hold(800), epoch="f"), [accepted(1, 0, epoch="f")]),
        (begin(1), [in_force(1, 1, epoch="f"), SetClock(800)]),
    ],
    "an offer that begins too early is refused": [
        begin(4),
        (
            offer(1, 4, Hold(1000)),
            [
                refused(
                    1,
                    PlanRefusalReason.PAST_START,
                    "expected a start after iteration 4, which has begun, found 4",
                    4,
                )
            ],
        ),
        (offer(1, 5, Hold(1000)), [accepted(1, 4)]),
    ],
}
# --- Urgent offers, after two iterations of a plan ----------------------------------------------------------
SLOW = stage(1000, 800, 1000, 800)
URGENT: dict[str, Script] = {
    "the current computation gets its clock at once": [
        begin(2),
        begin(F0),
        (offer(2, 4, SLOW, is_urgent=True), [accepted(2, 2), SetClock(1000), in_force(2, 2)]),
        end(F0),
        (begin(F1), [SetClock(1000)]),  # because B0 is faster, and its begin is unknown
    ],
    "a waiting GPU gets the next computation's clock": [
        begin(2),
        begin(F0),
        end(F0),
        (offer(2, 4, SLOW, is_urgent=True), [accepted(2, 2), SetClock(800), in_force(2, 2)]),
    ],
    "it is never too late": [
        begin(7),
        (offer(2, 3, SLOW, is_urgent=True), [accepted(2, 7), SetClock(1000), in_force(2, 7)]),
    ],
    "it is in force at once between iterations": [
        (offer(2, 4, SLOW, is_urgent=True), [accepted(2, 1), in_force(2, 1)]),
    ],
    "it replaces the pending plan": [
        offer(2, 5, Hold(1200)),
        offer(3, 6, SLOW, is_urgent=True),
        (begin(6), [SetClock(1000)]),
        (offer(3, 6, SLOW, is_urgent=True), [accepted(3, 6)]),  # it is in force
    ],
    "an invalid one is refused": [
        (
            offer(2, 4, Hold(1234), is_urgent=True),
            [
                refused(
                    2,
                    PlanRefusalReason.CLOCK_NOT_SUPPORTED,
                    "expected clocks that GPU GPU-1 supports, found [1234] MHz",
                    1,
                    (1234,),
                )
            ],
        ),
        REFUSED,
        (offer(3, 4, SLOW, is_urgent=True), [refused(3, *UNKNOWN, 1)]),
    ],
    "an iteration that left its order stays at stock": [
        begin(2),
        begin(B0, ordinal=0),
        (offer(2, 4, SLOW, is_urgent=True), [accepted(2, 2), in_force(2, 2)]),
        (begin(3), [SetClock(1000)]),
    ],
}


@pytest.mark.parametrize("script", FROM_HELLO.values(), ids=FROM_HELLO)
def test_from_hello(script: Script) -> None:
    Bench().follow(script)


@pytest.mark.parametrize("script", UNSPECIFIED.values(), ids=UNSPECIFIED)
def test_without_a_declared_job(script: Script) -> None:
    Bench(is_registered=False).follow(script)


def test_an_agent_that_only_observes_accepts_stock_only_and_sets_nothing() -> None:
    refusal = refused(1, PlanRefusalReason.NOT_PERMITTED, "the agent only observes")
    bench = Bench(observe=True)
    bench.follow(
        [
            (TrainerJoined(), []),
            Connected(LEASE_S),
            RankAccepted(RANK, ORDER),
            (offer(1, 0, Hold(1000)), [refusal]),
            (offer(2, 0, Stock()), [accepted(2, -1)]),
            (limit(1000), []),
            (Run(0), [in_force(2, 0)]),
            (begin(1), []),
            (begin(F0), []),
        ]
    )
    assert bench.do(Finish(0))[-1] == Send(rank_left(RANK, RankLeftReason.FINISHED))


@pytest.mark.parametrize("script", ACCEPTED.values(), ids=ACCEPTED)
def test_an_accepted_rank(bench: Bench, script: Script) -> None:
    bench.follow(script)


@pytest.mark.parametrize("script", URGENT.values(), ids=URGENT)
def test_an_urgent_offer(bench: Bench, script: Script) -> None:
    bench.do(offer(1, 0, stage(1400, 1400, 1400, 1400)), Run(0), Run(1))
    bench.follow(script)


def refused_for_s(bench: Bench) -> float:
    """The time from a refusal to the next announcement."""
    bench.do(REFUSED)
    refused_at_s = bench.now_s
    while not bench.do(After(0.25)):
        assert bench.now_s < refused_at_s + 60.0, "it is not announced again"
    return bench.now_s - refused_at_s


def test_a_repeatedly_refused_rank_is_announced_less_and_less_often() -> None:
    bench = Bench()
    bench.do(Connected(LEASE_S))
    waits_s = [refused_for_s(bench) for _ in range(6)]
    assert waits_s == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    bench.do(RankAccepted(RANK, ORDER))
    assert refused_for_s(bench) == JOIN_RETRY_S
    refused_for_s(bench)
    bench.do(Disconnected(), Connected(LEASE_S))
    assert refused_for_s(bench) == JOIN_RETRY_S, "another coordinator perhaps"


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
    is_lasting = limit(1000, outlasts_lease=True)
    bench.follow([*HELD, is_lasting, (event, [ResetClock(), Send(rank_left(RANK, reason))])])
    assert bench.session.has_ended
    for late in (TrainerGone(), Tick(), Connected(LEASE_S), clock_set(1000, 0.0), offer(2, 9, Hold(800))):
        assert bench.do(late) == []


def test_a_rank_that_ends_before_it_is_accepted_with_its_new_order_says_with_which_one(bench: Bench) -> None:
    left = Send(rank_left(RANK, RankLeftReason.FINISHED))
    bench.do(Connected(LEASE_S), TrainerSpecified("new work"), REFUSED)
    assert bench.do(Finish(0)) == [ResetClock(), joined(-1, spec_fingerprint="new work"), left]


@pytest.mark.parametrize(
    ("clocks", "found"),
    [(Hold(900), (900,)), (stage(1400, 0, 800, 7), (0, 7))],
)
def test_an_unsupported_clock_is_refused_by_name(
    bench: Bench, clocks: Hold | StageClocks, found: tuple[int, ...]
) -> None:
    message = f"expected clocks that GPU GPU-1 supports, found {list(found)} MHz"
    expected = refused(1, PlanRefusalReason.CLOCK_NOT_SUPPORTED, message, -1, found)
    assert bench.do(offer(1, 0, clocks)) == [expected]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ((F0, F1, B0), "expected the registered order of 4 computations, found 3"),
        ((F0, F1, B1, B0), "computation 2: expected BACKWARD 0.0, as registered, found BACKWARD 1.0"),
    ],
)
def test_another_order_is_refused(bench: Bench, order: tuple[Computation, ...], message: str) -> None:
    offered = offer(1, 0, StageClocks(order, (1000,) * len(order)))
    assert bench.do(offered) == [refused(1, PlanRefusalReason.ORDER_MISMATCH, message)]


def test_marks_may_be_packed_only_where_no_clock_depends_on_them(bench: Bench) -> None:
    assert bench.is_packing_allowed, "nothing was ever set"
    bench.do(offer(1, 2, Stock()))
    assert bench.is_packing_allowed
    bench.do(Run(0, 0.01), offer(2, 3, Hold(1000)))
    assert not bench.is_packing_allowed, "before it comes into force"
    bench.do(Run(1, 0.01), Run(2, 0.01), Run(3, 0.01), Tick())
    assert not bench.is_packing_allowed
    bench.do(offer(3, 4, Stock()), Run(4, 0.01), Tick())
    assert bench.is_packing_allowed
    bench.do(limit(1200))
    assert not bench.is_packing_allowed, "the fallback after a silence depends on marks"
    bench.do(limit(None))
    assert bench.is_packing_allowed
    bench.do(offer(4, 5, Hold(1000)), SetNotPermitted("not root"))
    assert bench.is_packing_allowed
