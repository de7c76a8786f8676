"""The session by exact command lists: events in, commands out, on a time that the test sets."""

import pytest

from perseus.agent.clocks.sets import ClockSet, ResetClock, ScheduleClock, SetClock
from perseus.agent.energy.counter import CounterChange
from perseus.agent.link.computation import Computation, Kind, Rank
from perseus.agent.link.packets import ComputationMark, Edge, Finish, IterationMark, WaitMark
from perseus.agent.rank.commands import Command, EstimateEnergy, Send
from perseus.agent.rank.events import (
    AgentStops,
    Connected,
    Disconnected,
    Estimated,
    Event,
    GpuFailed,
    Heard,
    LimitsRead,
    SetNotPermitted,
    Tick,
    TrainerGone,
    TrainerJoined,
    TrainerSpecified,
)
from perseus.agent.rank.messages import (
    NO_PLAN,
    ComputationRow,
    GpuDescription,
    GpuLimits,
    Hold,
    IterationRow,
    PlanAnswer,
    PlanId,
    PlanInForce,
    PlanOffer,
    PlanRefusalReason,
    RankAccepted,
    RankJoined,
    RankLeft,
    RankLeftReason,
    RankRefused,
    StageClocks,
    Stock,
    Telemetry,
)
from perseus.agent.rank.recorder import COUNTER_WAIT_S
from perseus.agent.rank.sampling import estimate
from perseus.agent.rank.session import Session
from perseus.agent.rank.standing import JOIN_RETRY_S, LONGEST_JOIN_RETRY_S

RANK = Rank("job", 0, 1, 0)
GPU = GpuDescription("GPU-1", "A100", (1400, 1200, 1000, 800))
F0, F1 = Computation(Kind.FORWARD, 0), Computation(Kind.FORWARD, 1)
B0, B1 = Computation(Kind.BACKWARD, 0), Computation(Kind.BACKWARD, 1)
STEP = Computation(Kind.FIXED, 0)
ORDER = (F0, F1, B0, B1)
LEASE_S = 3.0


class Bench:
    """A session and its time; `do` checks the invariants after every event."""

    def __init__(
        self, order: tuple[Computation, ...] = ORDER, *, observe: bool = False, is_registered: bool = True
    ) -> None:
        self.session = Session(RANK, GPU, observe=observe, is_registered=is_registered)
        self.order = order
        self.now_s = 100.0

    def do(self, event: Event) -> list[Command]:
        """What the session wants done; energy estimates are worked out at once."""
        commands: list[Command] = []
        for command in self.session.handle(event, self.now_s):
            if isinstance(command, EstimateEnergy):
                found = estimate(command.request)
                commands += self.session.handle(Estimated(found), self.now_s) if found else []
            else:
                commands.append(command)
        self.session.validate()
        return commands

    def after(self, duration_s: float, event: Event) -> list[Command]:
        self.now_s += duration_s
        return self.do(event)

    def accepted(self) -> "Bench":
        self.do(TrainerJoined())
        self.do(Connected(LEASE_S))
        self.do(RankAccepted(RANK, self.order))
        return self

    def refused_for_s(self) -> float:
        """The time from a refusal to the next announcement."""
        self.do(RankRefused(RANK, "JOB_NOT_FOUND", ""))
        refused_at_s = self.now_s
        while not self.after(0.25, Tick()):
            assert self.now_s < refused_at_s + 60.0, "it is not announced again"
        return self.now_s - refused_at_s

    def iteration(self, edge: Edge, number: int) -> list[Command]:
        return self.do(IterationMark(edge, number, int(self.now_s * 1e9)))

    def mark(
        self, edge: Edge, iteration: int, computation: Computation, *, ordinal: int | None = None
    ) -> list[Command]:
        if ordinal is None:
            ordinal = self.order.index(computation)
        return self.do(ComputationMark(edge, iteration, ordinal, computation, int(self.now_s * 1e9)))

    def offer(
        self, version: int, start: int, clocks: Stock | Hold | StageClocks, *, epoch: str = "e"
    ) -> list[Command]:
        return self.do(PlanOffer(RANK, PlanId(epoch, version), start, LEASE_S, clocks))

    def run(self, number: int, *, duration_s: float = 0.1) -> list[Command]:
        """A whole iteration: each computation for `duration_s`, as long a wait before it."""
        commands = self.iteration(Edge.BEGIN, number)
        for computation in self.order:
            self.now_s += duration_s
            commands += self.mark(Edge.BEGIN, number, computation)
            self.now_s += duration_s
            commands += self.mark(Edge.END, number, computation)
        return commands + self.iteration(Edge.END, number)


@pytest.fixture
def bench() -> Bench:
    return Bench().accepted()


def stage(*clocks_mhz: int, order: tuple[Computation, ...] = ORDER) -> StageClocks:
    return StageClocks(order, clocks_mhz)


def accepted(version: int, iteration: int) -> Send:
    return Send(PlanAnswer(RANK, PlanId("e", version), None, iteration))


def in_force(version: int, iteration: int) -> Send:
    return Send(PlanInForce(RANK, PlanId("e", version) if version else NO_PLAN, iteration))


def clock_set(clock_mhz: int, time_s: float) -> ClockSet:
    return ClockSet(clock_mhz, time_s, time_s - 0.010, time_s - 0.010)


def refusal(commands: list[Command]) -> tuple[PlanRefusalReason, str]:
    (command,) = commands
    assert isinstance(command, Send)
    assert isinstance(command.message, PlanAnswer)
    assert command.message.refusal is not None
    return command.message.refusal.reason, command.message.refusal.message


def idle_from(bench: Bench) -> ScheduleClock:
    """When a gap that has just begun turns out to be long, as long as no latency is known."""
    return ScheduleClock(None, pytest.approx(bench.now_s + 0.08))  # type: ignore[arg-type]


def telemetry(commands: list[Command]) -> list[Telemetry]:
    return [
        command.message
        for command in commands
        if isinstance(command, Send) and isinstance(command.message, Telemetry)
    ]


# --- Standing with the coordinator --------------------------------------------------------------------------


def test_a_rank_is_reset_announced_and_accepted() -> None:
    bench = Bench()
    assert bench.do(TrainerJoined()) == [ResetClock()]
    assert bench.do(Connected(LEASE_S)) == [Send(RankJoined(RANK, GPU, -1, NO_PLAN, 0))]
    assert bench.do(RankAccepted(RANK, ORDER)) == []


def test_a_refused_rank_is_announced_again_until_accepted() -> None:
    bench = Bench()
    announcement = [Send(RankJoined(RANK, GPU, -1, NO_PLAN, 0))]
    bench.do(Connected(LEASE_S))
    assert bench.do(RankRefused(RANK, "JOB_NOT_FOUND", "")) == []
    assert bench.after(JOIN_RETRY_S / 2, Tick()) == []
    assert bench.after(JOIN_RETRY_S / 2, Tick()) == announcement
    assert bench.after(JOIN_RETRY_S, Tick()) == [], "there is no answer yet"
    bench.do(RankRefused(RANK, "JOB_NOT_FOUND", ""))
    assert bench.after(2 * JOIN_RETRY_S, Tick()) == announcement
    bench.do(RankAccepted(RANK, ORDER))
    assert bench.after(LONGEST_JOIN_RETRY_S, Tick()) == []


def test_a_rank_that_is_refused_over_and_over_asks_more_and_more_seldom() -> None:
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


def test_a_rank_is_announced_once_its_trainer_has_said_what_it_belongs_to() -> None:
    bench = Bench(is_registered=False)
    announcement = [Send(RankJoined(RANK, GPU, -1, NO_PLAN, 0, "work"))]
    assert bench.do(Connected(LEASE_S)) == []
    assert bench.after(10 * JOIN_RETRY_S, Tick()) == []
    assert bench.do(TrainerSpecified("work")) == announcement
    assert bench.do(TrainerSpecified("work")) == [], "said again, after it lost the agent"
    bench.do(Disconnected())
    assert bench.do(Connected(LEASE_S)) == announcement


def test_what_a_trainer_says_before_there_is_a_coordinator_is_announced_later() -> None:
    bench = Bench(is_registered=False)
    assert bench.do(TrainerSpecified("work")) == []
    assert bench.do(Connected(LEASE_S)) == [Send(RankJoined(RANK, GPU, -1, NO_PLAN, 0, "work"))]


def test_a_plan_ends_with_what_it_was_made_for(bench: Bench) -> None:
    bench.offer(1, 0, Hold(1000))
    bench.iteration(Edge.BEGIN, 0)
    assert bench.do(TrainerSpecified("other work")) == [
        ResetClock(),
        in_force(0, 1),
        Send(RankJoined(RANK, GPU, 0, NO_PLAN, 0, "other work")),
    ]
    assert refusal(bench.offer(2, 5, Hold(1000)))[0] is PlanRefusalReason.UNKNOWN_RANK


def test_reconnecting_announces_what_is_in_force(bench: Bench) -> None:
    bench.offer(1, 0, Hold(1000))
    bench.iteration(Edge.BEGIN, 0)
    assert bench.do(Disconnected()) == []
    assert bench.do(Connected(LEASE_S)) == [Send(RankJoined(RANK, GPU, 0, PlanId("e", 1), 0))]
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


# --- Offers -------------------------------------------------------------------------------------------------


def test_an_offer_comes_into_force_whole_at_its_start(bench: Bench) -> None:
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
    assert bench.iteration(Edge.BEGIN, 1) == [], "nor is the other pending any more"


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
def test_a_foreign_clock_is_refused_by_name(
    bench: Bench, clocks: Hold | StageClocks, found: tuple[int, ...]
) -> None:
    (command,) = bench.offer(1, 0, clocks)
    assert isinstance(command, Send)
    assert isinstance(command.message, PlanAnswer)
    refused = command.message.refusal
    assert refused is not None
    assert refused.reason is PlanRefusalReason.CLOCK_NOT_SUPPORTED
    assert refused.clocks_mhz == found
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
    assert bench.do(Finish(0))[-1] == Send(RankLeft(RANK, RankLeftReason.FINISHED))


def test_without_permission_the_plan_in_force_ends(bench: Bench) -> None:
    bench.offer(1, 0, Hold(1000))
    assert bench.iteration(Edge.BEGIN, 0) == [in_force(1, 0), SetClock(1000)]
    assert bench.do(SetNotPermitted("needs root")) == [in_force(0, 1)]
    assert refusal(bench.offer(2, 5, Hold(1000))) == (PlanRefusalReason.NOT_PERMITTED, f"{RANK}: needs root")
    assert bench.run(1) == []


# --- Clocks -------------------------------------------------------------------------------------------------


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


def test_an_evaluation_between_iterations_runs_at_stock_however_rare_it_is(bench: Bench) -> None:
    bench.offer(1, 0, stage(1000, 1200, 800, 1000))
    for number in range(8):
        assert ResetClock() not in bench.run(number, duration_s=0.03), "usual gaps are short"
        bench.do(Heard())
    bench.now_s += 5.0
    assert bench.iteration(Edge.BEGIN, 8) == [SetClock(1000)], "it was reset 80 ms after the end"
    assert ResetClock() not in bench.run(8, duration_s=0.03), "and nothing is changed by it"


def test_a_trainer_that_hangs_is_put_to_stock_and_taken_up_again(bench: Bench) -> None:
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


def test_after_two_iterations_that_differ_they_run_at_stock_until_one_is_to_order(bench: Bench) -> None:
    counted(bench, 0.0)
    bench.offer(1, 0, stage(1000, 1000, 800, 800))
    bench.run(0)
    for number in (1, 2):
        assert SetClock(1000) in other_iteration(bench, number), "it begins as planned"
    assert clocks_of(other_iteration(bench, 3)) == []
    assert clocks_of(bench.run(4)) == [], "nobody knew that it would be to order"
    assert clocks_of(bench.iteration(Edge.BEGIN, 5)) == [SetClock(1000)]
    bench.now_s += 0.1
    (*_, message) = telemetry(counted(bench, 60.0))
    told = {row.iteration: row.is_regular for row in message.iterations}
    assert told == {0: True, 1: False, 2: False, 3: False, 4: False}
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


def test_under_a_plan_that_is_known_raises_are_scheduled(bench: Bench) -> None:
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


# --- Ends ---------------------------------------------------------------------------------------------------


def test_a_lease_that_runs_out_means_stock(bench: Bench) -> None:
    bench.offer(1, 0, Hold(1000))
    bench.iteration(Edge.BEGIN, 0)
    assert bench.after(LEASE_S, Heard()) == []
    assert bench.after(LEASE_S, Tick()) == []
    assert bench.after(0.1, Tick()) == [ResetClock(), in_force(0, 1)]
    assert bench.after(0.1, Tick()) == []
    assert bench.iteration(Edge.BEGIN, 1) == []


def test_a_lease_that_runs_out_while_disconnected_is_reported_afterwards(bench: Bench) -> None:
    bench.offer(1, 0, Hold(1000))
    bench.iteration(Edge.BEGIN, 0)
    bench.do(Disconnected())
    assert bench.after(LEASE_S + 0.1, Tick()) == [ResetClock()]
    assert bench.do(Connected(LEASE_S)) == [Send(RankJoined(RANK, GPU, 0, NO_PLAN, 0))]
    bench.do(RankAccepted(RANK, ORDER))
    assert bench.offer(1, 1, Hold(1000)) == [accepted(1, 0)]
    assert bench.iteration(Edge.BEGIN, 1) == [in_force(1, 1), SetClock(1000)]


def test_a_pending_plan_has_a_lease_too(bench: Bench) -> None:
    bench.offer(1, 1, Hold(1000))
    bench.iteration(Edge.BEGIN, 0)
    assert bench.after(LEASE_S + 0.1, Tick()) == [in_force(0, 1)]  # or it would be waited for
    assert bench.iteration(Edge.BEGIN, 1) == []


def test_an_accepted_plan_that_can_not_be_kept_is_taken_back(bench: Bench) -> None:
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
def test_every_end_resets_the_clock_and_says_why(bench: Bench, event: Event, reason: RankLeftReason) -> None:
    bench.offer(1, 0, Hold(1000))
    bench.iteration(Edge.BEGIN, 0)
    assert bench.do(event) == [ResetClock(), Send(RankLeft(RANK, reason))]
    assert bench.session.has_ended
    for late in (TrainerGone(), Tick(), Connected(LEASE_S), clock_set(1000, 0.0)):
        assert bench.do(late) == []
    assert bench.offer(2, 9, Hold(800)) == []


def test_an_agent_that_stops_resets_and_leaves_the_goodbye_to_the_stream(bench: Bench) -> None:
    bench.offer(1, 0, Hold(1000))
    bench.iteration(Edge.BEGIN, 0)
    assert bench.do(AgentStops()) == [ResetClock()]
    assert bench.session.has_ended


# --- Measurement --------------------------------------------------------------------------------------------


def counted(bench: Bench, energy_j: float) -> list[Command]:
    return bench.do(CounterChange(bench.now_s, energy_j, 0.002))


def test_an_iteration_becomes_telemetry_when_the_counter_has_passed_its_end(bench: Bench) -> None:
    counted(bench, 0.0)  # at 100 s; 100 W from here on
    bench.do(clock_set(1000, bench.now_s + 0.45))  # between F1 and B0
    assert bench.run(0) == []
    bench.now_s += 0.05
    (message,) = telemetry(counted(bench, 85.0))
    assert message.rank == RANK
    assert message.iterations == (
        IterationRow(0, 0, pytest.approx(0.8), pytest.approx(80.0), True, 0),  # type: ignore[arg-type]
    )
    clocks_mhz = [None, None, 1000, 1000]
    assert message.computations == tuple(
        ComputationRow(
            0,
            computation,
            pytest.approx(0.1 + 0.2 * index),  # type: ignore[arg-type]
            pytest.approx(0.1),  # type: ignore[arg-type]
            clock_mhz,
        )
        for index, (computation, clock_mhz) in enumerate(zip(ORDER, clocks_mhz, strict=True))
    )
    assert message.energy is None, "two changes of the counter determine nothing"


def run_with_waits(bench: Bench, *edges: Edge) -> list[Command]:
    """An iteration whose first computation computes for 0.1 s before each of these marks and at its end."""
    bench.iteration(Edge.BEGIN, 0)
    for computation in ORDER:
        bench.mark(Edge.BEGIN, 0, computation)
        for edge in edges if computation == ORDER[0] else ():
            bench.now_s += 0.1
            bench.do(WaitMark(edge, 0, int(bench.now_s * 1e9)))
        bench.now_s += 0.1
        bench.mark(Edge.END, 0, computation)
    bench.iteration(Edge.END, 0)
    bench.now_s += 0.05
    return counted(bench, 85.0)


def test_what_a_computation_waits_for_others_is_none_of_its_time(bench: Bench) -> None:
    counted(bench, 0.0)
    (message,) = telemetry(run_with_waits(bench, Edge.BEGIN, Edge.END, Edge.BEGIN, Edge.END))
    assert [row.duration_s for row in message.computations] == pytest.approx([0.3, 0.1, 0.1, 0.1])
    assert [row.begin_s for row in message.computations] == pytest.approx([0.0, 0.5, 0.6, 0.7])
    assert message.iterations[0].duration_s == pytest.approx(0.8)
    assert message.iterations[0].is_regular


@pytest.mark.parametrize(
    "edges",
    [[Edge.BEGIN], [Edge.END], [Edge.BEGIN, Edge.BEGIN, Edge.END], [Edge.BEGIN, Edge.END, Edge.END]],
    ids=str,
)
def test_a_computation_that_has_lost_a_mark_of_a_wait_is_no_sample(bench: Bench, edges: list[Edge]) -> None:
    counted(bench, 0.0)
    (message,) = telemetry(run_with_waits(bench, *edges))
    assert [row.computation for row in message.computations] == list(ORDER[1:])
    assert not message.iterations[0].is_regular


def test_a_computation_of_endless_waits_is_bounded_and_no_sample(bench: Bench) -> None:
    counted(bench, 0.0)
    (message,) = telemetry(run_with_waits(bench, *[Edge.BEGIN, Edge.END] * 5000))
    assert [row.computation for row in message.computations] == list(ORDER[1:])


def test_energy_is_told_of_what_is_computed_and_not_of_waits_within(bench: Bench) -> None:
    """300 W while computing and 100 W in waits, within computations and between them."""
    bench.offer(7, 0, Hold(1000))
    bench.do(clock_set(1000, bench.now_s))
    messages: list[Telemetry] = []
    energy_j, tick = 0.0, 0

    def pass_time(hundredths: int, drawn_w: float) -> None:
        nonlocal energy_j, tick, messages
        for _ in range(hundredths):
            bench.now_s += 0.01
            energy_j += drawn_w * 0.01
            tick += 1
            if tick % 7 == 0:
                messages += telemetry(counted(bench, energy_j))

    for number in range(8):
        bench.iteration(Edge.BEGIN, number)
        for computation in ORDER:
            pass_time(3, 100.0)
            bench.mark(Edge.BEGIN, number, computation)
            pass_time(5, 300.0)
            bench.do(WaitMark(Edge.BEGIN, number, int(bench.now_s * 1e9)))
            pass_time(4 + number % 3, 100.0)
            bench.do(WaitMark(Edge.END, number, int(bench.now_s * 1e9)))
            pass_time(5, 300.0)
            bench.mark(Edge.END, number, computation)
        bench.iteration(Edge.END, number)
    estimate = [message.energy for message in messages if message.energy is not None][-1]
    assert estimate.blocking_power_w == pytest.approx(100, rel=0.1)
    assert {sample.kind for sample in estimate.samples} == {Kind.FORWARD, Kind.BACKWARD}
    for sample in estimate.samples:
        assert sample.time_s == pytest.approx(0.1, abs=0.002)
        assert sample.energy_j == pytest.approx(30.0, rel=0.05)


def gaps(commands: list[Command]) -> list[tuple[float, float, float]]:
    return [
        (round(row.gap_time_s, 6), round(row.gap_energy_j, 6), round(row.gap_slowed_time_s, 6))
        for message in telemetry(commands)
        for row in message.iterations
    ]


def test_what_lies_between_iterations_is_measured(bench: Bench) -> None:
    counted(bench, 0.0)  # at 100 s; 100 W from here on
    bench.run(0)  # until 100.8 s
    bench.do(clock_set(1000, bench.now_s + 0.1))
    bench.do(clock_set(1200, bench.now_s + 0.3))
    bench.do(ClockSet(None, bench.now_s + 0.5, bench.now_s + 0.49, bench.now_s + 0.49))
    bench.now_s += 0.1
    assert gaps(counted(bench, 90.0)) == [(0.0, 0.0, 0.0)], "what was before the first is not known"
    bench.now_s += 59.9
    bench.run(1)
    bench.now_s += 0.1
    slowed_s = 0.2 * (1 - 1000 / 1400) + 0.2 * (1 - 1200 / 1400)
    ((gap_s, gap_j, found_s),) = gaps(counted(bench, 6170.0))
    assert (gap_s, gap_j, found_s) == pytest.approx((60.0, 6000.0, slowed_s), rel=0.01)


def test_a_gap_whose_begin_is_not_known_is_none(bench: Bench) -> None:
    counted(bench, 0.0)
    bench.run(0)
    bench.now_s += 5.0
    bench.run(2)
    bench.now_s += 0.1
    assert gaps(counted(bench, 670.0)) == [(0.0, 0.0, 0.0)] * 2


def test_a_trainer_that_was_stopped_for_long_leaves_no_gap(bench: Bench) -> None:
    counted(bench, 0.0)
    bench.run(0)
    bench.now_s += 100_000.0
    bench.run(1)
    bench.now_s += 0.1
    assert gaps(counted(bench, 1e7))[-1] == (0.0, 0.0, 0.0)


def test_what_throttled_the_gpu_is_told_with_the_iteration_that_it_touched(bench: Bench) -> None:
    counted(bench, 0.0)
    for iteration in range(3):
        bench.run(iteration)
        bench.now_s += 0.05
        reasons = 0x1 | (0x40 | 0x80 if iteration == 1 else 0)  # an idle GPU (0x1) is not throttled
        capped_mhz = 1100 if iteration == 1 else 0
        change = CounterChange(bench.now_s, 90.0 * iteration + 85.0, 0.002, reasons, capped_mhz)
        (message,) = telemetry(bench.do(change))
        assert message.iterations[0].clock_event_reasons == (0xC0 if iteration == 1 else 0)
        assert message.iterations[0].capped_clock_mhz == capped_mhz
        bench.now_s += 0.05
        counted(bench, 90.0 * (iteration + 1))


def test_clock_statistics_count_under_their_plan(bench: Bench) -> None:
    counted(bench, 0.0)
    bench.offer(1, 0, Hold(1000))
    bench.do(clock_set(1400, bench.now_s))
    bench.run(0)
    bench.do(clock_set(1000, bench.now_s))
    bench.run(1)
    (message,) = telemetry(counted(bench, 85.0))
    assert message.clocks is not None
    assert (message.clocks.plan_version, message.clocks.set_count) == (1, 1)
    assert (message.clocks.computation_count, message.clocks.missed_count) == (8, 4)
    assert message.clocks.late_raise_count == 0, "1400 MHz is more than enough"
    assert message.clocks.computation_time_s == pytest.approx(0.8)
    assert message.clocks.on_clock_time_s == pytest.approx(0.4)
    assert message.clocks.set_latency_s == pytest.approx(0.010)
    assert message.clocks.set_latency_count == 2


def test_the_limits_that_were_read_last_are_told_with_telemetry_and_when_the_rank_is_announced(
    bench: Bench,
) -> None:
    counted(bench, 0.0)
    limits = GpuLimits(250.0, (7,))
    bench.do(LimitsRead(limits))
    bench.run(0)
    (message,) = telemetry(counted(bench, 85.0))
    assert message.gpu_limits == limits
    bench.do(Disconnected())
    (joined,) = [
        command.message
        for command in bench.do(Connected(LEASE_S))
        if isinstance(command, Send) and isinstance(command.message, RankJoined)
    ]
    assert joined.gpu.limits == limits


def test_a_counter_that_stands_still_is_not_waited_for_long(bench: Bench) -> None:
    counted(bench, 0.0)
    bench.now_s += 0.1
    counted(bench, 10.0)
    bench.run(0)
    assert bench.after(COUNTER_WAIT_S / 2, Tick()) == []
    (message,) = telemetry(bench.after(COUNTER_WAIT_S, Tick()))
    assert message.iterations[0].energy_j == pytest.approx(80.0), "at the power of the last window"


def test_finished_iterations_under_two_plans_go_separately(bench: Bench) -> None:
    counted(bench, 0.0)
    bench.offer(1, 1, Stock())
    for number in range(3):
        bench.run(number)
    messages = telemetry(counted(bench, 240.0))
    assert [[(row.iteration, row.plan_version) for row in each.iterations] for each in messages] == [
        [(0, 0)],
        [(1, 1), (2, 1)],
    ]


@pytest.mark.parametrize("lost", [(Edge.BEGIN, F1), (Edge.END, B1)])
def test_a_lost_edge_costs_its_sample_and_the_regularity(
    bench: Bench, lost: tuple[Edge, Computation]
) -> None:
    counted(bench, 0.0)
    bench.iteration(Edge.BEGIN, 0)
    for computation in ORDER:
        for edge in Edge:
            bench.now_s += 0.1
            if (edge, computation) != lost:
                bench.mark(edge, 0, computation)
    bench.iteration(Edge.END, 0)
    (message,) = telemetry(counted(bench, 80.0))
    assert not message.iterations[0].is_regular
    assert [row.computation for row in message.computations] == [c for c in ORDER if c != lost[1]]


@pytest.mark.parametrize("lost", Edge)
def test_an_iteration_with_a_lost_edge_is_not_reported(bench: Bench, lost: Edge) -> None:
    counted(bench, 0.0)
    for number in range(2):
        for edge in Edge:
            bench.now_s += 0.1
            if (edge, number) != (lost, 0):
                bench.iteration(edge, number)
    (message,) = telemetry(counted(bench, 80.0))
    assert [row.iteration for row in message.iterations] == [1]


def test_a_deviating_iteration_is_reported_as_irregular(bench: Bench) -> None:
    counted(bench, 0.0)
    bench.iteration(Edge.BEGIN, 0)
    bench.now_s += 0.1
    bench.mark(Edge.BEGIN, 0, F1, ordinal=0)
    bench.iteration(Edge.END, 0)
    bench.now_s += 0.1
    (message,) = telemetry(counted(bench, 20.0))
    assert message.iterations[0].is_regular is False
    assert message.computations == ()


def test_before_the_counter_is_watched_nothing_is_regular(bench: Bench) -> None:
    bench.run(0)
    (message,) = telemetry(bench.after(COUNTER_WAIT_S, Tick()))
    assert message.iterations[0].is_regular is False
    assert message.iterations[0].energy_j == 0


def test_times_come_from_no_future_and_never_go_back(bench: Bench) -> None:
    counted(bench, 0.0)
    bench.do(IterationMark(Edge.BEGIN, 0, int(1e18)))
    bench.now_s += 0.5
    bench.do(IterationMark(Edge.END, 0, int(1e18)))
    bench.do(IterationMark(Edge.BEGIN, 1, int(1e18)))
    bench.now_s += 0.5
    bench.do(IterationMark(Edge.END, 1, 0))  # not after its begin: an iteration of no length is none
    (message,) = telemetry(counted(bench, 50.0))
    assert [row.iteration for row in message.iterations] == [0]
    assert message.iterations[0].duration_s == pytest.approx(0.5)


def test_the_energy_estimate_is_that_of_the_plan_and_its_clock(bench: Bench) -> None:
    """Forwards draw 300 W, backwards 400 W and waiting 100 W; the counter moves every 70 ms."""
    power_w = {Kind.FORWARD: 300.0, Kind.BACKWARD: 400.0}
    bench.offer(7, 0, Hold(1000))
    bench.do(clock_set(1000, bench.now_s))
    messages: list[Telemetry] = []
    energy_j = 0.0
    tick = 0
    for number in range(8):
        bench.iteration(Edge.BEGIN, number)
        for computation in ORDER:
            for drawn_w, hundredths, edge in (
                (100.0, 3, Edge.BEGIN),
                (power_w[computation.kind], 5 + number % 3, Edge.END),
            ):
                for _ in range(hundredths):
                    bench.now_s += 0.01
                    energy_j += drawn_w * 0.01
                    tick += 1
                    if tick % 7 == 0:
                        messages += telemetry(counted(bench, energy_j))
                bench.mark(edge, number, computation)
        bench.iteration(Edge.END, number)
    estimate = [message.energy for message in messages if message.energy is not None][-1]
    assert estimate.plan_version == 7
    assert estimate.blocking_power_w == pytest.approx(100, rel=0.1)
    samples = {sample.kind: sample for sample in estimate.samples}
    assert {(sample.chunk, sample.clock_mhz) for sample in estimate.samples} == {(0, 1000)}
    for kind, sample in samples.items():
        assert sample.energy_j == pytest.approx(power_w[kind] * sample.time_s, rel=0.05)
        assert sample.time_s == pytest.approx(0.06, abs=0.003)
        assert sample.computation_count == 2 * estimate.iteration_count


def test_a_computation_during_which_the_clock_changed_is_no_sample(bench: Bench) -> None:
    bench.offer(1, 0, Hold(1000))
    energy_j = 0.0
    messages: list[Telemetry] = []
    for number in range(6):
        bench.iteration(Edge.BEGIN, number)
        for computation in ORDER:
            bench.mark(Edge.BEGIN, number, computation)
            if computation == F0:  # every forward of microbatch 0 sees its clock change
                bench.do(clock_set(1000 if number % 2 else 800, bench.now_s + 0.04))
            for _ in range(2):
                bench.now_s += 0.05
                energy_j += 10.0
                messages += telemetry(counted(bench, energy_j))
            bench.mark(Edge.END, number, computation)
        bench.iteration(Edge.END, number)
    estimate = [message.energy for message in messages if message.energy is not None][-1]
    counts = {(s.kind, s.clock_mhz): s.computation_count for s in estimate.samples}
    forward_count = sum(count for (kind, _), count in counts.items() if kind is Kind.FORWARD)
    assert forward_count == estimate.iteration_count, "F1 only"


def test_relative_work_is_told_with_its_iteration() -> None:
    bench = Bench().accepted()
    commands: list[Command] = []
    for number, permille in enumerate((0, 1250)):
        bench.do(IterationMark(Edge.BEGIN, number, int(bench.now_s * 1e9), permille))
        for computation in bench.order:
            bench.mark(Edge.BEGIN, number, computation)
            bench.now_s += 0.1
            bench.mark(Edge.END, number, computation)
        commands += bench.iteration(Edge.END, number)
    commands += bench.after(10.0, Tick())
    works = [row.relative_work for message in telemetry(commands) for row in message.iterations]
    assert works == [0.0, 1.25]
