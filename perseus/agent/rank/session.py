"""One rank's session in the agent, as a pure state machine: takes events and the time, returns commands.

Theory of operation. A session begins after a trainer's hello and ends when that trainer finishes or vanishes,
or its GPU fails. It has five largely independent parts:

*State with the coordinator.* `rank.join_state` determines when the rank is announced (`RankJoined`); the
answer contains the registered order, or a refusal. Offers are refused until the rank is accepted.

*Plans.* `rank.plans` accepts or refuses offers. An accepted one comes into force as a whole when its start
iteration begins, an urgent one immediately. No plan is in force after a refusal, without permission to set
clocks, or (but see below) after a lease without a message from the coordinator.

*Maximum clock.* If the coordinator has set one, it replaces stock wherever nothing is planned, and limits
clocks that are held for measuring. It and all plans lapse with the lease, unless it was set to outlast the
lease: then both stay.

*Clocks.* `rank.iteration_tracker` follows the marks, and `clocks.keeper` decides on clocks. Where none is
set, nor will be soon, the trainer may pack its marks (`AllowPacking`).

*Measurement.* `rank.recorder` turns finished iterations into telemetry. A plan's energy estimate takes
milliseconds to compute, so the session requests it (`EstimateEnergy`), and it returns as an event.

    event                    effect
    ------------------------ --------------------------------------------------------------------------------
    TrainerJoined            reset: an agent that died may have left a clock
    TrainerSpecified         announce the rank, even if it was accepted with another specification
    Connected, Disconnected  announce the rank; forget the acceptance
    Heard                    restart the lease
    RankAccepted, RankRefused, PlanOffer           as above
    RankMaxClock             as above
    IterationMark, ComputationMark                 as above
    WaitMark                 the current computation's time excludes its waits for others
    CounterChange, ClockSet  measurement
    EnergyEstimate           telemetry
    GpuLimits                included in all further telemetry
    SetNotPermitted          stock from now on; offers of clocks are refused
    GpuFailed                reset, RankLeft(GPU_FAILED); the session has ended
    Finish, TrainerGone      reset, RankLeft(FINISHED, TRAINER_GONE); the session has ended
    AgentStops               reset; the session has ended (the agent's Goodbye speaks for all its ranks)
    Tick                     lease, new announcement, telemetry that waits for the counter, hung trainers
"""

from dataclasses import replace
from typing import assert_never

from perseus.agent.clocks.foreign import ForeignClock
from perseus.agent.clocks.sets import ClockSet, RepeatSet, ResetClock
from perseus.agent.energy.counter import CounterChange
from perseus.agent.link.computation import Rank
from perseus.agent.link.packets import ComputationMark, Edge, Finish, IterationMark, WaitMark
from perseus.agent.rank.commands import AllowPacking, Command, EstimateEnergy, Send
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
from perseus.agent.rank.iteration_tracker import IterationTracker
from perseus.agent.rank.join_state import JoinState
from perseus.agent.rank.messages import (
    NO_PLAN,
    EnergyEstimate,
    FromSession,
    GpuDescription,
    GpuLimits,
    MaxClock,
    PlanId,
    PlanOffer,
    RankAccepted,
    RankLeftReason,
    RankMaxClock,
    RankRefused,
    Telemetry,
    coordinates,
    plan_answer,
    rank_left,
)
from perseus.agent.rank.order import Order
from perseus.agent.rank.plans import Plans
from perseus.agent.rank.recorder import Recorder
from perseus.retry import Retry
from perseus.v1 import agent_service_pb2 as wire

FIRST_REPEAT_S, _MAX_REPEAT_S = 60.0, 3600.0
"""Delays between sets of a clock that another client of the driver has changed; the first is at once."""

_MARKS = (ComputationMark, WaitMark, IterationMark)


class Session:
    """One rank, from its trainer's hello to its end (see the module's docstring).

    With `observe` the session never sets a clock, and refuses all offers but stock. Telemetry up to
    `after_sequence` belongs to earlier sessions. With `is_registered` the trainer will not declare its job.
    `owner` is the user of the trainer's process.
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
        self.observe = observe
        self.has_ended = False
        self._gpu = gpu
        self._owner = owner
        self._after_sequence = after_sequence
        self._commands: list[Command] = []
        self._is_packing_allowed = False
        self._repeats = Retry(FIRST_REPEAT_S, _MAX_REPEAT_S)
        self._repeat_at_s = 0.0
        self._join = JoinState(is_registered=is_registered)
        self._plans = Plans(rank, gpu, forbidden="the agent only observes" if observe else None)
        self._recorder = Recorder(gpu.supported_clocks_mhz[0], gpu.stock_mhz)
        self._tracker = IterationTracker(self._plans, self._recorder)

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Handle an event; return commands, in order. Times are CLOCK_MONOTONIC."""
        if not self.has_ended:
            self._dispatch(event, now_s)
            if not isinstance(event, _MARKS):
                self._allow_packing()
        commands, self._commands = self._commands, []
        return commands

    @property
    def wanted_clock_mhz(self) -> int | None:
        """The clock requested last, None for stock."""
        return self._tracker.keeper.wanted_mhz

    @property
    def has_plan(self) -> bool:
        """Whether a plan, or a clock to measure, is in force."""
        return self._plans.in_force is not None

    @property
    def foreign_clock(self) -> ForeignClock | None:
        """The clock at which another client of the driver holds the GPU; None if none does."""
        return self._recorder.foreign.verdict

    def give_up(self) -> list[FromSession]:
        """End the session in any state, after an internal error; return its last messages."""
        self.has_ended = True
        self._plans.follow(None)
        self._tracker.abandon_iteration()
        self._recorder.drop_finished()
        self._commands = []
        return [rank_left(self.rank, RankLeftReason.GPU_FAILED)]

    def _dispatch(self, event: Event, now_s: float) -> None:
        match event:
            case ComputationMark() | WaitMark() | IterationMark():
                self._on_mark(event, now_s)
            case CounterChange():
                self._on_counter_change(event, now_s)
            case ClockSet():
                self._on_clock_set(event)
            case EnergyEstimate():
                self._on_energy_estimate(event)
            case GpuLimits():
                self._gpu = replace(self._gpu, limits=event)
            case Tick():
                self._on_tick(now_s)
            case Heard():
                self._on_heard(now_s)
            case PlanOffer():
                self._on_plan_offer(event, now_s)
            case RankMaxClock():
                self._on_rank_max_clock(event, now_s)
            case Connected():
                self._on_connected(event, now_s)
            case Disconnected():
                self._on_disconnected()
            case RankAccepted():
                self._on_rank_accepted(event, now_s)
            case RankRefused():
                self._on_rank_refused(event, now_s)
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
        if self._plans.forbidden is None:
            self._commands.append(ResetClock())

    def _on_trainer_specified(self, event: TrainerSpecified) -> None:
        if self._join.specify(event.spec_fingerprint):
            self._drop_plans()  # they were made for another job
            self._announce()

    def _on_gpu_failed(self, now_s: float) -> None:
        self._leave(RankLeftReason.GPU_FAILED, now_s)

    def _on_finish(self, now_s: float) -> None:
        self._end(now_s)
        if not self._join.is_accepted:
            self._announce()  # with its latest order: a run of that one may have begun, and would wait for it
        self._commands.append(Send(rank_left(self.rank, RankLeftReason.FINISHED)))

    def _on_trainer_gone(self, now_s: float) -> None:
        self._leave(RankLeftReason.TRAINER_GONE, now_s)

    def _on_agent_stops(self, now_s: float) -> None:
        self._end(now_s)

    def _leave(self, reason: RankLeftReason, now_s: float) -> None:
        self._end(now_s)
        self._commands.append(Send(rank_left(self.rank, reason)))

    def _end(self, now_s: float) -> None:
        self._plans.follow(None)
        self._tracker.abandon_iteration()
        if self._plans.forbidden is None:
            self._commands.append(ResetClock())
        self._report(now_s, waits=False)
        self.has_ended = True

    def _on_tick(self, now_s: float) -> None:
        if self._join.is_announcement_due(now_s):
            self._announce()
        lease_s = self._plans.lease_s
        if lease_s is not None and now_s - self._join.heard_at_s > lease_s:
            self._on_lease_over(now_s)
        self._commands += self._tracker.fall_back_if_silent(now_s)
        self._report(now_s)

    def _on_lease_over(self, now_s: float) -> None:
        max_clock = self._plans.max_clock
        if max_clock is None or not max_clock.outlasts_lease:
            self._limit(None, now_s)
            self._drop_plans()

    # --- State with the coordinator -------------------------------------------------------------------------

    def _on_connected(self, event: Connected, now_s: float) -> None:
        self._join.connect(event.lease_s, now_s)
        self._announce()

    def _on_disconnected(self) -> None:
        self._join.disconnect()

    def _on_heard(self, now_s: float) -> None:
        self._join.heard_at_s = now_s

    def _on_rank_accepted(self, accepted: RankAccepted, now_s: float) -> None:
        self._join.accept()
        order = self._plans.order
        if order is None or order.computations != accepted.order:
            self._drop_plans()  # they were made for another order
            self._commands += self._tracker.deviate()
            self._plans.order = Order(accepted.order)
            self._tracker.follow_order()
        self._limit(accepted.max_clock, now_s)

    def _on_rank_refused(self, refused: RankRefused, now_s: float) -> None:
        self._join.refuse(now_s, refused.lease_left_s)
        self._limit(refused.max_clock, now_s)
        self._drop_plans()

    def _on_rank_max_clock(self, message: RankMaxClock, now_s: float) -> None:
        self._limit(message.max_clock, now_s)

    def _limit(self, max_clock: MaxClock | None, now_s: float) -> None:
        if self._plans.limit(max_clock, self._join.lease_s):
            self._commands += self._tracker.change_immediately(now_s)
        self._commands += self._tracker.follow_max_clock(now_s)

    def _announce(self) -> None:
        if not self._join.may_announce():
            return
        in_force, limits = self._plans.id_in_force, self._gpu.limits
        self._send(
            wire.RankJoined(
                job_id=self.rank.job_id,
                rank=coordinates(self.rank),
                gpu=wire.Gpu(
                    uuid=self._gpu.uuid,
                    model=self._gpu.model,
                    supported_clocks_mhz=self._gpu.supported_clocks_mhz,
                    power_limit_w=limits.power_limit_w,
                    workload_power_profiles=limits.power_profiles,
                ),
                iteration=self._tracker.begun_iteration,
                in_force_epoch=in_force.epoch,
                in_force_version=in_force.version,
                after_sequence=self._after_sequence,
                spec_fingerprint=self._join.spec_fingerprint or "",
                owner=self._owner,
            )
        )

    def _send(self, message: wire.RankJoined | wire.PlanAnswer | wire.PlanInForce) -> None:
        if self._join.is_connected:
            self._commands.append(Send(message))

    # --- Plans ----------------------------------------------------------------------------------------------

    def _on_plan_offer(self, offer: PlanOffer, now_s: float) -> None:
        begun_iteration = self._tracker.begun_iteration
        refusal = self._plans.consider(offer, begun_iteration, is_accepted=self._join.is_accepted)
        self._send(plan_answer(self.rank, offer.plan, refusal, begun_iteration))
        plan = self._plans.pending
        if offer.is_urgent and refusal is None and plan is not None:
            self._plans.follow(plan)
            self._commands += self._tracker.change_immediately(now_s)
            self._report_in_force(plan.plan, begun_iteration)

    def _bring_into_force(self, iteration: int) -> None:
        """Bring the plan that is due when this iteration begins into force, if any."""
        plan = self._plans.due(iteration)
        if plan is not None:
            self._plans.follow(plan)
            self._tracker.follow_plan()
            self._report_in_force(plan.plan, iteration)

    def _report_in_force(self, plan: PlanId, iteration: int) -> None:
        """Report the new plan in force, from this iteration on."""
        self._send(
            wire.PlanInForce(
                job_id=self.rank.job_id,
                rank=coordinates(self.rank),
                epoch=plan.epoch,
                version=plan.version,
                iteration=iteration,
            )
        )

    def _drop_plans(self) -> None:
        """Drop all plans, go to the fallback at once, and report this to the coordinator."""
        has_any, was_in_force = self._plans.has_any, self._plans.in_force is not None
        self._plans.follow(None)
        if was_in_force:
            self._tracker.follow_plan()
            self._commands += self._tracker.deviate()
        if has_any:
            self._report_in_force(NO_PLAN, self._tracker.begun_iteration + 1)
        self._commands += self._tracker.fall_back()

    # --- Clocks ---------------------------------------------------------------------------------------------

    def _on_mark(self, mark: IterationMark | ComputationMark | WaitMark, now_s: float) -> None:
        self._bring_into_force(mark.iteration)  # any of its marks may arrive first
        tracker = self._tracker
        match mark:
            case ComputationMark(Edge.BEGIN):
                self._commands += tracker.begin_computation(mark, now_s)
            case ComputationMark():
                self._commands += tracker.end_computation(mark, now_s)
            case WaitMark():
                self._commands += tracker.wait(mark, now_s)
            case IterationMark(Edge.BEGIN):
                self._commands += tracker.begin_iteration(mark, now_s)
            case IterationMark():
                self._commands += tracker.end_iteration(mark, now_s)

    def _allow_packing(self) -> None:
        """Let the trainer pack marks as long as no clock depends on seeing them at once."""
        is_allowed = not self._plans.sets_clocks
        if is_allowed != self._is_packing_allowed:
            self._is_packing_allowed = is_allowed
            self._commands.append(AllowPacking(is_allowed))

    def _on_set_not_permitted(self, event: SetNotPermitted) -> None:
        self._plans.forbidden = event.message
        self._tracker.forbid()
        self._drop_plans()

    # --- Measurement ----------------------------------------------------------------------------------------

    def _on_counter_change(self, change: CounterChange, now_s: float) -> None:
        self._recorder.counter_changed(change)
        self._report(now_s)

    def _on_clock_set(self, done: ClockSet) -> None:
        self._recorder.clock_set(done)
        self._tracker.keeper.lead.clock_set(done)

    def _on_energy_estimate(self, estimate: EnergyEstimate) -> None:
        self._commands.append(Send(Telemetry(self.rank, (), (), estimate, None)))

    def _report(self, now_s: float, *, waits: bool = True) -> None:
        """Report all iterations that can be measured by now; without `waits`, all that have ended."""
        order = self._plans.order.computations if self._plans.order is not None else None
        for report in self._recorder.report(order, now_s, needed_s=self._tracker.needed_s, waits=waits):
            clocks = None
            if self._plans.forbidden is None:
                clocks = report.plan.counters.statistics(report.plan.version, self._tracker.keeper)
            self._commands.append(
                Send(
                    Telemetry(
                        self.rank,
                        report.iterations,
                        report.computations,
                        None,
                        clocks,
                        self._gpu.limits,
                        self.foreign_clock,
                    )
                )
            )
            if report.request is not None and waits:
                self._commands.append(EstimateEnergy(report.request))
        is_taken = self.foreign_clock is not None and self.wanted_clock_mhz is not None
        if is_taken and waits and now_s >= self._repeat_at_s:
            # It may have been a reset, or the other client may have ended. A living one is not fought: delays
            # grow as long as the session lasts.
            self._commands.append(RepeatSet())
            self._repeat_at_s = now_s + self._repeats.failed()

    def validate(self) -> None:
        """Check the invariants; AssertionError otherwise. Called by tests after every event."""
        assert not self._commands
        self._plans.validate(self._tracker.begun_iteration)
        self._tracker.validate(self._gpu.supported_clocks_mhz)
        self._join.validate()
        self._recorder.validate()
        if not self.has_ended:
            assert self._recorder.plan_version == self._plans.id_in_force.version
        else:
            assert not self._recorder.has_unreported
            assert not self._plans.has_any
            assert not self._tracker.has_iteration
