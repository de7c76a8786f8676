"""A rank's maximum clock: it replaces stock where nothing is planned, and limits held clocks."""

import pytest

from perseus.agent.clocks.sets import ResetClock, ScheduleClock, SetClock
from perseus.agent.link.computation import Computation, Kind
from perseus.agent.link.packets import Edge, Finish
from perseus.agent.rank.commands import Command, Send
from perseus.agent.rank.events import (
    AgentStops,
    Connected,
    Disconnected,
    GpuFailed,
    Heard,
    SetNotPermitted,
    Tick,
    TrainerGone,
)
from perseus.agent.rank.messages import (
    Hold,
    MaxClock,
    RankAccepted,
    RankRefused,
    Stock,
)
from perseus.v1 import agent_service_pb2 as wire
from tests.agent.rank.bench import (
    B0,
    F0,
    F1,
    LEASE_S,
    ORDER,
    RANK,
    Bench,
    counted,
    in_force,
    stage,
    telemetry,
)

PLAN = stage(1400, 1200, 1400, 1200)


def clocks(commands: list[Command]) -> list[Command]:
    return [some for some in commands if isinstance(some, SetClock | ResetClock | ScheduleClock)]


@pytest.mark.parametrize(("max_clock_mhz", "clock_mhz"), [(1000, 1000), (1199, 1000), (5000, 1400), (1, 800)])
def test_a_rank_without_a_plan_runs_at_its_highest_clock_within_the_max_clock(
    bench: Bench, max_clock_mhz: int, clock_mhz: int
) -> None:
    assert bench.limit(max_clock_mhz) == [SetClock(clock_mhz)]
    assert clocks(bench.run(0)) == []
    assert bench.limit(None) == [ResetClock()]


def test_a_change_during_an_iteration_applies_and_voids_its_measurements(bench: Bench) -> None:
    counted(bench, 0.0)
    bench.run(0)
    bench.iteration(Edge.BEGIN, 1)
    bench.mark(Edge.BEGIN, 1, F0)
    assert SetClock(1000) in bench.limit(1000)
    bench.now_s += 0.1
    bench.iteration(Edge.END, 1)
    bench.now_s += 0.05
    (reported,) = telemetry(counted(bench, 100.0))
    assert [(row.iteration, row.has_clock_change) for row in reported.iterations] == [(0, False), (1, True)]


def test_offered_stock_is_at_the_max_clock(bench: Bench) -> None:
    bench.limit(1000)
    bench.offer(1, 0, Stock())
    assert bench.iteration(Edge.BEGIN, 0) == [in_force(1, 0)]
    assert bench.session.wanted_clock_mhz == 1000
    bench.mark(Edge.BEGIN, 0, F0)
    assert bench.limit(800) == [SetClock(800)]


def test_held_clocks_are_limited_and_restored(bench: Bench) -> None:
    bench.offer(1, 0, Hold(1200))
    bench.iteration(Edge.BEGIN, 0)
    bench.mark(Edge.BEGIN, 0, F0)
    assert bench.limit(1000) == [SetClock(1000)]
    assert bench.limit(1400) == [SetClock(1200)]
    assert bench.limit(None) == []


def test_a_stage_plan_is_not_changed(bench: Bench) -> None:
    counted(bench, 0.0)
    bench.offer(1, 0, PLAN)
    bench.iteration(Edge.BEGIN, 0)
    bench.mark(Edge.BEGIN, 0, F0)
    assert bench.limit(800) == []
    bench.now_s += 0.1
    bench.mark(Edge.END, 0, F0)
    bench.iteration(Edge.END, 0)
    bench.now_s += 0.05
    (reported,) = telemetry(counted(bench, 100.0))
    assert not reported.iterations[0].has_clock_change


def test_an_iteration_that_leaves_its_order_falls_back_to_it(bench: Bench) -> None:
    bench.limit(1000)
    bench.offer(1, 0, PLAN)
    bench.iteration(Edge.BEGIN, 0)
    assert bench.session.wanted_clock_mhz == 1400
    assert bench.mark(Edge.BEGIN, 0, B0, ordinal=0) == [SetClock(1000)]


def test_a_gap_that_turns_out_long_passes_at_it(bench: Bench) -> None:
    bench.limit(1000)
    bench.offer(1, 0, PLAN)
    (*_, idle) = clocks(bench.run(0))
    assert idle == ScheduleClock(1000, pytest.approx(bench.now_s + 0.08))  # type: ignore[arg-type]
    assert SetClock(1400) in bench.iteration(Edge.BEGIN, 1)


def test_a_usual_gap_passes_at_the_next_clock_because_a_raise_would_be_late(bench: Bench) -> None:
    bench.limit(1000)
    bench.offer(1, 0, stage(1400, 1400, 1400, 1400))
    for number in range(4):
        commands = clocks(bench.run(number))
        bench.do(Heard())
        bench.now_s += 0.2
    assert SetClock(1000) not in commands
    assert isinstance(commands[-1], ScheduleClock)
    assert commands[-1].at_s > bench.now_s, "a gap that is longer than usual passes at the maximum clock"


def test_a_hung_trainer_goes_to_it(bench: Bench) -> None:
    bench.limit(800)
    bench.offer(1, 0, stage(1400, 1400, 1200, 1200))
    for number in range(3):
        bench.run(number)
        bench.do(Heard())
    bench.iteration(Edge.BEGIN, 3)
    bench.mark(Edge.BEGIN, 3, F0)
    bench.after(0.9, Tick())
    assert SetClock(800) in bench.after(0.3, Tick())


def test_a_trainer_that_hangs_before_a_scheduled_raise_goes_to_it(bench: Bench) -> None:
    """Its computation was at the maximum clock; the raise came by itself."""
    bench.limit(800)
    bench.offer(1, 0, stage(800, 1400, 800, 1400))
    for number in range(4):
        bench.run(number)
        bench.do(Heard())
    bench.iteration(Edge.BEGIN, 4)
    bench.mark(Edge.BEGIN, 4, F0)
    bench.now_s += 0.1
    scheduled = clocks(bench.mark(Edge.END, 4, F0))
    assert any(isinstance(some, ScheduleClock) and some.clock_mhz == 1400 for some in scheduled)
    bench.after(1.0, Heard())
    assert SetClock(800) in bench.after(1.0, Tick())


def test_a_refused_rank_keeps_the_max_clock_of_its_refusal(bench: Bench) -> None:
    bench.limit(1000)
    bench.offer(1, 0, PLAN)
    bench.run(0)
    bench.do(RankRefused(RANK, "JOB_QUARANTINED", "", MaxClock(800)))
    assert bench.session.wanted_clock_mhz == 800
    bench.do(RankRefused(RANK, "JOB_NOT_FOUND", ""))
    assert bench.session.wanted_clock_mhz is None


def test_a_rank_that_joins_again_receives_it_again(bench: Bench) -> None:
    bench.limit(1000)
    bench.do(Disconnected())
    assert bench.session.wanted_clock_mhz == 1000, "the lease runs"
    bench.do(Connected(LEASE_S))
    assert bench.do(RankAccepted(RANK, ORDER, MaxClock(800))) == [SetClock(800)]
    assert bench.do(RankAccepted(RANK, ORDER)) == [ResetClock()]


def test_another_order_runs_at_it(bench: Bench) -> None:
    other = (F0, F1)
    bench.do(RankAccepted(RANK, other, MaxClock(1000)))
    bench.order = other
    bench.iteration(Edge.BEGIN, 0)
    bench.mark(Edge.BEGIN, 0, F0)
    assert bench.session.wanted_clock_mhz == 1000


def test_it_ends_with_the_lease_and_so_does_the_plan(bench: Bench) -> None:
    bench.limit(1000)
    bench.offer(1, 0, PLAN)
    bench.iteration(Edge.BEGIN, 0)
    bench.mark(Edge.BEGIN, 0, F0)
    assert clocks(bench.after(LEASE_S + 0.1, Tick())) == [ResetClock()]
    assert not bench.session.has_plan


def test_it_ends_with_the_lease_without_a_plan_too(bench: Bench) -> None:
    bench.limit(1000)
    assert bench.after(LEASE_S - 0.1, Tick()) == []
    assert bench.after(0.2, Tick()) == [ResetClock()]


def test_one_that_outlasts_the_lease_keeps_the_plan_with_it(bench: Bench) -> None:
    bench.limit(1000, outlasts_lease=True)
    bench.offer(1, 0, PLAN)
    bench.run(0)
    bench.do(Disconnected())
    bench.after(10 * LEASE_S, Tick())
    assert bench.session.has_plan
    assert bench.session.wanted_clock_mhz == 1000, "no computation runs"
    assert SetClock(1400) in bench.iteration(Edge.BEGIN, 1)
    (joined,) = bench.do(Connected(LEASE_S))
    assert isinstance(joined, Send)
    assert isinstance(joined.message, wire.RankJoined)
    assert (joined.message.in_force_epoch, joined.message.in_force_version) == ("e", 1)


@pytest.mark.parametrize("end", [Finish(0), TrainerGone(), AgentStops(), GpuFailed("lost")], ids=str)
def test_a_gpu_that_is_no_longer_served_ends_at_stock(bench: Bench, end: Finish) -> None:
    bench.limit(1000, outlasts_lease=True)
    assert ResetClock() in bench.do(end)


def test_an_agent_that_only_observes_sets_nothing() -> None:
    bench = Bench(observe=True).accepted()
    assert bench.limit(1000) == []
    bench.iteration(Edge.BEGIN, 0)
    assert bench.mark(Edge.BEGIN, 0, F0) == []


def test_an_agent_that_may_set_nothing_sets_nothing_more(bench: Bench) -> None:
    bench.do(SetNotPermitted("needs root"))
    assert bench.limit(1000) == []
    assert clocks(bench.run(0)) == []


def test_fixed_computations_of_a_plan_without_others_are_at_it() -> None:
    step = Computation(Kind.FIXED, 0)
    bench = Bench((step,)).accepted()
    bench.offer(1, 0, stage(0, order=(step,)))
    bench.iteration(Edge.BEGIN, 0)
    bench.mark(Edge.BEGIN, 0, step)
    assert bench.limit(1000) == [SetClock(1000)]
