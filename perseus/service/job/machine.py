"""The life of a job's run, as a pure state machine: inputs and the time in, commands out.

Theory of operation
===================

The machine holds what the job *should* run (`OfferBoard`, one offer per pipeline) and what its ranks *say*
they run (`RankTable`). Every input ends with the same three steps:

1. The input itself changes what is known: a rank joined, an iteration ended, a straggler was reported.
2. `_advance` moves the state as far as it goes (`states` has the picture), and each state says what clocks
   the pipelines should have.

3. `OfferBoard.settle` offers the pipelines' clocks to the ranks that need them.

A rank whose stream ended is DISCONNECTED: it keeps its plan and may resume, and its job's state does not
change. A rank whose agent was silent for the lease is LOST, as is one whose trainer is gone. Leases run out
on a Tick only. The time is any clock that never goes back; only differences count. The wall clock's time is
there to be told to people, and nothing is decided by it.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import singledispatchmethod

from perseus.service.domain import evidence
from perseus.service.domain.commands import AcceptRank, Command, EndStream, FindProfile, ReportIteration
from perseus.service.domain.errors import (
    JobFinishedError,
    JobNotSolvedError,
    RankNotServedError,
    SpecMismatchError,
    TimelineNotReadyError,
)
from perseus.service.domain.inputs import (
    Abandoned,
    AgentDisconnected,
    AgentHeard,
    AgentLeft,
    BaselineRequested,
    FinishRequested,
    GpuErrorReported,
    Input,
    OfferAnswered,
    PlanInForce,
    PolicySet,
    ProfileFound,
    RankJoined,
    RankLeft,
    RegisteredAgain,
    ResumeRequested,
    Solved,
    SolveFailed,
    StragglerCleared,
    StragglerReported,
    TelemetryArrived,
    Tick,
)
from perseus.service.domain.measured import JobIteration, Period, Saving, Timeline
from perseus.service.domain.model import (
    FOREIGN_VERSION,
    NO_VERSION,
    STOCK,
    EventType,
    Gpu,
    HoldClocks,
    JobDetails,
    JobState,
    JobView,
    PlannedClocks,
    Rank,
    RankFilter,
    RankLeftReason,
    RankState,
    StockClocks,
)
from perseus.service.domain.records import (
    MOST_REQUEST_IDS,
    ForgetIterations,
    IterationRows,
    JobRecord,
    ProfiledWork,
    Registrations,
    StoredJob,
)
from perseus.service.domain.specification import Coordinates, JobSpec, Registration
from perseus.service.domain.telemetry import Order
from perseus.service.job.iterations.baseline import Baseline
from perseus.service.job.iterations.iteration_log import IterationLog
from perseus.service.job.iterations.timeline_memory import TimelineMemory
from perseus.service.job.journal import Journal
from perseus.service.job.planning.offers import OfferBoard
from perseus.service.job.planning.operating_point import check_straggler
from perseus.service.job.planning.planner import Planner
from perseus.service.job.planning.refusals import Refusals
from perseus.service.job.profiling.profiler import Profiler
from perseus.service.job.profiling.work_keys import work_keys
from perseus.service.job.progress import Progress
from perseus.service.job.ranks.rank_table import LIVE, RankTable
from perseus.service.job.ranks.usable_clocks import LEAST_CLOCKS, stages_at_stock
from perseus.service.job.rules import Rules
from perseus.service.job.states import NEEDS_ALL_RANKS, check_transition
from perseus.service.job.stragglers.straggler_book import StragglerBook
from perseus.solver import Computation, Frontier, SolverError


class JobMachine:
    """One run of a job. `handle` is the only way in; what it returns is the only way out.

    Attributes:
        spec: the job as registered.
        run_number: which run of it this is, from 1.
        registrations: who registered it.
        schedule: its order of computations.
        state: where the job stands.
        state_reason: why it is there; one sentence.
        create_time_s: when it was registered, on the wall clock.
        log: its iterations and the report.
        timelines: the latest iteration of each pipeline.
        profiler: what is measured of its stages.
        is_profile_complete: whether that is enough to plan on.
    """

    def __init__(
        self,
        spec: JobSpec,
        run_number: int,
        rules: Rules,
        epoch: str,
        create_time_s: float,
        created_s: float,
    ) -> None:
        """Begin where nothing is known.

        Args:
            spec: the job.
            run_number: which run of it this is, from 1.
            rules: what the operator has set.
            epoch: of the coordinator's state.
            create_time_s: when it was registered, on the wall clock.
            created_s: the same on the clock that never goes back.
        """
        self.spec = spec
        self.run_number = run_number
        self.registrations = Registrations(())
        self.schedule = spec.check()
        self._orders = [Order(order) for order in self.schedule.orders]
        self.state = JobState.WAITING
        self.state_reason = "some ranks have not joined yet"
        self.log = IterationLog(list(spec.parallelism.all_coordinates()))
        self.timelines = TimelineMemory(spec.parallelism)
        self._epoch = epoch
        self.create_time_s = create_time_s
        self._finish_time_s: float | None = None
        self._journal = Journal()
        self._ranks = RankTable(spec, rules.lease_s, self._journal, created_s)
        self._offers = OfferBoard(spec.parallelism, self._ranks, self._journal)
        self._refusals = Refusals(self._ranks, self._offers, self._journal)
        self._baseline = Baseline(rules.baseline_iterations)
        self.is_profile_complete = False
        self._profiling_budget = rules.profiling.budget
        self.profiler = Profiler(spec.parallelism, self.schedule, rules.profiling, self._journal)
        self._now_s = created_s
        self._wall_time_s = create_time_s
        self._stragglers = StragglerBook(self.schedule, spec.parallelism, self._journal)
        self._planner = Planner(
            spec.parallelism,
            self.schedule,
            spec.policy,
            rules.guard,
            self._ranks,
            self._offers,
            self.profiler,
            self._baseline,
            self._stragglers,
            self._journal,
        )
        self._baseline_request_ids: tuple[str, ...] = ()
        self._progress = Progress(
            self._ranks,
            self.log,
            self._baseline,
            self._offers,
            self.profiler,
            rules.profiling.iterations,
            self._journal,
            created_s,
            create_time_s,
        )
        self._stored_record: JobRecord | None = None
        # The state and the frontier for which the report and the detection know the offers.
        self._labelled: tuple[JobState, Frontier | None] | None = None

    # ------------------------------------------------------------------ the way in and out

    def register(self, registration: Registration, version: int) -> list[Command]:
        """Begin the run's life: what is to be stored and told of it. Versions up to `version` are used up."""
        counts = self.spec.parallelism
        self._offers.version = version
        self._note_registration(registration)
        self._journal.announce(
            EventType.REGISTERED,
            f"registered with {counts.pipeline_count} pipelines × {counts.stage_count} stages × "
            f"{counts.tensor_count} tensor-parallel ranks",
            evidence.Registered(counts),
        )
        return self._take_commands()

    @classmethod
    def restore(
        cls, stored: StoredJob, rules: Rules, epoch: str, now_s: float, wall_time_s: float
    ) -> tuple["JobMachine", list[Command]]:
        """Go on after a restart. Ranks that were connected have a whole lease to come back.

        A frontier is not stored: a complete profile is solved again, while plans in force stay as they are.
        """
        created_s = now_s - (wall_time_s - stored.create_time_s)
        machine = cls(stored.spec, stored.run_number, rules, epoch, stored.create_time_s, created_s)
        machine.registrations = stored.registrations
        version = NO_VERSION
        if (record := stored.record) is not None:
            machine._planner.policy, machine.state, version = record.policy, record.state, record.version
            machine.state_reason, machine._finish_time_s = record.state_reason, record.finish_time_s
            machine._baseline.iteration = record.baseline
            machine._planner.lag_s = record.lag_s
            machine.is_profile_complete = record.is_profile_complete
            machine._stragglers.restore(record.stragglers)
            machine._baseline_request_ids = record.baseline_request_ids
            machine.profiler.cost, machine.profiler.given_up = record.profiling_cost, record.given_up_clocks
        machine._ranks.restore(stored.ranks, now_s)
        machine._offers.restore(version, stored.offers)
        machine.profiler.profiles = stored.profiles
        machine._now_s, machine._wall_time_s = now_s, wall_time_s
        machine._progress.restore(machine.state, record.stall if record else None, now_s)
        machine._journal.sequence = stored.last_sequence
        machine.log.periods = list(stored.periods)
        machine.log.mark_straggler(-1, bool(machine._stragglers))
        if machine.state not in (JobState.PROFILING, JobState.PLANNED):
            machine._offers.wish(range(len(machine._offers)), STOCK)  # a run that was put aside had plans
        machine._label_versions()
        for rows in stored.open_rows:
            # They complete nothing, or it would have been stored as complete: the time is of no matter.
            machine.log.add(rows.rank, rows.rows, stored.create_time_s)
        if machine.is_profile_complete and machine.state not in (JobState.STOCK, JobState.FINISHED):
            machine._solve()
        if machine.state is JobState.PROFILING:
            machine._find_profile()
        return machine, machine._take_commands()

    def handle(self, event: Input, now_s: float, wall_time_s: float) -> list[Command]:
        """Take one input, at a time of a clock that never goes back and of the wall clock.

        Returns what is to be done, records first.

        Raises:
            InvalidInputError: the input does not fit the job; nothing has changed.
            JobFinishedError, JobNotSolvedError, RankAlreadyServedError, SpecMismatchError: it is refused;
                nothing has changed.
        """
        self._now_s, self._wall_time_s = now_s, wall_time_s
        self._on(event, now_s)
        self._progress.check(now_s, wall_time_s)
        self._advance()
        self._offers.settle()
        self._label_versions()
        return self._take_commands()

    def next_deadline_s(self) -> float | None:
        """When the next lease or the patience with the job runs out, if any does: a Tick is due then."""
        deadlines_s = (self._ranks.next_deadline_s(), self._progress.next_deadline_s())
        return min((deadline_s for deadline_s in deadlines_s if deadline_s is not None), default=None)

    def summary(self) -> JobView:
        """Return the job as others may see it, without details: no work over its ranks or pipelines."""
        frontier = self._planner.frontier
        min_planned_s, max_planned_s = self._offers.planned_range_s
        return JobView(
            job_id=self.spec.job_id,
            run_number=self.run_number,
            state=self.state,
            state_reason=self.state_reason,
            stall=self._progress.stall,
            epoch=self._epoch,
            parallelism=self.spec.parallelism,
            rank_counts=self._ranks.counts.copy(),
            policy=self._planner.policy,
            baseline=self._baseline.iteration,
            profiled_clock_count=self.profiler.least_clock_count,
            profiling_cost=self.profiler.cost,
            profiling_budget=self._profiling_budget,
            t_min_s=frontier.t_min_s if frontier else 0.0,
            t_star_s=frontier.t_star_s if frontier else 0.0,
            t_slow_s=frontier.t_slow_s if frontier else 0.0,
            min_planned_time_s=min_planned_s,
            max_planned_time_s=max_planned_s,
            straggler_count=len(self._stragglers),
            create_time_s=self.create_time_s,
            finish_time_s=self._finish_time_s,
            last_event_sequence=self.last_event_sequence,
        )

    def details(self) -> JobDetails:
        """Return what of the job grows with its size."""
        return JobDetails(
            spec=self.spec,
            straggler_times_s=self._planner.straggler_times_s(),
            detected_stragglers=frozenset(
                straggler.pipeline for straggler in self._stragglers if straggler.is_detected
            ),
            planned_iteration_time_s=self._offers.planned_times_s,
        )

    def view(self) -> JobView:
        """Return the job as others may see it, with its details."""
        return replace(self.summary(), details=self.details())

    def ranks(self, wanted: RankFilter, first_index: int = 0) -> Iterator[tuple[int, Rank]]:
        """Yield the wanted ranks from an index on, each with its index in the order of all ranks.

        Raises:
            PipelineOutOfRangeError, InvalidFieldError: the job has no such pipeline or stage.
        """
        return self._ranks.select(wanted, first_index)

    @property
    def last_event_sequence(self) -> int:
        """Number of the last event."""
        return self._journal.sequence

    @property
    def has_finished(self) -> bool:
        """Whether the job has ended."""
        return self.state is JobState.FINISHED

    @property
    def has_live_rank(self) -> bool:
        """Whether a rank is connected, or may come back within its lease."""
        return any(self._ranks.counts[state] for state in LIVE)

    @property
    def version(self) -> int:
        """The highest version of clocks that was used so far."""
        return self._offers.version

    def takes(self, spec_fingerprint: str) -> bool:
        """Tell whether ranks of this specification may join; what names none is not checked."""
        known = (some.spec_fingerprint for some in self.registrations.registrations)
        return not spec_fingerprint or spec_fingerprint in known

    def order(self, stage: int) -> tuple[Computation, ...]:
        """Return what the ranks of a stage compute, in order."""
        return self.schedule.orders[stage]

    def is_on_gpu(self, place: Coordinates, gpu_uuid: str) -> bool:
        """Tell whether a rank is served, or its lease still runs, on a GPU, and may have clocks there."""
        if place not in self._ranks or self.has_finished:
            return False
        rank = self._ranks[place]
        return rank.state in LIVE and rank.gpu is not None and rank.gpu.uuid == gpu_uuid

    def gpus(self) -> dict[Coordinates, str]:
        """Return the UUIDs of the GPUs that the ranks are on, or were last."""
        return {rank.coordinates: rank.gpu.uuid for rank in self._ranks if rank.gpu is not None}

    def report(self, first_number: int) -> Iterator[tuple[Period, Saving | None]]:
        """Yield what was measured, from the period of a number on, and what it saved against stock."""
        return self.log.report(first_number)

    def timeline(self, pipeline: int) -> Timeline:
        """Return the latest whole iteration of a pipeline.

        Raises:
            PipelineOutOfRangeError: the job has no such pipeline.
            TimelineNotReadyError: there is none yet.
        """
        self.spec.check_pipeline(pipeline)
        timeline = self.timelines.latest(pipeline)
        if timeline is None:
            raise TimelineNotReadyError(job_id=self.spec.job_id, pipeline=pipeline)
        return timeline

    def solved_frontier(self) -> Frontier:
        """Return the frontier.

        Raises:
            JobNotSolvedError: there is none yet.
        """
        if self._planner.frontier is None:
            raise JobNotSolvedError(job_id=self.spec.job_id, state=self.state.value)
        return self._planner.frontier

    def _take_commands(self) -> list[Command]:
        record = JobRecord(
            policy=self._planner.policy,
            state=self.state,
            state_reason=self.state_reason,
            version=self._offers.version,
            baseline=self._baseline.iteration,
            is_profile_complete=self.is_profile_complete,
            stragglers=tuple(self._stragglers),
            lag_s=self._planner.lag_s,
            profiling_cost=self.profiler.cost,
            given_up_clocks=self.profiler.given_up,
            stall=self._progress.told,
            finish_time_s=self._finish_time_s,
            baseline_request_ids=self._baseline_request_ids,
        )
        if record != self._stored_record:
            self._stored_record = record
            self._journal.store(record)
        return self._journal.take()

    # ------------------------------------------------------------------ inputs

    @singledispatchmethod
    def _on(self, event: Input, now_s: float) -> None:
        raise TypeError(f"unknown input {event!r}")

    @_on.register
    def _on_registered_again(self, event: RegisteredAgain, _now_s: float) -> None:
        self._note_registration(event.registration)

    @_on.register
    def _on_abandoned(self, event: Abandoned, _now_s: float) -> None:
        self._enter(JobState.FINISHED, f"abandoned: {event.why}")

    @_on.register
    def _on_rank_joined(self, event: RankJoined, now_s: float) -> None:
        self._check_running()
        self.spec.check_rank(event.rank)
        if not self.takes(event.spec_fingerprint):
            raise SpecMismatchError(
                job_id=self.spec.job_id,
                run_number=self.run_number,
                pipeline=event.rank.pipeline,
                stage=event.rank.stage,
                tensor=event.rank.tensor,
                spec_fingerprint=event.spec_fingerprint,
            )
        rank = self._ranks[event.rank]
        if rank.instance_id == event.instance_id and rank.state in LIVE and event.iteration < rank.iteration:
            self._lose([rank], "its trainer is back at an earlier iteration")
        has_refused = self._ranks[event.rank].has_refused
        self._ranks.join(event, self._known_version(event.in_force_epoch, event.in_force_version), now_s)
        self._offers.forget_sent(event.rank)
        self._progress.forget(event.rank)
        self._journal.do(AcceptRank(event.rank, event.instance_id))
        if has_refused and not self._ranks[event.rank].has_refused:
            self._profile_more(f"{event.rank} has another agent")

    @_on.register
    def _on_rank_left(self, event: RankLeft, _now_s: float) -> None:
        self.spec.check_rank(event.rank)
        rank = self._ranks[event.rank]
        if rank.instance_id == event.instance_id and rank.state in LIVE:
            if event.reason is RankLeftReason.FINISHED:
                self._offers.forget_sent(event.rank)
                self._ranks.finish(event.rank, event.reason.value)
            else:
                self._lose([rank], event.reason.value)

    @_on.register
    def _on_gpu_error_reported(self, event: GpuErrorReported, _now_s: float) -> None:
        self.spec.check_rank(event.rank)
        self._ranks.note_gpu_error(event)

    @_on.register
    def _on_agent_disconnected(self, event: AgentDisconnected, now_s: float) -> None:
        for rank in self._ranks.of_instance(event.instance_id, RankState.CONNECTED):
            self._offers.forget_sent(rank.coordinates)
        self._ranks.disconnect(event.instance_id, now_s)

    @_on.register
    def _on_agent_left(self, event: AgentLeft, _now_s: float) -> None:
        self._lose(self._ranks.of_instance(event.instance_id, *LIVE), "its agent ended")

    @_on.register
    def _on_agent_heard(self, event: AgentHeard, now_s: float) -> None:
        self._ranks.hear_agent(event.instance_id, now_s)

    @_on.register
    def _on_telemetry_arrived(self, event: TelemetryArrived, now_s: float) -> None:
        if not self._ranks.hear(event.rank, event.instance_id, now_s):
            raise RankNotServedError(
                job_id=self.spec.job_id,
                pipeline=event.rank.pipeline,
                stage=event.rank.stage,
                tensor=event.rank.tensor,
            )
        gpu, batch = self._ranks[event.rank].gpu, event.batch
        self._ranks.check_trainer(event.rank, batch.sequence)
        assert gpu is not None
        batch.check_clocks(gpu.supported_clocks_mhz)
        batch.check_order(self._orders[event.rank.stage])
        self._stragglers.take_telemetry(event.rank, batch)
        if len(batch.iterations.iteration):
            self._ranks.note_iteration(event.rank, int(batch.iterations.iteration.max()))
            self._take_iterations(event)
        self.timelines.add(event.rank, batch.computations)
        if batch.clocks is not None:
            self._ranks.note_clocks(event.rank, batch.clocks)
        energy = batch.energy
        if energy is not None and energy.plan_version == self._offers.of_rank(event.rank).version:
            if self.state is JobState.PLANNED:
                self._planner.watch.take_estimate(event.rank, energy)
            else:
                self.profiler.take_estimate(event.rank, energy)

    @_on.register
    def _on_offer_answered(self, event: OfferAnswered, now_s: float) -> None:
        if not self._ranks.hear(event.rank, event.instance_id, now_s):
            return
        self._ranks.note_iteration(event.rank, event.iteration)
        why = self._refusals.take(event) if event.epoch == self._epoch else None
        if why is not None:
            self._plan_without(why)

    @_on.register
    def _on_plan_in_force(self, event: PlanInForce, now_s: float) -> None:
        if not self._ranks.hear(event.rank, event.instance_id, now_s):
            return
        self._ranks.note_iteration(event.rank, event.iteration)
        rank = self._ranks[event.rank]
        version = self._known_version(event.epoch, event.version)
        offered = self._offers.of_rank(event.rank).version
        if version != offered and (version == NO_VERSION or rank.in_force_version == offered):
            # It fell back: what it had in force, and what it had accepted for an iteration to come, is gone.
            self._offers.forget_sent(event.rank)
        self._ranks.change(replace(rank, in_force_version=version))

    @_on.register
    def _on_straggler_reported(self, event: StragglerReported, _now_s: float) -> None:
        self._check_running()
        straggler = event.straggler
        self.spec.check_pipeline(straggler.pipeline)
        check_straggler(straggler)
        if self._stragglers.report(straggler):
            self._planner.announce_straggler(straggler)
            self._after_straggler_change()

    @_on.register
    def _on_straggler_cleared(self, event: StragglerCleared, _now_s: float) -> None:
        self._check_running()
        self.spec.check_pipeline(event.pipeline)
        if self._stragglers.clear(event.pipeline):
            self._after_straggler_change()

    @_on.register
    def _on_policy_set(self, event: PolicySet, _now_s: float) -> None:
        self._check_running()
        event.policy.check()
        if self._planner.set_policy(event.policy):
            self._retarget()

    @_on.register
    def _on_finish_requested(self, _event: FinishRequested, _now_s: float) -> None:
        if self.state is not JobState.FINISHED:
            self._enter(JobState.FINISHED, "ended on request")

    @_on.register
    def _on_resume_requested(self, _event: ResumeRequested, _now_s: float) -> None:
        if self.state is not JobState.STOCK:
            return
        self._journal.announce(EventType.RESUMED, "the job goes on from stock, as it was asked to")
        self._planner.drop_frontier()
        self._planner.watch.forgive()
        self.profiler.renew()
        self._baseline.forget()
        everybody = self._ranks.are_all(RankState.CONNECTED)
        self._enter(JobState.BASELINE if everybody else JobState.WAITING, "it was asked to go on")

    @_on.register
    def _on_baseline_requested(self, event: BaselineRequested, _now_s: float) -> None:
        if event.request_id in self._baseline_request_ids:
            return
        self._check_running()
        if self.state is not JobState.PLANNED:
            raise JobNotSolvedError(job_id=self.spec.job_id, state=self.state.value)
        self._journal.announce(
            EventType.BASELINE_REQUESTED,
            f"the stock iteration, {self._baseline.time_s:.6f} s so far, is measured again",
            evidence.BaselineRequested(self._baseline.time_s),
        )
        self._baseline_request_ids = (*self._baseline_request_ids, event.request_id)[-MOST_REQUEST_IDS:]
        self._baseline.forget()
        self._enter(JobState.BASELINE, "the stock baseline is measured again")

    @_on.register
    def _on_profile_found(self, event: ProfileFound, _now_s: float) -> None:
        self.profiler.known = event.found

    @_on.register
    def _on_solved(self, event: Solved, _now_s: float) -> None:
        if self._has_use_for_answer():
            self._planner.take_frontier(event.frontier)
            self._retarget()

    @_on.register
    def _on_solve_failed(self, event: SolveFailed, _now_s: float) -> None:
        if self._has_use_for_answer():
            self._give_up_solving(event.cause)

    @_on.register
    def _on_tick(self, _event: Tick, now_s: float) -> None:
        expired = self._ranks.expired(now_s)
        silent = {rank.instance_id: None for rank in expired if rank.state is RankState.CONNECTED}
        self._lose(expired, "its lease ran out")
        for instance_id in silent:
            self._journal.do(EndStream(instance_id))

    # ------------------------------------------------------------------ ranks

    def _known_version(self, epoch: str, version: int) -> int:
        """Return what a rank says is in force, as a version of this coordinator's."""
        if not epoch:
            return NO_VERSION
        return version if epoch == self._epoch else FOREIGN_VERSION

    def _lose(self, ranks: Sequence[Rank], why: str) -> None:
        """Lose ranks. The job can't go on without them, and may come back at another iteration."""
        for rank in ranks:
            self._offers.forget_sent(rank.coordinates)
            self._ranks.lose(rank.coordinates, why, self._now_s)
        if ranks:
            self.log.restart()
            self._stragglers.restart()
            self._journal.store(ForgetIterations())
            if self.state in NEEDS_ALL_RANKS:
                self._enter(JobState.WAITING, f"{ranks[0].coordinates} is lost: {why}")

    def _plan_without(self, why: str) -> None:
        """Settle on what can be: there are clocks that are no longer to be had."""
        if len(stages_at_stock(self._ranks.usable_clocks_mhz())) == self.spec.parallelism.stage_count:
            self._fall_back(f"no stage can have other clocks than stock: {why}")
        elif self.state is JobState.PROFILING:
            self._enter(JobState.PROFILING, why)
        else:
            self._planner.drop_frontier()
            self._enter(JobState.SOLVING, why)

    def _profile_more(self, why: str) -> None:
        """There may be more clocks to plan on than were measured."""
        self._planner.drop_frontier()
        self.is_profile_complete = False
        if self.state in (JobState.PROFILING, JobState.SOLVING, JobState.PLANNED):
            self._enter(JobState.PROFILING, why)

    def _note_registration(self, registration: Registration) -> None:
        registrations = self.registrations.with_newest(registration)
        if registrations != self.registrations:
            self.registrations = registrations
            self._journal.store(registrations)

    def _check_running(self) -> None:
        if self.state is JobState.FINISHED:
            raise JobFinishedError(job_id=self.spec.job_id)

    # ------------------------------------------------------------------ iterations

    def _take_iterations(self, event: TelemetryArrived) -> None:
        self._progress.take_rows(event.rank, event.batch.iterations)
        count = len(self.log.periods)
        last = self.log.periods[-1] if self.log.periods else None
        summaries, complete = self.log.add(event.rank, event.batch.iterations, self._wall_time_s)
        for summary in summaries:
            self.timelines.finish(summary)
            self._journal.do(ReportIteration(summary))
        for period in self.log.periods[max(0, count - 1) :]:
            if period != last:
                self._journal.store(period)
        self._journal.store(IterationRows(event.rank, event.batch.iterations, self.log.closed_through))
        if complete:
            self._offers.iteration_time_s = complete[-1].iteration_time_s
        for iteration in complete:
            gap_s = self._progress.silence_s(self._now_s)
            self._progress.take_iteration(iteration, self._now_s)
            judgement = self._stragglers.judge(iteration)
            if judgement.has_changed:
                self._after_straggler_change()
            if self.state is JobState.PROFILING:
                self._note_profiled(iteration, judgement.slowed, gap_s)
            elif self.state is JobState.PLANNED:
                self._watch_plans(iteration)
        if self.state is JobState.BASELINE:
            self._baseline.take(complete, self._offers.versions)

    def _note_profiled(self, iteration: JobIteration, slowed: Collection[int], gap_s: float) -> None:
        """Let the profiler count an iteration, unless it ran at stock because nothing is held for now.

        `gap_s`: since the one before.
        """
        if iteration.skipped_count:
            self.profiler.take_gap(iteration, gap_s, self._baseline.time_s)
        self.profiler.end_gap()
        is_as_offered = iteration.versions == self._offers.versions
        if is_as_offered and self._held_clocks() is None:
            return
        baseline = self._baseline.iteration
        assert baseline is not None
        self.profiler.take_iteration(
            iteration, is_as_offered, {*self._stragglers.pipelines, *slowed}, baseline
        )

    def _held_clocks(self) -> HoldClocks | None:
        """Return the clocks that all pipelines are to hold, if they are to."""
        clocks = self._offers[0].clocks
        return clocks if isinstance(clocks, HoldClocks) else None

    def _label_versions(self) -> None:
        """Let the report know for what state clocks were offered, and the detection what plans promise.

        Only of what has changed: the offers of some pipelines; or, for all, the state or the frontier.
        """
        if self.state is JobState.WAITING:
            return
        basis = self.state, self._planner.frontier
        changed = self._offers.take_changed()
        if basis != self._labelled:
            self._labelled, changed = basis, range(len(self._offers))
        if not changed:
            return
        for pipeline in changed:
            self.log.label(pipeline, self._offers[pipeline], self.state)
        self._planner.tell_expectations(changed)

    # ------------------------------------------------------------------ states

    def _advance(self) -> None:
        """Move the state as far as what is known allows."""
        if self.state is not JobState.FINISHED and self._ranks.are_all(RankState.FINISHED):
            self._enter(JobState.FINISHED, "all ranks are done")
        if self.state is JobState.WAITING and self._ranks.are_all(RankState.CONNECTED):
            self._enter(self._state_with_all_ranks(), "all ranks are there")
        if self.state is JobState.BASELINE and self._baseline.time_s:
            why = f"the stock iteration takes {self._baseline.time_s:.6f} s"
            self._enter(self._state_with_all_ranks(), why)
        if self.state is JobState.PROFILING:
            if self._progress.is_silent:
                self._release_clocks()
            else:
                self._profile(self._held_clocks())
        if self.state is JobState.SOLVING and self._planner.frontier is not None:
            self._enter(JobState.PLANNED, "the frontier is solved")

    def _state_with_all_ranks(self) -> JobState:
        if not self._baseline.time_s:
            return JobState.BASELINE
        if not self.is_profile_complete:
            return JobState.PROFILING
        return JobState.SOLVING if self._planner.frontier is None else JobState.PLANNED

    def _enter(self, state: JobState, why: str) -> None:
        """Enter a state, and say what clocks the pipelines should have in it."""
        check_transition(self.state, state)
        before, self.state, self.state_reason = self.state, state, why
        if state is JobState.FINISHED:
            self._finish_time_s = self._wall_time_s
        self._journal.announce(
            EventType.STATE_CHANGED,
            f"{before.value} → {state.value}: {why}",
            evidence.StateChanged(before, state, why),
        )
        self._baseline.restart()
        self._planner.watch.restart()
        self._progress.enter(state, self._now_s)
        match state:
            case JobState.PROFILING:
                self._find_profile()
                self._profile(held=None)
            case JobState.PLANNED:
                self._retarget()
            case JobState.SOLVING:
                self._offers.wish(range(len(self._offers)), STOCK)
                self._solve()
            case _:
                self._offers.wish(range(len(self._offers)), STOCK)

    def _fall_back(self, why: str) -> None:
        if self.state not in (JobState.STOCK, JobState.FINISHED):
            self._enter(JobState.STOCK, why)

    def _profile(self, held: HoldClocks | None) -> None:
        """Hold clocks round by round, until what is measured is enough."""
        clocks_mhz = self._ranks.usable_clocks_mhz()
        if not any(clocks_mhz):
            self._fall_back("the GPUs have no clock in common")
            return
        following = self.profiler.next_round(held, clocks_mhz)
        if isinstance(following, HoldClocks):
            self._offers.wish(range(len(self._offers)), following)
        elif following.is_enough:
            self.is_profile_complete = True
            for stage, key in enumerate(self._work_keys()):
                self._journal.store(ProfiledWork(stage, key))
            self._enter(JobState.SOLVING, following.why)
        else:
            self._fall_back(following.why)

    def _find_profile(self) -> None:
        """Ask for what is known from before, as long as it can be held against the first measurements."""
        if self.profiler.clock_count < LEAST_CLOCKS:
            self._journal.do(FindProfile(self._work_keys()))

    def _work_keys(self) -> tuple[str, ...]:
        gpus: list[list[Gpu]] = [[] for _ in range(self.spec.parallelism.stage_count)]
        for rank in self._ranks:
            if rank.gpu is not None:
                gpus[rank.coordinates.stage].append(rank.gpu)
        return work_keys(self.spec, self.schedule, gpus)

    def _release_clocks(self) -> None:
        """Hold nothing while nobody knows what the clocks cost; the round begins anew once that is known."""
        if self._held_clocks() is not None:
            self.profiler.take_silence(self._progress.silence_s(self._now_s), self._baseline.time_s)
            self._offers.wish(range(len(self._offers)), STOCK)

    def _solve(self) -> None:
        try:
            self._planner.solve()
        except SolverError as error:
            self._give_up_solving(str(error))

    def _has_use_for_answer(self) -> bool:
        """Take note that there is an answer; one that is of no use any more may have to be asked for anew."""
        is_of_use = self._planner.end_solving()
        if not is_of_use and self.state is JobState.SOLVING:
            self._solve()
        return is_of_use and self.state not in (JobState.STOCK, JobState.FINISHED)

    def _give_up_solving(self, cause: str) -> None:
        self._journal.announce(EventType.SOLVE_FAILED, f"no frontier: {cause}", evidence.SolveFailed(cause))
        self._fall_back(f"no frontier: {cause}")

    # ------------------------------------------------------------------ plans

    def _watch_plans(self, iteration: JobIteration) -> None:
        verdict = self._planner.judge(iteration)
        if verdict.withdraw is None:
            if verdict.solve_again:
                self._solve()
        elif verdict.solve_again:
            self._planner.drop_frontier(verdict.slow)
            self._enter(JobState.SOLVING, verdict.withdraw)
        else:
            self._fall_back(verdict.withdraw)

    def _after_straggler_change(self) -> None:
        self.log.mark_straggler(self._ranks.highest_iteration() + 1, bool(self._stragglers))
        self._retarget()

    def _retarget(self) -> None:
        if self.state is JobState.PLANNED:
            self._planner.retarget()

    # ------------------------------------------------------------------ checks

    def validate(self) -> None:
        """Check what must always hold between two inputs."""
        self._ranks.validate()
        self._offers.validate()
        self.log.validate()
        planner, clocks = self._planner, [offer.clocks for offer in self._offers]
        match self.state:
            case JobState.PROFILING:
                assert len(set(clocks)) == 1
                assert isinstance(clocks[0], StockClocks if self._progress.is_silent else HoldClocks)
                assert not self.is_profile_complete
            case JobState.PLANNED:
                assert all(isinstance(some, PlannedClocks) for some in clocks)
                assert planner.frontier is not None or planner.is_solving
            case _:
                assert all(isinstance(some, StockClocks) for some in clocks)
        if self.state in NEEDS_ALL_RANKS:
            assert not any(rank.state in (RankState.EXPECTED, RankState.LOST) for rank in self._ranks)
        if self.state is JobState.WAITING:
            assert not self._ranks.are_all(RankState.CONNECTED)
        if self.state is JobState.SOLVING:
            assert planner.is_solving
        if self.state is JobState.BASELINE:
            assert not self._baseline.time_s
        if self.is_profile_complete:
            assert self.profiler.clock_count >= LEAST_CLOCKS
        if planner.frontier is not None or (planner.is_solving and not planner.is_in_vain):
            assert self.is_profile_complete
        planner.validate()
        self._progress.validate()
        self._stragglers.validate()
