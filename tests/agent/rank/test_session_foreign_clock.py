"""A session whose GPU's clock another client of the driver holds."""

from itertools import pairwise

import pytest

from perseus.agent.clocks.foreign import ForeignClock
from perseus.agent.clocks.sets import RepeatSet
from perseus.agent.energy.counter import CounterChange
from perseus.agent.rank.commands import Command
from perseus.agent.rank.messages import Hold
from tests.agent.rank.bench import RANK, Bench, begin, clock_set, end, offer, telemetry


def run(bench: Bench, first: int, count: int, read_mhz: int) -> list[Command]:
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
    commands = run(on_hold(bench), 0, 20, read_mhz=800)
    reported = [each.foreign_clock for each in telemetry(commands)]
    assert (reported[0], reported[-1]) == (None, ForeignClock(800, 1000))
    clocks = telemetry(commands)[-1].clocks
    assert clocks is not None
    assert clocks.on_clock_time_s == 0.0
    assert clocks.missed_count == clocks.late_raise_count == clocks.computation_count > 0
    bench.do(clock_set(1000, bench.now_s))
    commands = run(bench, 20, 20, read_mhz=1000)
    assert telemetry(commands)[-1].foreign_clock is None
    assert RepeatSet() not in commands
    assert bench.session.foreign_clock is None


def test_a_clock_is_set_again_after_growing_delays(bench: Bench) -> None:
    """A client that holds the clock, lets go for 16 s, and comes back."""
    on_hold(bench)
    set_at_s: list[float] = []
    for number in range(1200):
        commands = run(bench, number, 1, read_mhz=1000 if 500 <= number < 520 else 800)
        if RepeatSet() in commands:
            set_at_s.append(bench.now_s)
    delays_s = [later_s - earlier_s for earlier_s, later_s in pairwise(set_at_s)]
    assert delays_s == pytest.approx([60.0, 120.0, 240.0, 480.0], abs=1.0)


def test_a_foreign_clock_at_stock_is_reported_also_by_an_agent_that_only_observes() -> None:
    bench = Bench(observe=True).accepted()
    commands = run(bench, 0, 20, read_mhz=800)
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
