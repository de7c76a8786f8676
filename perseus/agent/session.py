"""The life of one rank in the agent, as a pure state machine: events and the time in, commands out.

Theory of operation. A session begins when a trainer has said hello and ends when that trainer finishes or
vanishes, or its GPU fails. Four things go on in it, each with little to do with the others:

*Standing with the coordinator.* disconnected → announced → accepted, and back. A connection announces the
rank (`RankJoined`); the answer brings the registered order, or a refusal, and then the rank is announced
again every `JOIN_RETRY_S` (the job may not be registered yet, or another agent's lease may still run). Offers
are answered with a refusal until the rank is accepted.

*Plans.* At most one is in force and at most one pending. An offer that is accepted becomes pending, in place
of any other, and comes into force whole at the begin of its start iteration. Without a word from the
coordinator for the lease, once refused, or without the right to set clocks, no plan is in force.

*Clocks.* What is wanted follows from the marks. A set takes 10–20 ms, so (DESIGN §7, in its simple form) when
a computation begins, the clock of the next one is wanted already if it is higher, and when it ends, the clock
of the next one is wanted: lateness costs joules, never seconds. Next is cyclic: after the last computation
comes the first of the next iteration, under the pending plan if that begins there. Stock counts as the
highest clock. Computations are known by identity; an iteration that deviates from the registered order runs
at stock to its end. Lost marks only lose samples.

*Measurement.* A finished iteration waits until the energy counter has moved past its end (or 300 ms), and
then becomes telemetry. Which clocks were in force when is settled only then, as the worker's completions may
be heard after the marks that they precede. Marks never come from the future and never go back in time here,
whatever the trainer says.

    event                    what it does
    ------------------------ --------------------------------------------------------------------------------
    TrainerJoined            reset: an agent that died may have left a clock
    Connected, Disconnected  announce the rank; forget the acceptance
    Heard                    the lease starts anew
    RankAccepted, RankRefused, PlanOffer           as above
    IterationMark, ComputationMark                 as above
    CounterChange, ClockSet  measurement
    SetNotPermitted          stock from now on; offers of clocks are refused
    GpuFailed                reset, RankLeft(GPU_FAILED); the session has ended
    Finish, TrainerGone      reset, RankLeft(FINISHED, TRAINER_GONE); the session has ended
    AgentStops               reset; the session has ended (the agent's Goodbye speaks for all its ranks)
    Tick                     lease, announcing again, telemetry that waits for the counter
"""

from collections import deque
from dataclasses import dataclass, field
from typing import assert_never

from perseus.agent.computation import Computation, Kind, Rank
from perseus.agent.energy import CounterChange
from perseus.agent.events import (
    AgentStops,
    ClockSet,
    Command,
    Connected,
    Disconnected,
    Event,
    GpuFailed,
    Heard,
    ResetClock,
    Send,
    SetClock,
    SetNotPermitted,
    Tick,
    TrainerGone,
    TrainerJoined,
)
from perseus.agent.marks import ComputationMark, Edge, Finish, IterationMark
from perseus.agent.messages import (
    NO_PLAN,
    ComputationRow,
    GpuDescription,
    Hold,
    IterationRow,
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
from perseus.agent.sampling import (
    FinishedComputation,
    FinishedIteration,
    Sampler,
    energy_at_j,
    throttling_reasons,
)

JOIN_RETRY_S = 1.0
"""How long after a refusal a rank is announced again."""

COUNTER_WAIT_S = 0.3
"""How long a finished iteration waits for the energy counter: some of its longest periods."""

_CHANGES_KEPT = 256  # of the counter: 25 s at 100 ms, which bounds the regression to some 10 ms


# --- State --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    """An accepted offer. `clocks_mhz` has one clock for each computation of the order, None for stock."""

    plan: PlanId
    start_iteration: int
    lease_s: float
    clocks_mhz: tuple[int | None, ...]


@dataclass(slots=True)
class _Run:
    """A computation that has begun."""

    computation: Computation
    begin_s: float
    end_s: float | None = None


@dataclass(slots=True)
class _Iteration:
    """An iteration that has begun. `begin_s` is None if its begin mark was lost."""

    number: int
    begin_s: float | None
    sampler: Sampler
    end_s: float = 0.0
    runs: list[_Run] = field(default_factory=list)
    position: int = -1
    """Of the latest computation seen, in the order."""
    has_deviated: bool = False


class Session:
    """One rank, from its trainer's hello to its end. See the module's docstring.

    With `observe` the session never sets a clock, and refuses all offers but stock.
    """

    def __init__(self, rank: Rank, gpu: GpuDescription, *, observe: bool = False) -> None:
        self.rank = rank
        self.has_ended = False
        self._gpu = gpu
        self._commands: list[Command] = []
        # Standing with the coordinator.
        self._is_connected = False
        self._is_accepted = False
        self._announce_at_s: float | None = None
        self._heard_at_s = 0.0
        self._order: tuple[Computation, ...] | None = None
        self._positions: dict[Computation, int] = {}
        # Plans.
        self._in_force: _Plan | None = None
        self._pending: _Plan | None = None
        self._forbidden: str | None = "the agent only observes" if observe else None
        # Clocks.
        self._wanted_mhz: int | None = None
        self._iteration: _Iteration | None = None
        self._begun_iteration = -1
        self._marked_at_s = 0.0
        # Measurement.
        self._sampler = Sampler(NO_PLAN.version)
        self._finished: deque[_Iteration] = deque()
        self._changes: list[CounterChange] = []
        self._clock_sets: list[ClockSet] = []

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """What is to be done, in order, about something that is now known. Times are CLOCK_MONOTONIC."""
        if not self.has_ended:
            self._dispatch(event, now_s)
        commands, self._commands = self._commands, []
        return commands

    def _dispatch(self, event: Event, now_s: float) -> None:
        match event:
            case ComputationMark(Edge.BEGIN):
                self._begin_computation(event, self._mark_s(event.time_ns, now_s))
            case ComputationMark():
                self._end_computation(event, self._mark_s(event.time_ns, now_s))
            case IterationMark(Edge.BEGIN, iteration):
                time_s = self._mark_s(event.time_ns, now_s)
                self._begin_iteration(iteration, time_s)
            case IterationMark(_, iteration):
                self._end_iteration(iteration, self._mark_s(event.time_ns, now_s))
            case CounterChange():
                self._changes.append(event)
                self._emit_telemetry(now_s)
            case ClockSet():
                self._clock_sets.append(event)
            case Tick():
                self._tick(now_s)
            case Heard():
                self._heard_at_s = now_s
            case PlanOffer():
                refusal = self._consider(event)
                self._send(PlanAnswer(self.rank, event.plan, refusal, self._begun_iteration))
            case Connected():
                self._is_connected = True
                self._heard_at_s = now_s
                self._announce()
            case Disconnected():
                self._is_connected = self._is_accepted = False
                self._announce_at_s = None
            case RankAccepted(_, order):
                self._accepted(order)
            case RankRefused():
                self._is_accepted = False
                self._announce_at_s = now_s + JOIN_RETRY_S
                self._drop_plans()
            case SetNotPermitted(message):
                self._forbidden = message
                self._wanted_mhz = None  # nothing was ever set, so there is nothing to reset
                self._drop_plans()
            case TrainerJoined():
                if self._forbidden is None:
                    self._commands.append(ResetClock())
            case GpuFailed():
                self._leave(RankLeftReason.GPU_FAILED, now_s)
            case Finish():
                self._leave(RankLeftReason.FINISHED, now_s)
            case TrainerGone():
                self._leave(RankLeftReason.TRAINER_GONE, now_s)
            case AgentStops():
                self._end(now_s)
            case _:
                assert_never(event)

    # --- Standing with the coordinator ----------------------------------------------------------------------

    def _announce(self) -> None:
        self._announce_at_s = None
        in_force = self._in_force.plan if self._in_force else NO_PLAN
        self._send(RankJoined(self.rank, self._gpu, self._begun_iteration, in_force))

    def _accepted(self, order: tuple[Computation, ...]) -> None:
        self._is_accepted = True
        if order != self._order:
            self._drop_plans()  # they were made for another order
            self._deviate()
            self._order = order
            self._positions = {computation: position for position, computation in enumerate(order)}

    def _send(self, message: RankJoined | PlanAnswer | PlanInForce) -> None:
        if self._is_connected:
            self._commands.append(Send(message))

    def _leave(self, reason: RankLeftReason, now_s: float) -> None:
        self._end(now_s)
        self._commands.append(Send(RankLeft(self.rank, reason)))

    def _end(self, now_s: float) -> None:
        self._pending = self._in_force = self._iteration = None
        self._wanted_mhz = None
        if self._forbidden is None:
            self._commands.append(ResetClock())
        self._emit_telemetry(now_s, waits=False)
        self.has_ended = True

    def _tick(self, now_s: float) -> None:
        if self._announce_at_s is not None and now_s >= self._announce_at_s:
            self._announce()
        leases_s = [plan.lease_s for plan in (self._in_force, self._pending) if plan]
        if leases_s and now_s - self._heard_at_s > min(leases_s):
            self._drop_plans()
        self._emit_telemetry(now_s)

    # --- Plans ----------------------------------------------------------------------------------------------

    def _consider(self, offer: PlanOffer) -> PlanRefusal | None:
        """Make the offer pending, or say why not."""
        refusal = self._refusal(offer)
        if refusal is not None:
            return refusal
        assert self._order is not None  # a rank that was accepted has one
        accepted = _Plan(
            offer.plan, offer.start_iteration, offer.lease_s, _clocks_mhz(offer.clocks, len(self._order))
        )
        if self._in_force and self._in_force.plan == offer.plan:
            self._pending = None
        else:
            self._pending = accepted
        return None

    def _refusal(self, offer: PlanOffer) -> PlanRefusal | None:
        reasons = PlanRefusalReason
        if not self._is_accepted or self._order is None:
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
        self._in_force, self._pending = plan, None
        self._sampler = Sampler(plan.plan.version)
        self._send(PlanInForce(self.rank, plan.plan, iteration))

    def _drop_plans(self) -> None:
        """Stock at once, and no plan in force."""
        self._pending = None
        if self._in_force is not None:
            self._in_force = None
            self._sampler = Sampler(NO_PLAN.version)
            self._deviate()
            self._send(PlanInForce(self.rank, NO_PLAN, self._begun_iteration + 1))
        self._want(None)

    # --- Clocks ---------------------------------------------------------------------------------------------

    def _want(self, clock_mhz: int | None) -> None:
        if clock_mhz != self._wanted_mhz and self._forbidden is None:
            self._wanted_mhz = clock_mhz
            self._commands.append(ResetClock() if clock_mhz is None else SetClock(clock_mhz))

    def _clock_at(self, position: int, iteration: int) -> int | None:
        """The clock planned for a position in the order; beyond the last comes the next iteration's first."""
        plan = self._in_force
        if position == len(self._positions):
            position, iteration = 0, iteration + 1
            if self._pending is not None and iteration >= self._pending.start_iteration:
                plan = self._pending
        return plan.clocks_mhz[position] if plan is not None else None

    def _deviate(self) -> None:
        """The iteration under way is not as planned: stock until the next one begins."""
        if self._iteration is not None:
            self._iteration.has_deviated = True
            self._want(None)

    def _mark_s(self, time_ns: int, now_s: float) -> float:
        self._marked_at_s = min(max(time_ns / 1e9, self._marked_at_s), now_s)
        return self._marked_at_s

    def _begin_iteration(self, number: int, begin_s: float | None) -> None:
        if number <= self._begun_iteration:
            return
        self._begun_iteration = number
        if self._pending is not None and number >= self._pending.start_iteration:
            self._come_into_force(self._pending, number)
        # One whose end mark was lost is forgotten here.
        self._iteration = _Iteration(number, begin_s, self._sampler)
        if self._order is not None:
            self._want(self._clock_at(0, number))

    def _end_iteration(self, number: int, end_s: float) -> None:
        self._begin_iteration(number, None)  # its begin mark may have been lost
        iteration = self._iteration
        if iteration is None or iteration.number != number:
            return
        self._iteration = None
        if iteration.begin_s is not None and self._order is not None:
            iteration.end_s = end_s
            self._finished.append(iteration)

    def _begin_computation(self, mark: ComputationMark, begin_s: float) -> None:
        iteration = self._marked_iteration(mark)
        if iteration is None:
            return
        # The ordinal tells a lost mark from a deviation.
        position = self._positions.get(mark.computation)
        if position is None or position != mark.ordinal or position <= iteration.position:
            self._deviate()
            return
        iteration.position = position
        iteration.runs.append(_Run(mark.computation, begin_s))
        own_mhz = self._clock_at(position, iteration.number)
        next_mhz = self._clock_at(position + 1, iteration.number)
        self._want(None if own_mhz is None or next_mhz is None else max(own_mhz, next_mhz))

    def _end_computation(self, mark: ComputationMark, end_s: float) -> None:
        iteration = self._marked_iteration(mark)
        if iteration is None:
            return
        position = self._positions.get(mark.computation)
        if position is None or position < iteration.position:
            return  # the latest computation seen is a later one
        iteration.position = position
        if iteration.runs and iteration.runs[-1].computation == mark.computation:
            iteration.runs[-1].end_s = end_s
        self._want(self._clock_at(position + 1, iteration.number))

    def _marked_iteration(self, mark: ComputationMark) -> _Iteration | None:
        """The iteration under way, if it is the mark's and runs to order."""
        self._begin_iteration(mark.iteration, None)  # its begin mark may have been lost
        iteration = self._iteration
        if (
            iteration is None
            or iteration.number != mark.iteration
            or iteration.has_deviated
            or self._order is None
        ):
            return None
        return iteration

    # --- Measurement ----------------------------------------------------------------------------------------

    def _emit_telemetry(self, now_s: float, *, waits: bool = True) -> None:
        counted_until_s = self._changes[-1].time_s if self._changes else 0.0
        while self._finished:
            sampler = self._finished[0].sampler
            iterations: list[IterationRow] = []
            computations: list[ComputationRow] = []
            # One message for all that are ready and ran under the same plan.
            while self._finished and self._finished[0].sampler is sampler:
                end_s = self._finished[0].end_s
                if waits and counted_until_s < end_s and now_s < end_s + COUNTER_WAIT_S:
                    break
                self._measure(self._finished.popleft(), iterations, computations)
            if not iterations:
                break
            estimate = sampler.refreshed_estimate(self._changes)
            telemetry = Telemetry(self.rank, tuple(iterations), tuple(computations), estimate)
            self._commands.append(Send(telemetry))
        self._forget()

    def _measure(
        self, iteration: _Iteration, iterations: list[IterationRow], computations: list[ComputationRow]
    ) -> None:
        assert iteration.begin_s is not None  # others are not kept
        complete = [
            self._finished_computation(run.computation, run.begin_s, run.end_s)
            for run in iteration.runs
            if run.end_s is not None
        ]
        begin_j = energy_at_j(self._changes, iteration.begin_s)
        end_j = energy_at_j(self._changes, iteration.end_s)
        is_regular = (
            not iteration.has_deviated
            and tuple(each.computation for each in complete) == self._order
            and begin_j is not None  # the counter was not yet watched: of no use for energy
        )
        iteration.sampler.add(
            FinishedIteration(iteration.begin_s, iteration.end_s, tuple(complete), is_regular)
        )
        iterations.append(
            IterationRow(
                iteration=iteration.number,
                plan_version=iteration.sampler.plan_version,
                duration_s=iteration.end_s - iteration.begin_s,
                energy_j=end_j - begin_j if begin_j is not None and end_j is not None else 0.0,
                is_regular=is_regular,
                clock_event_reasons=throttling_reasons(self._changes, iteration.begin_s, iteration.end_s),
            )
        )
        computations += [
            ComputationRow(
                iteration=iteration.number,
                computation=each.computation,
                begin_s=each.begin_s - iteration.begin_s,
                duration_s=each.end_s - each.begin_s,
                clock_mhz=each.clock_mhz,
            )
            for each in complete
        ]

    def _finished_computation(
        self, computation: Computation, begin_s: float, end_s: float
    ) -> FinishedComputation:
        clock_mhz = None
        is_pure = True
        for clock_set in self._clock_sets:
            if clock_set.time_s <= begin_s:
                clock_mhz = clock_set.clock_mhz
            elif clock_set.time_s < end_s:
                is_pure = False
        return FinishedComputation(computation, begin_s, end_s, clock_mhz, is_pure)

    def _forget(self) -> None:
        """Drop what no iteration still to be measured can need."""
        del self._changes[:-_CHANGES_KEPT]
        waiting = [*self._finished, *([self._iteration] if self._iteration else [])]
        begins_s = [each.begin_s for each in waiting if each.begin_s is not None]
        needed_s = min(begins_s, default=self._marked_at_s)
        obsolete = 0
        for index, clock_set in enumerate(self._clock_sets):
            if clock_set.time_s <= needed_s:
                obsolete = index  # this one is in force then; those before are not
        del self._clock_sets[:obsolete]

    def validate(self) -> None:
        """Check what must always hold; AssertionError otherwise. Called by tests after every event."""
        assert not self._commands
        assert self._wanted_mhz is None or self._wanted_mhz in self._gpu.supported_clocks_mhz
        assert self._forbidden is None or self._wanted_mhz is None
        assert self._pending is None or self._pending.start_iteration > self._begun_iteration
        for plan in (self._in_force, self._pending):
            assert plan is None or (self._order is not None and len(plan.clocks_mhz) == len(self._order))
        assert self._in_force is None or self._in_force.start_iteration <= self._begun_iteration
        if self._iteration is not None:
            assert self._iteration.number == self._begun_iteration
            if not self._iteration.has_deviated:
                positions = [self._positions[run.computation] for run in self._iteration.runs]
                assert positions == sorted(set(positions))
        assert not self._is_accepted or self._is_connected
        assert len(self._changes) <= _CHANGES_KEPT
        ends_s = [iteration.end_s for iteration in self._finished]
        assert ends_s == sorted(ends_s)
        if not self.has_ended:
            in_force = self._in_force.plan if self._in_force else NO_PLAN
            assert self._sampler.plan_version == in_force.version
        else:
            assert self._wanted_mhz is None
            assert not self._finished
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
