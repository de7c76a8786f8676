"""The life of one rank in the agent, as a pure state machine: events and the time in, commands out.

Theory of operation. A session begins when a trainer has said hello and ends when that trainer finishes or
vanishes, or its GPU fails. Four things go on in it, each with little to do with the others:

*Standing with the coordinator.* `rank.standing` says when the rank is announced (`RankJoined`); the answer
brings the registered order, or a refusal. Offers are answered with a refusal until the rank is accepted.

*Plans.* At most one is in force and at most one pending. An offer that is accepted becomes pending, in place
of any other, and comes into force whole at the begin of its start iteration. Without a word from the
coordinator for the lease, once refused, or without the right to set clocks, no plan is in force.

*Clocks.* What is wanted follows from the marks; `clocks.keeper` decides it, and when. Computations are
known by identity; an iteration that deviates from the registered order runs at stock to its end. After
`MOST_IRREGULAR` in a row iterations run at stock from their begin on, until one is to order again. So does
what lies between iterations, if it takes long, and a trainer of which nothing is heard for long. Lost marks
only lose samples. Marks never come from the future and never go back in time here, whatever the trainer
says.

*Measurement.* `rank.recorder` makes telemetry of finished iterations. What the energy counter says
of a plan takes milliseconds to work out, so it is asked for (`EstimateEnergy`) and comes back as an event.

    event                    what it does
    ------------------------ --------------------------------------------------------------------------------
    TrainerJoined            reset: an agent that died may have left a clock
    TrainerSpecified         announce the rank, also if it was accepted as of another specification
    Connected, Disconnected  announce the rank; forget the acceptance
    Heard                    the lease starts anew
    RankAccepted, RankRefused, PlanOffer           as above
    IterationMark, ComputationMark                 as above
    WaitMark                 what the computation under way waits for others is left out of its time
    CounterChange, ClockSet  measurement
    Estimated                telemetry
    LimitsRead               said with all telemetry to come
    SetNotPermitted          stock from now on; offers of clocks are refused
    GpuFailed                reset, RankLeft(GPU_FAILED); the session has ended
    Finish, TrainerGone      reset, RankLeft(FINISHED, TRAINER_GONE); the session has ended
    AgentStops               reset; the session has ended (the agent's Goodbye speaks for all its ranks)
    Tick                     lease, announcing again, telemetry that waits for the counter, trainers that hang
"""

from dataclasses import dataclass, replace
from typing import assert_never

from perseus.agent.clocks.keeper import ClockKeeper, Clocks
from perseus.agent.clocks.sets import ClockSet, ResetClock
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
    ClockStatistics,
    FromSession,
    GpuDescription,
    Hold,
    PlanAnswer,
    PlanId,
    PlanInForce,
    PlanOffer,
    PlanRefusal,
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
from perseus.agent.rank.recorder import Iteration, PlanRecord, Recorder, Run
from perseus.agent.rank.standing import Standing

MOST_IRREGULAR = 2
"""After so many iterations in a row that are not to order, the next ones begin at stock."""


# --- State --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    """An accepted offer. `clocks_mhz` has one clock for each computation of the order, None for stock."""

    plan: PlanId
    start_iteration: int
    lease_s: float
    clocks_mhz: Clocks
    is_hold: bool


class Session:
    """One rank, from its trainer's hello to its end. See the module's docstring.

    With `observe` the session never sets a clock, and refuses all offers but stock. Telemetry up to
    `after_sequence` is not its own. With `is_registered` the trainer will not say what it belongs to. `owner`
    is whose process the trainer is.
    """

    def __init__(
        self,
        rank: Rank,
        gpu: GpuDescription,
        *,
        observe: bool = False,
        after_sequence: int = 0,
        is_registered: bool = False,
        owner: str = "",
    ) -> None:
        self.rank = rank
        self.has_ended = False
        self._gpu = gpu
        self._owner = owner
        self._after_sequence = after_sequence
        self._commands: list[Command] = []
        self._standing = Standing(is_registered=is_registered)
        self._order: tuple[Computation, ...] | None = None
        self._positions: dict[Computation, int] = {}
        self._begins_alone = False
        # Plans.
        self._in_force: _Plan | None = None
        self._pending: _Plan | None = None
        self._forbidden: str | None = "the agent only observes" if observe else None
        # Clocks.
        self._keeper = ClockKeeper()
        self._iteration: Iteration | None = None
        self._begun_iteration = -1
        self._irregular_count = 0
        self._marked_at_s = 0.0
        # Measurement.
        self._recorder = Recorder(gpu.supported_clocks_mhz[0])

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """What is to be done, in order, about something that is now known. Times are CLOCK_MONOTONIC."""
        if not self.has_ended:
            self._dispatch(event, now_s)
        commands, self._commands = self._commands, []
        return commands

    @property
    def wanted_clock_mhz(self) -> int | None:
        """The clock asked for last, None for stock."""
        return self._keeper.wanted_mhz

    @property
    def has_plan(self) -> bool:
        """Whether a plan, or a clock to measure, is in force."""
        return self._in_force is not None

    def give_up(self) -> list[FromSession]:
        """End it whatever state it is in, after an error of our own; what is to be said once all is over."""
        self.has_ended = True
        self._pending = self._in_force = self._iteration = None
        self._commands, self._recorder = [], Recorder(self._gpu.supported_clocks_mhz[0])
        return [RankLeft(self.rank, RankLeftReason.GPU_FAILED)]

    def _dispatch(self, event: Event, now_s: float) -> None:
        match event:
            case ComputationMark(Edge.BEGIN):
                self._on_computation_begin(event, now_s)
            case ComputationMark():
                self._on_computation_end(event, now_s)
            case WaitMark():
                self._on_wait(event, now_s)
            case IterationMark(Edge.BEGIN):
                self._on_iteration_begin(event, now_s)
            case IterationMark():
                self._on_iteration_end(event, now_s)
            case CounterChange():
                self._on_counter_change(event, now_s)
            case ClockSet():
                self._on_clock_set(event)
            case Estimated():
                self._on_estimated(event)
            case LimitsRead():
                self._gpu = replace(self._gpu, limits=event.limits)
            case Tick():
                self._on_tick(now_s)
            case Heard():
                self._on_heard(now_s)
            case PlanOffer():
                self._on_plan_offer(event)
            case Connected():
                self._on_connected(now_s)
            case Disconnected():
                self._on_disconnected()
            case RankAccepted():
                self._on_rank_accepted(event)
            case RankRefused():
                self._on_rank_refused(now_s)
            case SetNotPermitted():
                self._on_set_not_permitted(event)
            case TrainerJoined():
                self._on_trainer_joined()
            case TrainerSpecified():
                self._on_trainer_specified(event)
            case GpuFailed():
                self._on_gpu_failed(now_s)
            case Finish():
                self._on_finish(now_s)
            case TrainerGone():
                self._on_trainer_gone(now_s)
            case AgentStops():
                self._on_agent_stops(now_s)
            case _:
                assert_never(event)

    # --- Trainer, GPU and agent -----------------------------------------------------------------------------

    def _on_trainer_joined(self) -> None:
        if self._forbidden is None:
            self._commands.append(ResetClock())

    def _on_trainer_specified(self, event: TrainerSpecified) -> None:
        if self._standing.specify(event.spec_fingerprint):
            self._drop_plans()  # they were made for something else
            self._announce()

    def _on_gpu_failed(self, now_s: float) -> None:
        self._leave(RankLeftReason.GPU_FAILED, now_s)

    def _on_finish(self, now_s: float) -> None:
        self._leave(RankLeftReason.FINISHED, now_s)

    def _on_trainer_gone(self, now_s: float) -> None:
        self._leave(RankLeftReason.TRAINER_GONE, now_s)

    def _on_agent_stops(self, now_s: float) -> None:
        self._end(now_s)

    def _leave(self, reason: RankLeftReason, now_s: float) -> None:
        self._end(now_s)
        self._commands.append(Send(RankLeft(self.rank, reason)))

    def _end(self, now_s: float) -> None:
        self._pending = self._in_force = self._iteration = None
        if self._forbidden is None:
            self._commands.append(ResetClock())
        self._report(now_s, waits=False)
        self.has_ended = True

    def _on_tick(self, now_s: float) -> None:
        if self._standing.is_announcement_due(now_s):
            self._announce()
        leases_s = [plan.lease_s for plan in (self._in_force, self._pending) if plan]
        if leases_s and now_s - self._standing.heard_at_s > min(leases_s):
            self._drop_plans()
        if self._in_force is not None and self._keeper.is_silent(self._marked_at_s, now_s):
            self._fall_back()
        self._report(now_s)

    # --- Standing with the coordinator ----------------------------------------------------------------------

    def _on_connected(self, now_s: float) -> None:
        self._standing.connect(now_s)
        self._announce()

    def _on_disconnected(self) -> None:
        self._standing.disconnect()

    def _on_heard(self, now_s: float) -> None:
        self._standing.heard_at_s = now_s

    def _on_rank_accepted(self, accepted: RankAccepted) -> None:
        self._standing.accept()
        order = accepted.order
        if order != self._order:
            self._drop_plans()  # they were made for another order
            self._deviate()
            self._irregular_count = 0
            self._order = order
            self._positions = {computation: position for position, computation in enumerate(order)}
            like_first = [
                each for each in order if (each.kind, each.chunk) == (order[0].kind, order[0].chunk)
            ]
            self._begins_alone = len(like_first) == 1
            self._follow(None)

    def _on_rank_refused(self, now_s: float) -> None:
        self._standing.refuse(now_s)
        self._drop_plans()

    def _announce(self) -> None:
        if not self._standing.may_announce():
            return
        in_force = self._in_force.plan if self._in_force else NO_PLAN
        self._send(
            RankJoined(
                self.rank,
                self._gpu,
                self._begun_iteration,
                in_force,
                self._after_sequence,
                self._standing.spec_fingerprint or "",
                self._owner,
            )
        )

    def _send(self, message: RankJoined | PlanAnswer | PlanInForce) -> None:
        if self._standing.is_connected:
            self._commands.append(Send(message))

    # --- Plans ----------------------------------------------------------------------------------------------

    def _on_plan_offer(self, offer: PlanOffer) -> None:
        refusal = self._consider(offer)
        self._send(PlanAnswer(self.rank, offer.plan, refusal, self._begun_iteration))

    def _consider(self, offer: PlanOffer) -> PlanRefusal | None:
        """Make the offer pending, or say why not."""
        refusal = self._refusal(offer)
        if refusal is not None:
            return refusal
        assert self._order is not None  # a rank that was accepted has one
        accepted = _Plan(
            offer.plan,
            offer.start_iteration,
            offer.lease_s,
            _clocks_mhz(offer.clocks, len(self._order)),
            is_hold=isinstance(offer.clocks, Hold),
        )
        if self._in_force and self._in_force.plan == offer.plan:
            self._pending = None
        else:
            self._pending = accepted
        return None

    def _refusal(self, offer: PlanOffer) -> PlanRefusal | None:
        reasons = PlanRefusalReason
        if not self._standing.is_accepted or self._order is None:
            return PlanRefusal(reasons.UNKNOWN_RANK, f"{self.rank}: not announced, or not accepted yet")
        if self._forbidden is not None and not isinstance(offer.clocks, Stock):
            return PlanRefusal(reasons.NOT_PERMITTED, f"{self.rank}: {self._forbidden}")
        match offer.clocks:
            case StageClocks(computations, _) if computations != self._order:
                return PlanRefusal(
                    reasons.ORDER_MISMATCH, f"{self.rank}: {_difference(self._order, computations)}"
                )
            case StageClocks(computations, clocks):
                wanted = {c for each, c in zip(computations, clocks, strict=True) if each.kind != Kind.FIXED}
            case Hold(clock_mhz):
                wanted = {clock_mhz}
            case Stock():
                wanted = set()
        foreign = sorted(wanted.difference(self._gpu.supported_clocks_mhz))
        if foreign:
            return PlanRefusal(
                reasons.CLOCK_NOT_SUPPORTED,
                f"{self.rank}: expected clocks that GPU {self._gpu.uuid} supports, found {foreign} MHz",
                tuple(foreign),
            )
        is_in_force = self._in_force is not None and self._in_force.plan == offer.plan
        if offer.start_iteration <= self._begun_iteration and not is_in_force:
            return PlanRefusal(
                reasons.PAST_START,
                f"{self.rank}: expected a start after iteration {self._begun_iteration}, which has begun, "
                f"found {offer.start_iteration}",
            )
        return None

    def _come_into_force(self, plan: _Plan, iteration: int) -> None:
        self._pending = None
        self._follow(plan)
        self._send(PlanInForce(self.rank, plan.plan, iteration))

    def _drop_plans(self) -> None:
        """Stock at once, no plan in force, and none to come: the coordinator must know of either."""
        has_any = self._in_force is not None or self._pending is not None
        self._pending = None
        if self._in_force is not None:
            self._follow(None)
            self._deviate()
        if has_any:
            self._send(PlanInForce(self.rank, NO_PLAN, self._begun_iteration + 1))
        self._fall_back()

    def _follow(self, plan: _Plan | None) -> None:
        """This plan is in force from now on, or none."""
        self._in_force = plan
        clocks_mhz = plan.clocks_mhz if plan is not None else (None,) * len(self._positions)
        self._keeper.follow(clocks_mhz, keeps_gaps=plan is not None and plan.is_hold and self._begins_alone)
        self._recorder.follow(plan.plan.version if plan is not None else NO_PLAN.version, clocks_mhz)

    # --- Clocks ---------------------------------------------------------------------------------------------

    def _on_set_not_permitted(self, event: SetNotPermitted) -> None:
        self._forbidden = event.message
        self._keeper = ClockKeeper()  # nothing was ever set, so there is nothing to reset
        self._drop_plans()

    def _fall_back(self) -> None:
        if self._forbidden is None:
            self._commands += self._keeper.fall_back()

    def _deviate(self) -> None:
        """The iteration under way is not as planned: stock until the next one begins."""
        if self._iteration is not None:
            self._iteration.has_deviated = True
            self._fall_back()

    def _following_clocks(self, iteration: int) -> Clocks:
        """The clocks of the iteration after this one."""
        plan = self._in_force
        if self._pending is not None and iteration + 1 >= self._pending.start_iteration:
            plan = self._pending
        return plan.clocks_mhz if plan is not None else (None,) * len(self._positions)

    def _mark_s(self, time_ns: int, now_s: float) -> float:
        self._marked_at_s = min(max(time_ns / 1e9, self._marked_at_s), now_s)
        return self._marked_at_s

    def _on_iteration_begin(self, mark: IterationMark, now_s: float) -> None:
        relative_work = mark.relative_work_permille / 1000
        self._begin_iteration(mark.iteration, self._mark_s(mark.time_ns, now_s), now_s, relative_work)

    def _begin_iteration(
        self, number: int, begin_s: float | None, now_s: float, relative_work: float = 0.0
    ) -> None:
        if number <= self._begun_iteration:
            return
        self._begun_iteration = number
        if self._pending is not None and number >= self._pending.start_iteration:
            self._come_into_force(self._pending, number)
        # One whose end mark was lost is forgotten here.
        self._iteration = self._recorder.iteration(number, begin_s, relative_work)
        if self._irregular_count >= MOST_IRREGULAR:
            self._iteration.is_at_stock = True
            self._fall_back()
        elif self._order is not None and self._forbidden is None:
            self._commands += self._keeper.begin_iteration(now_s)

    def _on_iteration_end(self, mark: IterationMark, now_s: float) -> None:
        end_s = self._mark_s(mark.time_ns, now_s)
        self._begin_iteration(mark.iteration, None, now_s)  # its begin mark may have been lost
        iteration = self._iteration
        if iteration is None or iteration.number != mark.iteration:
            return
        self._iteration = None
        if self._order is not None:
            is_to_order = not iteration.has_deviated and iteration.position == len(self._order) - 1
            self._irregular_count = 0 if is_to_order else self._irregular_count + 1
        if self._order is not None and self._forbidden is None and not iteration.is_at_stock:
            following = self._following_clocks(mark.iteration)
            self._commands += self._keeper.end_iteration(end_s, now_s, following)
        # One of no length (marks whose times were the same) is no iteration.
        if iteration.begin_s is not None and end_s > iteration.begin_s and self._order is not None:
            self._recorder.finish(iteration, end_s)

    def _on_computation_begin(self, mark: ComputationMark, now_s: float) -> None:
        begin_s = self._mark_s(mark.time_ns, now_s)
        iteration = self._marked_iteration(mark.iteration, now_s)
        if iteration is None:
            return
        # The ordinal tells a lost mark from a deviation.
        position = self._positions.get(mark.computation)
        if position is None or position != mark.ordinal or position <= iteration.position:
            self._deviate()
            return
        iteration.position = position
        iteration.runs.append(Run(mark.computation, position, begin_s))
        if self._forbidden is None and not iteration.is_at_stock:
            following = self._following_clocks(iteration.number)
            self._commands += self._keeper.begin(position, begin_s, now_s, following)

    def _on_computation_end(self, mark: ComputationMark, now_s: float) -> None:
        end_s = self._mark_s(mark.time_ns, now_s)
        iteration = self._marked_iteration(mark.iteration, now_s)
        if iteration is None:
            return
        position = self._positions.get(mark.computation)
        if position is None or position < iteration.position:
            return  # the latest computation seen is a later one
        iteration.position = position
        if iteration.runs and iteration.runs[-1].computation == mark.computation:
            iteration.runs[-1].end(end_s)
        if self._forbidden is None and not iteration.is_at_stock:
            following = self._following_clocks(iteration.number)
            self._commands += self._keeper.end(position, end_s, now_s, following)

    def _on_wait(self, mark: WaitMark, now_s: float) -> None:
        time_s = self._mark_s(mark.time_ns, now_s)
        iteration = self._marked_iteration(mark.iteration, now_s)
        if iteration is not None and iteration.runs:
            iteration.runs[-1].wait(mark.edge, time_s)

    def _marked_iteration(self, number: int, now_s: float) -> Iteration | None:
        """The iteration under way, if it is this one and runs to order."""
        self._begin_iteration(number, None, now_s)  # its begin mark may have been lost
        iteration = self._iteration
        if iteration is None or iteration.number != number or iteration.has_deviated or self._order is None:
            return None
        return iteration

    # --- Measurement ----------------------------------------------------------------------------------------

    def _on_counter_change(self, change: CounterChange, now_s: float) -> None:
        self._recorder.counter_changed(change)
        self._report(now_s)

    def _on_clock_set(self, done: ClockSet) -> None:
        self._recorder.clock_set(done)
        self._keeper.lead.clock_set(done)

    def _on_estimated(self, event: Estimated) -> None:
        self._commands.append(Send(Telemetry(self.rank, (), (), event.estimate, None)))

    def _report(self, now_s: float, *, waits: bool = True) -> None:
        """Tell of all iterations that can be measured by now; of all that have ended, if nothing waits."""
        needed_s = self._marked_at_s
        if self._iteration is not None and self._iteration.needed_s is not None:
            needed_s = self._iteration.needed_s
        for report in self._recorder.report(self._order, now_s, needed_s=needed_s, waits=waits):
            clocks = None if self._forbidden is not None else self._clock_statistics(report.plan)
            self._commands.append(
                Send(
                    Telemetry(
                        self.rank, report.iterations, report.computations, None, clocks, self._gpu.limits
                    )
                )
            )
            if report.request is not None and waits:
                self._commands.append(EstimateEnergy(report.request))

    def _clock_statistics(self, plan: PlanRecord) -> ClockStatistics:
        tally = plan.tally
        return ClockStatistics(
            plan_version=plan.version,
            set_count=tally.set_count,
            computation_count=tally.computation_count,
            late_raise_count=tally.late_raise_count,
            missed_count=tally.missed_count,
            computation_time_s=tally.computation_time_s,
            on_clock_time_s=tally.on_clock_time_s,
            set_latency_s=self._keeper.lead.latency_s,
            margin_s=self._keeper.lead.margin_s,
            prediction_error_s=self._keeper.prediction_error_s,
            set_latency_count=self._keeper.lead.set_count,
        )

    def validate(self) -> None:
        """Check what must always hold; AssertionError otherwise. Called by tests after every event."""
        assert not self._commands
        self._keeper.validate(self._gpu.supported_clocks_mhz)
        assert self._forbidden is None or self._keeper.wanted_mhz is None
        assert self._pending is None or self._pending.start_iteration > self._begun_iteration
        for plan in (self._in_force, self._pending):
            assert plan is None or (self._order is not None and len(plan.clocks_mhz) == len(self._order))
        assert self._in_force is None or self._in_force.start_iteration <= self._begun_iteration
        if self._iteration is not None:
            assert self._iteration.number == self._begun_iteration
            if not self._iteration.has_deviated:
                positions = [self._positions[run.computation] for run in self._iteration.runs]
                assert positions == sorted(set(positions))
        self._standing.validate()
        self._recorder.validate()
        if not self.has_ended:
            in_force = self._in_force.plan if self._in_force else NO_PLAN
            assert self._recorder.plan_version == in_force.version
        else:
            assert not self._recorder.has_unreported
            assert self._in_force is None
            assert self._pending is None
            assert self._iteration is None


def _clocks_mhz(clocks: Stock | Hold | StageClocks, computation_count: int) -> tuple[int | None, ...]:
    """The clock to want for each computation; a FIXED one gets that of the next that has one (cyclic)."""
    match clocks:
        case Stock():
            return (None,) * computation_count
        case Hold(clock_mhz):
            return (clock_mhz,) * computation_count
        case StageClocks(computations, planned_mhz):
            following_mhz = next(
                (c for each, c in zip(computations, planned_mhz, strict=True) if each.kind != Kind.FIXED),
                None,
            )
            wanted: list[int | None] = []
            for computation, clock_mhz in zip(reversed(computations), reversed(planned_mhz), strict=True):
                if computation.kind != Kind.FIXED:
                    following_mhz = clock_mhz
                wanted.append(following_mhz)
            return tuple(reversed(wanted))


def _difference(expected: tuple[Computation, ...], found: tuple[Computation, ...]) -> str:
    if len(expected) != len(found):
        return f"expected the registered order of {len(expected)} computations, found {len(found)}"
    position = next(i for i, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1])
    return f"computation {position}: expected {expected[position]}, as registered, found {found[position]}"
