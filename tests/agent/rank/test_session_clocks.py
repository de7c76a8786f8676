"""The clocks that a session sets, and when, by exact command lists."""

import pytest

from perseus.agent.clocks.sets import ClockSet, ResetClock, ScheduleClock, SetClock
from perseus.agent.link.computation import Computation, Kind
from perseus.agent.link.packets import Edge
from perseus.agent.rank.commands import Command
from perseus.agent.rank.events import Heard, Tick, TrainerGone
from perseus.agent.rank.messages import Hold, Stock
from tests.agent.rank.bench import (
    B0,
    B1,
    F0,
    F1,
    ORDER,
    STEP,
    Bench,
    counted,
    idle_from,
    in_force,
    stage,
    telemetry,
)


def test_raises_come_early_and_lowers_at_the_end(bench: Bench) -> None:
    bench.offer(1, 0, stage(1000, 1200, 800, 1400))
    assert bench.iteration(Edge.BEGIN, 0) == [in_force(1, 0), SetClock(1000)]
    assert bench.mark(Edge.BEGIN, 0, F0) == [SetClock(1200)], "F1 is faster"
    assert bench.mark(Edge.END, 0, F0) == []
    assert bench.mark(Edge.BEGIN, 0, F1) == [], "B0 is slower"
    assert bench.mark(Edge.END, 0, F1) == [SetClock(800)]
    assert bench.mark(Edge.BEGIN, 0, B0) == [SetClock(1400)], "B1 is faster"
    assert bench.mark(Edge.END, 0, B0) == []
    assert bench.mark(Edge.BEGIN, 0, B1) == [], "the next iteration's F0 is slower"
    assert bench.mark(Edge.END, 0, B1) == [idle_from(bench)], "and may be long in coming"
    assert bench.iteration(Edge.END, 0) == []
    assert bench.iteration(Edge.BEGIN, 1) == [SetClock(1000)]


def test_even_a_rare_evaluation_between_iterations_runs_at_stock(bench: Bench) -> None:
    bench.offer(1, 0, stage(1000, 1200, 800, 1000))
    for number in range(8):
        assert ResetClock() not in bench.run(number, duration_s=0.03), "usual gaps are short"
        bench.do(Heard())
    bench.now_s += 5.0
    assert bench.iteration(Edge.BEGIN, 8) == [SetClock(1000)], "it was reset 80 ms after the end"
    assert ResetClock() not in bench.run(8, duration_s=0.03), "and this changes nothing"


def test_a_hung_trainer_goes_to_stock_and_is_resumed(bench: Bench) -> None:
    bench.offer(1, 0, stage(1000, 1000, 800, 800))
    for number in range(3):
        bench.run(number)
        bench.do(Heard())
    bench.iteration(Edge.BEGIN, 3)
    bench.mark(Edge.BEGIN, 3, F0)
    assert ResetClock() not in bench.after(0.9, Tick())
    assert ResetClock() in bench.after(0.2, Tick())
    bench.after(60.0, Heard())
    assert bench.do(Tick()) == [], "once, and the plan stays in force"
    assert bench.mark(Edge.END, 3, F0) == [SetClock(1000)]


def test_the_next_plan_counts_from_the_last_computation_on(bench: Bench) -> None:
    bench.offer(1, 0, stage(1000, 1000, 1000, 1000))
    bench.offer(2, 1, stage(1400, 800, 800, 800))
    assert bench.iteration(Edge.BEGIN, 0) == []
    bench.offer(1, 1, stage(1000, 1000, 1000, 1000))
    bench.run(1)
    bench.offer(2, 3, stage(1400, 800, 800, 800))
    assert bench.run(2) == [SetClock(1000), SetClock(1400), idle_from(bench)]
    assert bench.iteration(Edge.BEGIN, 3) == [in_force(2, 3), SetClock(1400)]


def test_back_to_stock_is_a_raise(bench: Bench) -> None:
    bench.offer(1, 0, Hold(800))
    bench.run(0)
    bench.offer(2, 2, Stock())
    bench.iteration(Edge.BEGIN, 1)
    for computation in ORDER[:-1]:
        assert bench.mark(Edge.BEGIN, 1, computation) == []
        assert bench.mark(Edge.END, 1, computation) == []
    assert bench.mark(Edge.BEGIN, 1, B1) == [ResetClock()]
    assert bench.mark(Edge.END, 1, B1) == []
    bench.iteration(Edge.END, 1)
    assert bench.iteration(Edge.BEGIN, 2) == [in_force(2, 2)]


def test_fixed_computations_have_no_clock_of_their_own() -> None:
    order = (F0, STEP, B0, Computation(Kind.FIXED, 1))
    bench = Bench(order).accepted()
    bench.offer(1, 0, stage(1000, 0, 800, 0, order=order))
    assert bench.iteration(Edge.BEGIN, 0) == [in_force(1, 0), SetClock(1000)]
    assert bench.mark(Edge.BEGIN, 0, F0) == []
    assert bench.mark(Edge.END, 0, F0) == [SetClock(800)], "the step may run at the clock that comes next"
    assert bench.mark(Edge.BEGIN, 0, STEP) == []
    assert bench.mark(Edge.END, 0, STEP) == []
    assert bench.mark(Edge.BEGIN, 0, B0) == [SetClock(1000)]


def test_a_plan_of_fixed_computations_is_stock() -> None:
    bench = Bench((STEP,)).accepted()
    bench.offer(1, 0, stage(0, order=(STEP,)))
    assert bench.run(0) == [in_force(1, 0)]


def test_a_deviating_iteration_runs_at_stock_until_the_next(bench: Bench) -> None:
    bench.offer(1, 0, stage(1000, 1000, 800, 800))
    bench.run(0)
    assert bench.iteration(Edge.BEGIN, 1) == [SetClock(1000)]
    assert bench.mark(Edge.BEGIN, 1, B0, ordinal=0) == [ResetClock()]
    assert bench.mark(Edge.END, 1, B0, ordinal=0) == []
    assert bench.mark(Edge.BEGIN, 1, F0, ordinal=1) == []
    bench.iteration(Edge.END, 1)
    assert bench.iteration(Edge.BEGIN, 2) == [SetClock(1000)]


def other_iteration(bench: Bench, number: int) -> list[Command]:
    """One with half the computations."""
    commands = bench.iteration(Edge.BEGIN, number)
    for ordinal, computation in enumerate((F0, B0)):
        for edge in (Edge.BEGIN, Edge.END):
            bench.now_s += 0.1
            commands += bench.mark(edge, number, computation, ordinal=ordinal)
    bench.now_s += 0.1
    return commands + bench.iteration(Edge.END, number)


def clocks_of(commands: list[Command]) -> list[Command]:
    return [command for command in commands if isinstance(command, SetClock | ResetClock)]


def test_after_two_irregular_iterations_they_run_at_stock_until_a_regular_one(bench: Bench) -> None:
    counted(bench, 0.0)
    bench.offer(1, 0, stage(1000, 1000, 800, 800))
    bench.run(0)
    for number in (1, 2):
        assert SetClock(1000) in other_iteration(bench, number), "it begins as planned"
    assert clocks_of(other_iteration(bench, 3)) == []
    assert clocks_of(bench.run(4)) == [], "it was not known that it would be regular"
    assert clocks_of(bench.iteration(Edge.BEGIN, 5)) == [SetClock(1000)]
    bench.now_s += 0.1
    (*_, message) = telemetry(counted(bench, 60.0))
    reported = {row.iteration: row.is_regular for row in message.iterations}
    assert reported == {0: True, 1: False, 2: False, 3: False, 4: False}
    assert {row.plan_version for row in message.iterations} == {1}


def test_shorter_iterations_differ_too(bench: Bench) -> None:
    bench.offer(1, 0, Hold(1000))
    for number in range(3):
        begun = bench.iteration(Edge.BEGIN, number)
        bench.now_s += 0.1
        bench.mark(Edge.BEGIN, number, F0)
        bench.now_s += 0.1
        bench.mark(Edge.END, number, F0)
        bench.iteration(Edge.END, number)
    assert ResetClock() in begun


@pytest.mark.parametrize("computation", [Computation(Kind.FORWARD, 7), Computation(Kind.FORWARD, 0, 1)])
def test_an_unknown_computation_is_a_deviation(bench: Bench, computation: Computation) -> None:
    bench.offer(1, 0, Hold(1000))
    bench.iteration(Edge.BEGIN, 0)
    assert bench.mark(Edge.BEGIN, 0, computation, ordinal=0) == [ResetClock()]


def test_lost_marks_leave_the_clocks_right(bench: Bench) -> None:
    bench.offer(1, 0, stage(1000, 1200, 800, 1400))
    bench.iteration(Edge.BEGIN, 0)
    bench.mark(Edge.BEGIN, 0, F0)
    # F0's end and all of F1 are lost.
    assert bench.mark(Edge.BEGIN, 0, B0) == [SetClock(1400)]
    # B0's end and B1's begin are lost.
    assert bench.mark(Edge.END, 0, B1) == [idle_from(bench)]


def test_marks_of_another_iteration_are_ignored(bench: Bench) -> None:
    bench.offer(1, 0, stage(1000, 1000, 800, 800))
    bench.run(3)
    for edge in Edge:
        assert bench.mark(edge, 2, F1) == []
        assert bench.iteration(edge, 2) == []


def test_under_a_known_plan_raises_are_scheduled(bench: Bench) -> None:
    bench.offer(1, 0, stage(1000, 1000, 1400, 1400))
    for _ in range(64):
        bench.do(ClockSet(1400, 1.010, 1.0, 1.0))
    for number in range(3):
        bench.run(number)
    bench.iteration(Edge.BEGIN, 3)
    begun_s = bench.now_s
    bench.now_s += 0.1
    bench.mark(Edge.BEGIN, 3, F0)
    bench.now_s += 0.1
    assert bench.mark(Edge.END, 3, F0) == []
    bench.now_s += 0.1
    assert bench.mark(Edge.BEGIN, 3, F1) == [], "the wait after it is longer than the lead"
    bench.now_s += 0.1
    (command,) = bench.mark(Edge.END, 3, F1)
    assert command == ScheduleClock(1400, pytest.approx(begun_s + 0.5 - 0.010, abs=0.0005))  # type: ignore[arg-type]
    assert bench.do(TrainerGone())[0] == ResetClock(), "in place of what is scheduled"
