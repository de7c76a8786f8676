"""The clocks that a session sets, and when, by exact lists of commands.

Its maximum clock replaces stock where nothing is planned, and limits held clocks.
"""

from itertools import pairwise

import pytest

from perseus.agent.clocks.foreign import ForeignClock
from perseus.agent.clocks.sets import RepeatSet, ResetClock, ScheduleClock, SetClock
from perseus.agent.energy.counter import CounterChange
from perseus.agent.link.computation import Computation, Kind
from perseus.agent.rank.commands import Command
from perseus.agent.rank.events import (
    Connected,
    Disconnected,
    Heard,
    Tick,
)
from perseus.agent.rank.messages import Hold, MaxClock, PlanId, RankAccepted, RankRefused, StageClocks, Stock
from tests.agent.rank.bench import (
    B0,
    B1,
    F0,
    F1,
    LEASE_S,
    ORDER,
    RANK,
    STEP,
    After,
    Bench,
    Run,
    Script,
    begin,
    clock_set,
    counted,
    end,
    idle_at,
    in_force,
    joined,
    limit,
    offer,
    stage,
    telemetry,
)

STEADY = stage(1000, 1000, 800, 800)
PLAN = stage(1400, 1200, 1400, 1200)
UNDER_A_MAX_CLOCK: Script = [(limit(1000), [SetClock(1000)]), offer(1, 0, PLAN)]

SCRIPTS: dict[str, Script] = {
    "raises come early and lowers at the end": [
        offer(1, 0, stage(1000, 1200, 800, 1400)),
        (begin(0), [in_force(1, 0), SetClock(1000)]),
        (begin(F0), [SetClock(1200)]),  # F1 is faster
        (end(F0), []),
        (begin(F1), []),  # B0 is slower
        (end(F1), [SetClock(800)]),
        (begin(B0), [SetClock(1400)]),  # B1 is faster
        (end(B0), []),
        (begin(B1), []),  # the next iteration's F0 is slower
        (end(B1), [idle_at(100.08)]),  # and may be long in coming
        (end(0), []),
        (begin(1), [SetClock(1000)]),
    ],
    "back to stock is a raise": [
        offer(1, 0, Hold(800)),
        Run(0),
        offer(2, 2, Stock()),
        begin(1),
        *[(mark, []) for computation in ORDER[:-1] for mark in (begin(computation), end(computation))],
        (begin(B1), [ResetClock()]),
        (end(B1), []),
        end(1),
        (begin(2), [in_force(2, 2)]),
    ],
    "a deviating iteration runs at stock until the next": [
        offer(1, 0, STEADY),
        Run(0),
        (begin(1), [SetClock(1000)]),
        (begin(B0, ordinal=0), [ResetClock()]),
        (end(B0, ordinal=0), []),
        (begin(F0, ordinal=1), []),
        end(1),
        (begin(2), [SetClock(1000)]),
    ],
    "lost marks leave the clocks right": [
        offer(1, 0, stage(1000, 1200, 800, 1400)),
        begin(0),
        begin(F0),
        # F0's end and all of F1 are lost.
        (begin(B0), [SetClock(1400)]),
        # B0's end and B1's begin are lost.
        (end(B1), [idle_at(100.08)]),
        (end(F0), []),  # it comes late
    ],
    "marks of another iteration are ignored": [
        offer(1, 0, STEADY),
        Run(3),
        (begin(F1, iteration=2), []),
        (begin(2), []),
        (end(F1, iteration=2), []),
        (end(2), []),
    ],
    # --- The maximum clock --------------------------------------------------------------------------------
    "offered stock is at the maximum clock": [
        limit(1000),
        offer(1, 0, Stock()),
        (begin(0), [in_force(1, 0)]),
        begin(F0),
        (limit(800), [SetClock(800)]),
    ],
    "held clocks are limited and restored": [
        offer(1, 0, Hold(1200)),
        begin(0),
        begin(F0),
        (limit(1000), [SetClock(1000)]),
        (limit(1400), [SetClock(1200)]),
        (limit(None), []),
    ],
    "an iteration that leaves its order falls back to the maximum clock": [
        *UNDER_A_MAX_CLOCK,
        (begin(0), [in_force(1, 0), SetClock(1400)]),
        (begin(B0, ordinal=0), [SetClock(1000)]),
    ],
    "a rank that is refused or joins again has the maximum clock that comes with the answer": [
        limit(1000),
        (Disconnected(), []),  # the lease runs
        Connected(LEASE_S),
        (RankAccepted(RANK, ORDER, MaxClock(800)), [SetClock(800)]),
        (RankAccepted(RANK, ORDER), [ResetClock()]),
        (RankRefused(RANK, "JOB_QUARANTINED", "", MaxClock(800)), [SetClock(800)]),
        (RankRefused(RANK, "JOB_NOT_FOUND", ""), [ResetClock()]),
    ],
    "another order runs at the maximum clock of its answer": [
        (RankAccepted(RANK, (F0, F1), MaxClock(1000)), [SetClock(1000)]),
        (begin(0), []),
        (begin(F0), []),
    ],
    "a refusal ends a plan at the maximum clock that comes with it": [
        *UNDER_A_MAX_CLOCK,
        begin(0),
        (RankRefused(RANK, "JOB_QUARANTINED", "", MaxClock(800)), [SetClock(800), in_force(0, 1)]),
    ],
    "the maximum clock ends with the lease without a plan": [
        limit(1000),
        (After(LEASE_S - 0.1), []),
        (After(0.2), [ResetClock()]),
    ],
    "the maximum clock ends with the lease and so does the plan": [
        *UNDER_A_MAX_CLOCK,
        begin(0),
        begin(F0),
        (After(LEASE_S + 0.1), [ResetClock(), in_force(0, 1)]),
    ],
    "a maximum clock that outlasts the lease keeps the plan with it": [
        limit(1000, outlasts_lease=True),
        offer(1, 0, PLAN),
        begin(0),
        Disconnected(),
        (After(10 * LEASE_S), [SetClock(1000)]),
        (begin(1), [SetClock(1400)]),
        (Connected(LEASE_S), [joined(1, PlanId("e", 1))]),
    ],
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_clocks(bench: Bench, script: Script) -> None:
    bench.follow(script)


MIXED = (F0, STEP, B0, Computation(Kind.FIXED, 1))
OWN_ORDERS: dict[str, tuple[tuple[Computation, ...], Script]] = {
    "fixed computations have no clock of their own": (
        MIXED,
        [
            offer(1, 0, stage(1000, 0, 800, 0, order=MIXED)),
            (begin(0), [in_force(1, 0), SetClock(1000)]),
            (begin(F0), []),
            (end(F0), [SetClock(800)]),  # the step may run at the clock that comes next
            (begin(STEP), []),
            (end(STEP), []),
            (begin(B0), [SetClock(1000)]),
        ],
    ),
    "a plan of fixed computations is stock": (
        (STEP,),
        [offer(1, 0, stage(0, order=(STEP,))), (Run(0), [in_force(1, 0)])],
    ),
    "fixed computations of a plan without others are at the maximum clock": (
        (STEP,),
        [offer(1, 0, stage(0, order=(STEP,))), begin(0), begin(STEP), (limit(1000), [SetClock(1000)])],
    ),
}


@pytest.mark.parametrize(("order", "script"), OWN_ORDERS.values(), ids=OWN_ORDERS)
def test_fixed_computations(order: tuple[Computation, ...], script: Script) -> None:
    Bench(order).accepted().follow(script)


def clocks_of(commands: list[Command]) -> list[Command]:
    return [command for command in commands if isinstance(command, SetClock | ResetClock | ScheduleClock)]


def train(bench: Bench, count: int) -> None:
    for number in range(count):
        bench.do(Run(number), Heard())


def test_a_hung_trainer_goes_to_stock_and_is_resumed(bench: Bench) -> None:
    bench.do(offer(1, 0, STEADY))
    train(bench, 3)
    bench.do(begin(3), begin(F0))
    assert ResetClock() not in bench.do(After(0.9))
    assert ResetClock() in bench.do(After(0.2))
    bench.do(After(60.0, Heard()))
    assert bench.do(Tick()) == [], "once, and the plan stays in force"
    assert bench.do(end(F0)) == [SetClock(1000)]


def test_a_trainer_that_hangs_before_a_scheduled_raise_goes_to_the_maximum_clock(bench: Bench) -> None:
    """Its computation was at the maximum clock; the raise came by itself."""
    bench.do(limit(800), offer(1, 0, stage(800, 1400, 800, 1400)))
    train(bench, 4)
    bench.do(begin(4), begin(F0))
    scheduled = clocks_of(bench.do(After(0.1, Heard()), end(F0)))
    assert any(isinstance(some, ScheduleClock) and some.clock_mhz == 1400 for some in scheduled)
    bench.do(After(1.0, Heard()))
    assert SetClock(800) in bench.do(After(1.0))


def irregular(bench: Bench, number: int, *computations: Computation) -> list[Command]:
    """An iteration of these computations only."""
    commands = bench.do(begin(number))
    for ordinal, computation in enumerate(computations):
        for mark in (begin, end):
            bench.now_s += 0.1
            commands += bench.do(mark(computation, ordinal=ordinal))
    bench.now_s += 0.1
    return commands + bench.do(end(number))


def test_after_two_irregular_iterations_they_run_at_stock_until_a_regular_one(bench: Bench) -> None:
    counted(bench, 0.0)
    bench.do(offer(1, 0, STEADY), Run(0))
    for number in (1, 2):
        assert SetClock(1000) in irregular(bench, number, F0, B0), "it begins as planned"
    assert clocks_of(irregular(bench, 3, F0, B0)) == []
    assert clocks_of(bench.do(Run(4))) == [], "it was not known that it would be regular"
    assert clocks_of(bench.do(begin(5))) == [SetClock(1000)]
    bench.now_s += 0.1
    (*_, message) = telemetry(counted(bench, 60.0))
    reported = {row.iteration: row.is_regular for row in message.iterations}
    assert reported == {0: True, 1: False, 2: False, 3: False, 4: False}
    assert {row.plan_version for row in message.iterations} == {1}


def test_shorter_iterations_differ_too(bench: Bench) -> None:
    bench.do(offer(1, 0, Hold(1000)))
    irregular(bench, 0, F0)
    irregular(bench, 1, F0)
    assert ResetClock() in bench.do(begin(2))


@pytest.mark.parametrize("computation", [Computation(Kind.FORWARD, 7), Computation(Kind.FORWARD, 0, 1)])
def test_an_unknown_computation_is_a_deviation(bench: Bench, computation: Computation) -> None:
    bench.do(offer(1, 0, Hold(1000)), begin(0))
    assert bench.do(begin(computation, ordinal=0)) == [ResetClock()]


@pytest.mark.parametrize(("max_clock_mhz", "clock_mhz"), [(1000, 1000), (1199, 1000), (5000, 1400), (1, 800)])
def test_a_rank_without_a_plan_runs_at_its_highest_clock_within_the_maximum_clock(
    bench: Bench, max_clock_mhz: int, clock_mhz: int
) -> None:
    assert bench.do(limit(max_clock_mhz)) == [SetClock(clock_mhz)]
    assert clocks_of(bench.do(Run(0))) == []
    assert bench.do(limit(None)) == [ResetClock()]


@pytest.mark.parametrize(
    ("clocks", "commands", "has_clock_change"),
    [(None, [SetClock(1000)], True), (PLAN, [], False)],
    ids=["at stock it applies and voids the measurements", "of a stage plan it changes nothing"],
)
def test_a_maximum_clock_during_an_iteration(
    bench: Bench, clocks: StageClocks | None, commands: list[Command], has_clock_change: bool
) -> None:
    counted(bench, 0.0)
    bench.do(Run(0), *([offer(1, 1, clocks)] if clocks else []), begin(1), begin(F0))
    assert bench.do(limit(1000)) == commands
    bench.now_s += 0.1
    bench.do(end(F0), end(1))
    bench.now_s += 0.05
    rows = [row for each in telemetry(counted(bench, 100.0)) for row in each.iterations]
    assert [(row.iteration, row.has_clock_change) for row in rows] == [(0, False), (1, has_clock_change)]


# --- Another client of the driver --------------------------------------------------------------------------


def run_reading(bench: Bench, first: int, count: int, read_mhz: int) -> list[Command]:
    """Run iterations of 0.8 s, with a clock read in the middle of each computation."""
    commands: list[Command] = []
    for number in range(first, first + count):
        commands += bench.do(begin(number))
        for computation in bench.order:
            commands += bench.do(begin(computation))
            bench.now_s += 0.1
            change = CounterChange(bench.now_s, bench.now_s, 0.002, 0, 0, read_mhz, bench.now_s + 0.01)
            commands += bench.do(change)
            bench.now_s += 0.1
            commands += bench.do(end(computation))
        commands += bench.do(end(number))
    return commands


def on_hold(bench: Bench) -> Bench:
    bench.do(offer(1, 0, Hold(1000)))
    bench.do(clock_set(1000, bench.now_s))
    return bench


def test_a_foreign_clock_is_reported_and_does_not_count_as_on_clock(bench: Bench) -> None:
    commands = run_reading(on_hold(bench), 0, 20, read_mhz=800)
    reported = [each.foreign_clock for each in telemetry(commands)]
    assert (reported[0], reported[-1]) == (None, ForeignClock(800, 1000))
    clocks = telemetry(commands)[-1].clocks
    assert clocks is not None
    assert clocks.on_clock_time_s == 0.0
    assert clocks.missed_count == clocks.late_raise_count == clocks.computation_count > 0
    bench.do(clock_set(1000, bench.now_s))
    commands = run_reading(bench, 20, 20, read_mhz=1000)
    assert telemetry(commands)[-1].foreign_clock is None
    assert RepeatSet() not in commands
    assert bench.session.foreign_clock is None


def test_a_clock_is_set_again_after_growing_delays(bench: Bench) -> None:
    """A client that holds the clock, lets go for 16 s, and comes back."""
    on_hold(bench)
    set_at_s: list[float] = []
    for number in range(1200):
        commands = run_reading(bench, number, 1, read_mhz=1000 if 500 <= number < 520 else 800)
        if RepeatSet() in commands:
            set_at_s.append(bench.now_s)
    delays_s = [later_s - earlier_s for earlier_s, later_s in pairwise(set_at_s)]
    assert delays_s == pytest.approx([60.0, 120.0, 240.0, 480.0], abs=1.0)


def test_a_foreign_clock_at_stock_is_reported_also_by_an_agent_that_only_observes() -> None:
    bench = Bench(observe=True).accepted()
    commands = run_reading(bench, 0, 20, read_mhz=800)
    assert telemetry(commands)[-1].foreign_clock == ForeignClock(800, None)
    assert telemetry(commands)[-1].rank == RANK
    assert RepeatSet() not in commands, "none was set"


def test_a_clock_read_in_a_gap_or_around_a_set_proves_nothing(bench: Bench) -> None:
    on_hold(bench)
    commands: list[Command] = []
    for number in range(20):
        commands += bench.do(begin(number))
        for computation in bench.order:
            bench.now_s += 0.1
            commands += bench.do(CounterChange(bench.now_s, bench.now_s, 0.002, 0, 0, 800, bench.now_s))
            bench.now_s += 0.01
            commands += bench.do(begin(computation))
            bench.now_s += 0.05
            commands += bench.do(clock_set(1000, bench.now_s))
            bench.now_s += 0.04
            commands += bench.do(CounterChange(bench.now_s, bench.now_s, 0.002, 0, 0, 800, bench.now_s))
            bench.now_s += 0.1
            commands += bench.do(end(computation))
        commands += bench.do(end(number))
    assert {each.foreign_clock for each in telemetry(commands)} == {None}
