"""One run of a job as a pure state machine: inputs and the time in, commands out.

Theory of operation
===================

The machine holds the clocks that the job *should* run (`OfferBoard`, one offer per pipeline) and those that
its ranks *report* to run (`RankTable`). Every input ends with the same three steps:

1. The input itself changes the known state: a rank joined, an iteration ended, a straggler was reported.
2. The job's state moves as far as possible (`states` has the picture, `lifecycle` the transitions), and each
   state determines the pipelines' desired clocks.
3. `OfferBoard.reconcile` offers the pipelines' clocks to the ranks that need them.

A rank whose stream ended is DISCONNECTED: it keeps its plan and may resume, and its job's state does not
change. A rank whose agent was silent for the lease is LOST, as is one whose trainer is gone. Leases run out
on a Tick only. The time is any monotonic clock; only differences count. The wall clock's time is only shown
to people, and no decision depends on it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from typing import Any

from perseus.service.domain.bounds import MAX_DURATION_S, MIN_DURATION_S, check_range
from perseus.service.domain.commands import AcceptRank, Command, EndStream, Refine, Solve
from perseus.service.domain.errors import (
    CoordinatorError,
    JobNotSolvedError,
    RankNotServedError,
    SpecMismatchError,
)
from perseus.service.domain.inputs import (
    Abandoned,
    AgentDisconnected,
    AgentHeard,
    AgentLeft,
    BaselineRequested,
    BudgetTargetSet,
    EpochRenewed,
    FinishRequested,
    GpuErrorReported,
    Input,
    LagNotFound,
    MaxClockSet,
    OfferAnswered,
    PlanInForce,
    PolicySet,
    ProfileFound,
    RankJoined,
    RankLeft,
    Refined,
    RefineFailed,
    RegisteredAgain,
    ResumeRequested,
    SignalTargetSet,
    Solved,
    SolveFailed,
    SolveRetried,
    StragglerCleared,
    StragglerReported,
    TelemetryArrived,
    Tick,
)
from perseus.service.domain.messages import parallelism_to_proto
from perseus.service.domain.model import (
    FOREIGN_VERSION,
    LOST_VERSIONS,
    NO_VERSION,
    JobState,
    RankLeftReason,
    RankState,
)
from perseus.service.domain.records import (
    MAX_REQUEST_IDS,
    Counters,
    JobRecord,
    Registrations,
    StoredJob,
)
from perseus.service.domain.specification import JobSpec, Registration, check_request_id
from perseus.service.domain.telemetry import Order
from perseus.service.job import views
from perseus.service.job.iteration_judge import IterationJudge
from perseus.service.job.lifecycle import Lifecycle
from perseus.service.job.planning.operating_point import check_straggler
from perseus.service.job.planning.refusals import Refusals
from perseus.service.job.ranks.rank_table import LIVE
from perseus.service.job.recording import Begun, Recording, Restored, SolverAnswered
from perseus.service.job.rules import Rules
from perseus.service.job.run import Run
from perseus.v1 import event_pb2


class JobMachine:
    """One run of a job. `handle` is the only way in; its result is the only way out.

    Attributes:
        run: its state, for reading.
        recording: its inputs so far; None before it is registered.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.recording: Recording | None = None
        self._lifecycle = Lifecycle(run)
        self._judge = IterationJudge(run, self._lifecycle)
        self._refusals = Refusals(run.ranks, run.offers, run.buffer)
        self._orders = [Order(order) for order in run.schedule.orders]
        # As last returned to the caller.
        self._stored_record: JobRecord | None = None
        self._stored_counters = Counters()  # others are stored: an earlier release had them in the record
        self._has_ended = False

    @property
    def spec(self) -> JobSpec:
        """The job as registered."""
        return self.run.spec

    @property
    def run_number(self) -> int:
        """The number of this run of the job, from 1."""
        return self.run.run_number

    @property
    def create_time_s(self) -> float:
        """The time of registration, on the wall clock."""
        return self.run.create_time_s

    @property
    def registrations(self) -> Registrations:
        """Who registered it."""
        return self.run.registrations

    @property
    def record(self) -> JobRecord:
        """The state that must not be lost."""
        return self.run.record

    @property
    def has_live_rank(self) -> bool:
        """Whether a rank is connected, or may come back within its lease."""
        return self.run.has_live_rank

    @property
    def last_event_sequence(self) -> int:
        """Number of the last event."""
        return self.run.buffer.sequence

    # ------------------------------------------------------------------ input and output

    def register(self, registration: Registration, version: int) -> list[Command]:
        """Begin the run, and return the commands for that. Versions up to `version` are used up."""
        run, counts = self.run, self.spec.parallelism
        self.recording = Recording(
            Begun(
                run.spec,
                run.run_number,
                run.rules,
                run.epoch,
                run.create_time_s,
                run.created_s,
                registration,
                version,
            )
        )
        run.record.version = version
        self._note_registration(registration)
        self.run.buffer.announce(
            event_pb2.JOB_EVENT_TYPE_REGISTERED,
            f"registered with {counts.pipeline_count} pipelines × {counts.stage_count} stages × "
            f"{counts.tensor_count} tensor-parallel ranks",
            event_pb2.Registered(parallelism=parallelism_to_proto(counts)),
        )
        return self._take_commands()

    @classmethod
    def restore(
        cls, stored: StoredJob, rules: Rules, epoch: str, now_s: float, wall_time_s: float
    ) -> tuple["JobMachine", list[Command]]:
        """Continue a run after a restart. Ranks that were connected have a whole lease to return.

        A frontier is not stored: a complete profile is solved again, while plans in force stay as they are.
        """
        created_s = now_s - (wall_time_s - stored.create_time_s)
        run = Run(
            stored.spec,
            stored.run_number,
            rules,
            epoch,
            stored.create_time_s,
            created_s,
            stored.record,
            stored.counters,
        )
        run.restore(stored, now_s, wall_time_s)
        machine = cls(run)
        machine.recording = Recording(Restored(stored, rules, epoch, now_s, wall_time_s))
        machine._lifecycle.resume_restored(stored.open_rows)
        if run.record.has_finished:
            machine.recording.drop()
        return machine, machine._take_commands()

    def handle(self, event: Input, now_s: float, wall_time_s: float) -> list[Command]:
        """Take one input, at a time of a monotonic clock and of the wall clock.

        Returns the resulting commands, records first.

        Raises:
            InvalidInputError: the input does not fit the job; nothing has changed, except where the rank
                claims to be.
            JobFinishedError, JobNotSolvedError, RankAlreadyServedError, SpecMismatchError: it is refused;
                nothing has changed.
        """
        if self.recording is not None:
            self.recording.add(event, now_s, wall_time_s)
        self.run.begin(now_s, wall_time_s)
        _HANDLERS[type(event)](self, event, now_s)
        return self._settle()

    def handle_telemetry(
        self, events: Iterable[TelemetryArrived], now_s: float, wall_time_s: float
    ) -> Iterator[list[Command] | CoordinatorError]:
        """Take batches that arrived together; yield for each its commands, or why it is refused.

        The result is that of handling each by itself. But most only add to an iteration that other ranks have
        not finished: nothing follows from them that did not follow from the one before.
        """
        self.run.begin(now_s, wall_time_s)
        is_settled = False
        for event in events:
            if self.recording is not None:
                self.recording.add(event, now_s, wall_time_s)
            try:
                is_settled = not self._take_telemetry(event, now_s) and is_settled
            except CoordinatorError as error:
                yield error
                continue
            commands = self.run.buffer.take() if is_settled else self._settle()
            is_settled = True
            yield commands

    def _settle(self) -> list[Command]:
        """Let happen what follows from an input, and return all commands."""
        self._lifecycle.reconcile()
        if self.recording is not None and self.record.has_finished:
            self.recording.drop()
        return self._take_commands()

    def validate(self) -> None:
        """Check the invariants that hold between two inputs."""
        self._lifecycle.validate()

    def _take_commands(self) -> list[Command]:
        run = self.run
        if run.record != self._stored_record:  # most inputs do not change it
            self._stored_record = copy(run.record)
            run.buffer.store(self._stored_record)
        if run.counters != self._stored_counters:
            self._stored_counters = copy(run.counters)
            run.buffer.store(self._stored_counters)
        if run.record.has_finished and not run.has_live_rank and not self._has_ended:
            self._has_ended = True
            run.buffer.store(views.ended(run))
        return run.buffer.take()

    # ------------------------------------------------------------------ inputs

    def _on_registered_again(self, event: RegisteredAgain, _now_s: float) -> None:
        self._note_registration(event.registration)

    def _on_abandoned(self, event: Abandoned, _now_s: float) -> None:
        self._lifecycle.enter(JobState.FINISHED, f"abandoned: {event.why}")

    def _on_epoch_renewed(self, event: EpochRenewed, _now_s: float) -> None:
        self.run.epoch = event.epoch
        # Telemetry does not carry a version's epoch, so versions that may be lost are not reused.
        self.record.version += LOST_VERSIONS

    def _on_rank_joined(self, event: RankJoined, now_s: float) -> None:
        self._lifecycle.check_running()
        self.spec.check_rank(event.rank)
        if not self._takes(event.spec_fingerprint):
            raise SpecMismatchError(
                job_id=self.spec.job_id,
                run_number=self.run_number,
                pipeline=event.rank.pipeline,
                stage=event.rank.stage,
                tensor=event.rank.tensor,
                spec_fingerprint=event.spec_fingerprint,
            )
        rank = self.run.ranks[event.rank]
        is_back = event.iteration < rank.iteration and not self.run.ranks.is_ahead(rank)
        if rank.instance_id == event.instance_id and rank.state in LIVE and is_back:
            self._lifecycle.lose([rank], "its trainer is back at an earlier iteration")
        has_refused = self.run.ranks[event.rank].has_refused
        self.run.ranks.join(event, self._known_version(event.in_force_epoch, event.in_force_version), now_s)
        if rank.gpu is not None and rank.gpu != event.gpu:
            self._lifecycle.check_work(f"{event.rank} is back on another GPU, or under other limits")
        self.run.offers.forget_sent(event.rank)
        self.run.progress.forget(event.rank)
        self.run.buffer.do(AcceptRank(event.rank, event.instance_id, self.record.max_clock))
        if has_refused and not self.run.ranks[event.rank].has_refused:
            self._lifecycle.profile_more(f"{event.rank} has another agent")

    def _on_rank_left(self, event: RankLeft, _now_s: float) -> None:
        self.spec.check_rank(event.rank)
        rank = self.run.ranks[event.rank]
        if rank.instance_id != event.instance_id:
            return
        if event.reason is RankLeftReason.FINISHED and rank.state in (*LIVE, RankState.LOST):
            # A lost one may train on, such as with an order that is not registered yet.
            self.run.offers.forget_sent(event.rank)
            self.run.ranks.finish(event.rank, event.reason.value)
        elif rank.state in LIVE:
            self._lifecycle.lose([rank], event.reason.value)

    def _on_gpu_error_reported(self, event: GpuErrorReported, _now_s: float) -> None:
        self.spec.check_rank(event.rank)
        self.run.ranks.note_gpu_error(event)

    def _on_agent_disconnected(self, event: AgentDisconnected, now_s: float) -> None:
        for rank in self.run.ranks.of_instance(event.instance_id, RankState.CONNECTED):
            self.run.offers.forget_sent(rank.coordinates)
        self.run.ranks.disconnect(event.instance_id, now_s)

    def _on_agent_left(self, event: AgentLeft, _now_s: float) -> None:
        self._lifecycle.lose(self.run.ranks.of_instance(event.instance_id, *LIVE), "its agent ended")

    def _on_agent_heard(self, event: AgentHeard, now_s: float) -> None:
        self.run.ranks.hear_agent(event.instance_id, now_s)

    def _on_telemetry_arrived(self, event: TelemetryArrived, now_s: float) -> None:
        self._take_telemetry(event, now_s)

    def _take_telemetry(self, event: TelemetryArrived, now_s: float) -> bool:
        """Take a batch; return whether the job's state, offers or record may change because of it."""
        if not self.run.ranks.hear(event.rank, event.instance_id, now_s):
            raise RankNotServedError(
                job_id=self.spec.job_id,
                pipeline=event.rank.pipeline,
                stage=event.rank.stage,
                tensor=event.rank.tensor,
            )
        rank = self.run.ranks[event.rank]
        place, gpu = rank.coordinates, rank.gpu  # the tables' own object: lookups need no comparison
        order = self._orders[place.stage]
        batch = order.whole(event.batch)
        self.run.ranks.check_trainer(place, batch.sequence)
        assert gpu is not None
        batch.check_clocks(gpu.supported_clocks_mhz)
        is_plain = batch.check_order(order)
        if numbers := batch.iterations.iteration:
            # Even if it is refused: once most ranks claim to be there, they are.
            self.run.ranks.note_iteration(place, max(numbers), batch.iterations.clock_event_reasons[-1])
            if not self.run.ranks.is_plausible(max(numbers)):
                batch = self._judge.check_far(batch)
                is_plain = is_plain and bool(batch.iterations.iteration)
        has_effect = False
        if batch.gpu_limits is not None and self.run.ranks.note_limits(place, batch.gpu_limits):
            has_effect = True
            self._lifecycle.check_work(f"{place} has a GPU under other limits")
        if numbers:
            has_effect |= self._judge.take_foreign_clock(place, batch.foreign_clock)
        if batch.iterations.work or batch.iterations.relative_work:
            batch = batch._replace(iterations=self.run.counted_work.related(place.stage, batch.iterations))
        self.run.stragglers.take_telemetry(place, batch, is_plain=is_plain)
        if (computations := batch.computations).duration_s:
            self.run.variations.add(place, computations)
        if batch.iterations.iteration:
            has_effect |= self._judge.take_iterations(place, batch.iterations)
        if computations.begin_s:
            self.run.timelines.add(place, order.compact(computations) if is_plain else computations)
        if batch.clocks is not None:
            self.run.ranks.note_clocks(place, batch.clocks)
            self.run.planner.latency.take(place, batch.clocks)
        energy = batch.energy
        if energy is not None and energy.plan_version == self.run.offers.of_rank(place).version:
            energy = self.run.counted_work.at_typical(place.stage, energy)
            if self.record.state is JobState.PLANNED:
                self.run.planner.watch.take_estimate(place, energy)
            else:
                has_effect = True
                self.run.profiler.take_estimate(place, energy)
        return has_effect

    def _on_offer_answered(self, event: OfferAnswered, now_s: float) -> None:
        if not self.run.ranks.hear(event.rank, event.instance_id, now_s):
            return
        self.run.ranks.note_iteration(event.rank, event.iteration)
        why = self._refusals.take(event) if event.epoch == self.run.epoch else None
        if why is not None:
            self._lifecycle.plan_without(why)

    def _on_plan_in_force(self, event: PlanInForce, now_s: float) -> None:
        if not self.run.ranks.hear(event.rank, event.instance_id, now_s):
            return
        self.run.ranks.note_iteration(event.rank, event.iteration)
        rank = self.run.ranks[event.rank]
        version = self._known_version(event.epoch, event.version)
        offered = self.run.offers.of_rank(event.rank).version
        if version != offered and (version == NO_VERSION or rank.in_force_version == offered):
            # It fell back, and lost both its clocks in force and the accepted ones for a later iteration.
            self.run.offers.forget_sent(event.rank)
        self.run.ranks.change(replace(rank, in_force_version=version))

    def _on_straggler_reported(self, event: StragglerReported, _now_s: float) -> None:
        self._lifecycle.check_running()
        straggler = event.straggler
        self.spec.check_pipeline(straggler.pipeline)
        check_straggler(straggler)
        if self.run.stragglers.report(straggler):
            self.run.planner.announce_straggler(straggler)
            self._lifecycle.after_straggler_change()

    def _on_straggler_cleared(self, event: StragglerCleared, _now_s: float) -> None:
        self._lifecycle.check_running()
        self.spec.check_pipeline(event.pipeline)
        if self.run.stragglers.clear(event.pipeline):
            self._lifecycle.after_straggler_change()

    def _on_policy_set(self, event: PolicySet, _now_s: float) -> None:
        self._lifecycle.check_running()
        event.policy.check()
        if self.run.planner.set_policy(event.policy):
            self._lifecycle.retarget()

    def _on_budget_target_set(self, event: BudgetTargetSet, _now_s: float) -> None:
        self._lifecycle.check_running()
        if event.target_time_s is not None:
            check_range("target_time_s", event.target_time_s, MIN_DURATION_S, MAX_DURATION_S)
        if self.run.planner.set_budget_target(event.target_time_s, is_urgent=event.is_urgent):
            self._lifecycle.retarget(is_urgent=event.is_urgent)

    def _on_signal_target_set(self, event: SignalTargetSet, _now_s: float) -> None:
        self._lifecycle.check_running()
        if event.target_time_s is not None:
            check_range("target_time_s", event.target_time_s, MIN_DURATION_S, MAX_DURATION_S)
        if self.run.planner.set_signal_target(event):
            self._lifecycle.retarget()

    def _on_max_clock_set(self, event: MaxClockSet, _now_s: float) -> None:
        self._lifecycle.limit(event.to_max_clock())

    def _on_finish_requested(self, _event: FinishRequested, _now_s: float) -> None:
        if self.record.state is not JobState.FINISHED:
            self._lifecycle.enter(JobState.FINISHED, "ended on request")

    def _on_resume_requested(self, _event: ResumeRequested, _now_s: float) -> None:
        if self.record.state is not JobState.STOCK:
            return
        self.run.buffer.announce(event_pb2.JOB_EVENT_TYPE_RESUMED, "the job resumes from stock on request")
        self.run.profiler.renew()
        self.record.fall_back_count = 0
        self._lifecycle.leave_stock("resumed on request")

    def _on_baseline_requested(self, event: BaselineRequested, _now_s: float) -> None:
        check_request_id(event.request_id)
        if event.request_id in self.record.baseline_request_ids:
            return
        self._lifecycle.check_running()
        if self.record.state is not JobState.PLANNED:
            raise JobNotSolvedError(job_id=self.spec.job_id, state=self.record.state.value)
        self.run.buffer.announce(
            event_pb2.JOB_EVENT_TYPE_BASELINE_REQUESTED,
            f"the stock iteration, {self.run.baseline.time_s:.6f} s so far, is measured again",
            event_pb2.BaselineRequested(baseline_time_s=self.run.baseline.time_s),
        )
        self.record.baseline_request_ids = (*self.record.baseline_request_ids, event.request_id)[
            -MAX_REQUEST_IDS:
        ]
        self.run.baseline.forget()
        self._lifecycle.enter(JobState.BASELINE, "the stock baseline is measured again")

    def _on_profile_found(self, event: ProfileFound, _now_s: float) -> None:
        self.run.profiler.known = event.found

    def _on_solved(self, event: Solved, _now_s: float) -> None:
        self._lifecycle.take_frontier(event.frontier)

    def _on_solve_retried(self, event: SolveRetried, _now_s: float) -> None:
        if self.record.state is not JobState.FINISHED:
            self.run.planner.announce_retry(event.cause, event.crash_count, event.delay_s)

    def _on_solve_failed(self, event: SolveFailed, _now_s: float) -> None:
        self._lifecycle.take_failure(event.cause)

    def _on_lag_not_found(self, event: LagNotFound, _now_s: float) -> None:
        self._lifecycle.do_without_lag(event.found)

    def _on_refined(self, event: Refined, _now_s: float) -> None:
        self._lifecycle.take_plan(event.refinement, event.plan)

    def _on_refine_failed(self, event: RefineFailed, _now_s: float) -> None:
        self._lifecycle.do_without_plan(event.refinement, event.cause)

    def _on_tick(self, _event: Tick, now_s: float) -> None:
        expired = self.run.ranks.expired(now_s)
        silent = {rank.instance_id: None for rank in expired if rank.state is RankState.CONNECTED}
        self._lifecycle.lose(expired, "its lease ran out")
        for instance_id in silent:
            self.run.buffer.do(EndStream(instance_id))

    def _takes(self, spec_fingerprint: str) -> bool:
        """Tell whether ranks of this specification may join; an empty fingerprint is not checked."""
        known = (some.spec_fingerprint for some in self.registrations.registrations)
        return not spec_fingerprint or spec_fingerprint in known

    def _known_version(self, epoch: str, version: int) -> int:
        """Return the version that a rank reports in force, as one of this coordinator's versions."""
        if not epoch:
            return NO_VERSION
        if epoch != self.run.epoch:
            return FOREIGN_VERSION
        if version > self.record.version:
            # Its offer was lost with the state, so never reuse it; an implausibly high one is ignored.
            if version - self.record.version <= LOST_VERSIONS:
                self.record.version = version
            return FOREIGN_VERSION
        return version

    def _note_registration(self, registration: Registration) -> None:
        registrations = self.registrations.with_newest(registration)
        if registrations != self.registrations:
            self.run.registrations = registrations
            self.run.buffer.store(registrations)


# Looked up for every message: a table takes a tenth of the time of `functools.singledispatchmethod`.
_HANDLERS: Mapping[type[Input], Callable[[JobMachine, Any, float], None]] = {
    RegisteredAgain: JobMachine._on_registered_again,
    Abandoned: JobMachine._on_abandoned,
    EpochRenewed: JobMachine._on_epoch_renewed,
    RankJoined: JobMachine._on_rank_joined,
    RankLeft: JobMachine._on_rank_left,
    GpuErrorReported: JobMachine._on_gpu_error_reported,
    AgentDisconnected: JobMachine._on_agent_disconnected,
    AgentLeft: JobMachine._on_agent_left,
    AgentHeard: JobMachine._on_agent_heard,
    TelemetryArrived: JobMachine._on_telemetry_arrived,
    OfferAnswered: JobMachine._on_offer_answered,
    PlanInForce: JobMachine._on_plan_in_force,
    StragglerReported: JobMachine._on_straggler_reported,
    StragglerCleared: JobMachine._on_straggler_cleared,
    PolicySet: JobMachine._on_policy_set,
    BudgetTargetSet: JobMachine._on_budget_target_set,
    SignalTargetSet: JobMachine._on_signal_target_set,
    MaxClockSet: JobMachine._on_max_clock_set,
    FinishRequested: JobMachine._on_finish_requested,
    ResumeRequested: JobMachine._on_resume_requested,
    BaselineRequested: JobMachine._on_baseline_requested,
    ProfileFound: JobMachine._on_profile_found,
    Solved: JobMachine._on_solved,
    SolveRetried: JobMachine._on_solve_retried,
    SolveFailed: JobMachine._on_solve_failed,
    LagNotFound: JobMachine._on_lag_not_found,
    Refined: JobMachine._on_refined,
    RefineFailed: JobMachine._on_refine_failed,
    Tick: JobMachine._on_tick,
}


def replay(
    recording: Recording, solve: Callable[[Solve | Refine], Input]
) -> Iterator[tuple[Input | None, JobMachine, list[Command] | CoordinatorError]]:
    """Replay a recorded run: yield each input, the machine, and its commands or its refusal.

    The run's beginning comes first (None). `solve` answers the machine's requests to the solver.

    Raises:
        Exception: the machine's failure.
    """
    match recording.beginning:
        case Begun() as begun:
            run = Run(
                begun.spec, begun.run_number, begun.rules, begun.epoch, begun.create_time_s, begun.created_s
            )
            machine = JobMachine(run)
            commands = machine.register(begun.registration, begun.version)
        case Restored() as restored:
            machine, commands = JobMachine.restore(
                restored.stored, restored.rules, restored.epoch, restored.now_s, restored.wall_time_s
            )
        case None:
            return
    asked: Solve | Refine | None = None
    yield None, machine, commands
    for kept, now_s, wall_time_s in recording.inputs:
        asked = next((each for each in reversed(commands) if isinstance(each, Solve | Refine)), asked)
        if not isinstance(kept, SolverAnswered):
            event = kept
        elif kept.cause is not None and isinstance(asked, Refine):
            event = RefineFailed(asked.refinement, kept.cause)
        else:
            assert asked is not None
            event = solve(asked)
        try:
            commands = machine.handle(event, now_s, wall_time_s)
        except CoordinatorError as error:
            commands = []
            yield event, machine, error
        else:
            yield event, machine, commands
