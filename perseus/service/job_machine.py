"""A job's life, as a pure state machine: inputs and the time in, commands out.

Theory of operation
===================

The machine holds what the job *should* run (one `Offer` per pipeline) and what its ranks *say* they run.
Every input ends with the same three steps:

1. the input itself changes what is known (a rank joined, an iteration ended, a straggler was reported);
2. `_advance` moves the state as far as it goes, and each state says what clocks the pipelines should have:

       WAITING ──all connected──► BASELINE ──measured──► PROFILING ──swept──► SOLVING ──solved──► PLANNED
          ▲   stock                 stock                  clock by clock       stock              plans
          │
          └──── a rank is lost ◄── any of these; what was measured is kept, and the way back skips it

       STOCK      something failed: stock on every rank until the job ends
       FINISHED   all ranks are done, or the job was ended: stock on every rank that is left

3. `_settle` offers its pipeline's clocks to every connected rank that neither has them in force nor was
offered
   them. It looks at the state of things only, never at how they came about: a rank that resumes with the
   right version gets nothing, one that comes back with another one, or fell back to stock, gets the offer.

A version belongs to clocks, rises within the job and is never used again. All ranks of a pipeline get the
same version and the same start iteration. A rank that has already begun the start iteration refuses; then
the pipeline keeps the version and is offered it anew with a later start.

The start lies a margin above the highest iteration that any rank reported. Telemetry comes when an
iteration has ended and the next is running, so two is the least; short iterations need enough of them to
cover the way (`TRANSIT_S`). The margin doubles with every refusal of the same version.

Leases: a rank whose stream ended is DISCONNECTED, keeps its plan and may resume, whatever its job's state.
A rank whose agent was silent for the lease is LOST, as is one whose trainer is gone. The time is any clock
that never goes back; only differences count.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import singledispatchmethod

from perseus.service.commands import (
    AcceptRank,
    Announce,
    Command,
    EndStream,
    ForgetIterations,
    IterationRows,
    JobRecord,
    OfferRecord,
    ReportIteration,
    SendOffer,
    Solve,
    Store,
)
from perseus.service.errors import (
    InvalidFieldError,
    JobFinishedError,
    JobNotSolvedError,
    RankAlreadyServedError,
)
from perseus.service.inputs import (
    AgentDisconnected,
    AgentHeard,
    AgentLeft,
    FinishRequested,
    Input,
    OfferAnswered,
    PlanInForce,
    PolicySet,
    RankJoined,
    RankLeft,
    Solved,
    SolveFailed,
    StragglerCleared,
    StragglerReported,
    TelemetryArrived,
    Tick,
)
from perseus.service.iterations import IterationLog, JobIteration, Period
from perseus.service.model import (
    FOREIGN_VERSION,
    NO_VERSION,
    STOCK,
    Clocks,
    EventType,
    Happening,
    HoldClock,
    JobState,
    JobView,
    Offer,
    PlannedClocks,
    Rank,
    RankLeftReason,
    RankState,
    RefusalReason,
    Straggler,
)
from perseus.service.operating_point import straggler_time_s, target_times_s
from perseus.service.profiling import (
    ClockProfile,
    build_problem,
    common_clocks_mhz,
    has_swept_enough,
    is_measured,
    merge,
)
from perseus.service.specification import Coordinates, JobSpec
from perseus.service.telemetry import EnergyEstimate
from perseus.service.timeline import TimelineMemory
from perseus.solver import Frontier, SolverError

TRANSIT_S = 0.5
"""Time that a report needs to get here, and an offer to get back, with room to spare."""

LEAST_MARGIN = 2
MOST_MARGIN = 256

_LIVE = (RankState.CONNECTED, RankState.DISCONNECTED)
_MEASURING = (JobState.BASELINE, JobState.PROFILING, JobState.SOLVING)


@dataclass(frozen=True, slots=True)
class Rules:
    """What the operator sets for all jobs. Times in seconds."""

    lease_s: float = 30.0
    baseline_iterations: int = 5
    profile_iterations: int = 3


@dataclass(frozen=True, slots=True)
class StoredJob:
    """What the store knows of a job: all that a machine needs to go on after a restart."""

    spec: JobSpec
    create_time_s: float
    record: JobRecord | None
    ranks: tuple[Rank, ...]
    offers: tuple[OfferRecord, ...]
    profiles: tuple[ClockProfile, ...]
    periods: tuple[Period, ...]
    open_rows: tuple[IterationRows, ...]
    last_sequence: int


_NO_OFFER = Offer(NO_VERSION, 0, STOCK)


@dataclass(slots=True)
class _Pipeline:
    """What a pipeline should run, how often it was too late, and the version last in force on all ranks."""

    offer: Offer = _NO_OFFER
    late_count: int = 0
    announced_version: int = NO_VERSION


class JobMachine:
    """One job. `handle` is the only way in; what it returns is the only way out.

    Attributes:
        spec: the job as registered.
        schedule: its order of computations.
        policy: the operating policy now in force.
        state: where the job stands.
        frontier: once solved.
        log: its iterations and the report.
        timelines: the latest iteration of each pipeline.
        profiles: the clocks measured so far, highest first.
    """

    def __init__(self, spec: JobSpec, rules: Rules, epoch: str, create_time_s: float) -> None:
        self.spec = spec
        self.schedule = spec.check()
        self.policy = spec.policy
        self.state = JobState.WAITING
        self.frontier: Frontier | None = None
        self.profiles: list[ClockProfile] = []
        ranks = list(spec.parallelism.all_coordinates())
        self.log = IterationLog(ranks)
        self.timelines = TimelineMemory(spec.parallelism)
        self._rules = rules
        self._epoch = epoch
        self._create_time_s = create_time_s
        self._ranks = {rank: Rank(rank) for rank in ranks}
        self._pipelines = [_Pipeline() for _ in range(spec.parallelism.pipeline_count)]
        self._version = NO_VERSION
        self._baseline_time_s = 0.0
        self._baseline_times_s: list[float] | None = None
        self._is_profile_complete = False
        self._is_solving = False
        self._estimates: dict[Coordinates, EnergyEstimate] = {}
        self._stragglers: dict[int, Straggler] = {}
        # The (version, start iteration) sent to each rank on this stream, and when its agent last spoke.
        self._sent: dict[Coordinates, tuple[int, int]] = {}
        self._heard_s: dict[Coordinates, float] = {}
        self._sequence = 0
        self._commands: list[Command] = []
        self._dirty_ranks: dict[Coordinates, None] = {}
        self._dirty_pipelines: dict[int, None] = {}

    # ------------------------------------------------------------------ the way in and out

    def register(self) -> list[Command]:
        """Begin the job's life: what is to be stored and told of a new job."""
        counts = self.spec.parallelism
        self._announce(
            EventType.REGISTERED,
            f"registered with {counts.pipeline_count} pipelines × {counts.stage_count} stages × "
            f"{counts.tensor_count} tensor-parallel ranks",
            pipeline_count=counts.pipeline_count,
            stage_count=counts.stage_count,
            tensor_count=counts.tensor_count,
        )
        return [Store(self._record()), *self._take_commands()]

    @classmethod
    def restore(
        cls, stored: StoredJob, rules: Rules, epoch: str, now_s: float
    ) -> tuple["JobMachine", list[Command]]:
        """Go on after a restart. Ranks that were connected have a whole lease to come back.

        A frontier is not stored: a complete profile is solved again, while plans in force stay as they are.
        """
        machine = cls(stored.spec, rules, epoch, stored.create_time_s)
        if stored.record is not None:
            record = stored.record
            machine.policy, machine.state, machine._version = record.policy, record.state, record.version
            machine._baseline_time_s = record.baseline_time_s
            machine._is_profile_complete = record.is_profile_complete
            machine._stragglers = {straggler.pipeline: straggler for straggler in record.stragglers}
        for offer in stored.offers:
            machine._pipelines[offer.pipeline].offer = offer.offer
            machine._pipelines[offer.pipeline].announced_version = offer.offer.version
            machine.log.label(offer.offer.version, machine.state)
        for rank in stored.ranks:
            state = RankState.DISCONNECTED if rank.state in _LIVE else rank.state
            machine._ranks[rank.coordinates] = replace(rank, state=state)
            machine._heard_s[rank.coordinates] = now_s
        machine.profiles = sorted(stored.profiles, key=lambda profile: -profile.clock_mhz)
        machine.log.periods = list(stored.periods)
        machine.log.mark_straggler(-1, bool(machine._stragglers))
        for rows in stored.open_rows:
            machine.log.add(rows.rank, rows.rows)
        machine._sequence = stored.last_sequence
        if machine.state is JobState.BASELINE:
            machine._baseline_times_s = []
        if machine._is_profile_complete and machine.state not in (JobState.STOCK, JobState.FINISHED):
            machine._solve()
        return machine, machine._take_commands()

    def handle(self, event: Input, now_s: float) -> list[Command]:
        """Take one input. Returns what is to be done, records first.

        Raises:
            InvalidInputError: the input does not fit the job; nothing has changed.
            JobFinishedError, RankAlreadyServedError: it is refused; nothing has changed.
        """
        self._on(event, now_s)
        self._advance()
        self._settle()
        return self._take_commands()

    def next_deadline_s(self) -> float | None:
        """When the next lease runs out, if any runs: a Tick is due then."""
        heard_s = [self._heard_s[rank.coordinates] for rank in self._ranks.values() if rank.state in _LIVE]
        return min(heard_s) + self._rules.lease_s if heard_s else None

    def view(self) -> JobView:
        """Return the job as others may see it."""
        plans = [pipeline.offer.clocks for pipeline in self._pipelines]
        planned_s = tuple(
            clocks.plan.iteration_time_s for clocks in plans if isinstance(clocks, PlannedClocks)
        )
        return JobView(
            spec=self.spec,
            policy=self.policy,
            state=self.state,
            epoch=self._epoch,
            ranks=tuple(self._ranks.values()),
            straggler_times_s=self._straggler_times_s(),
            profiled_clock_count=len(self.profiles),
            t_min_s=self.frontier.t_min_s if self.frontier else 0.0,
            t_slow_s=self.frontier.t_slow_s if self.frontier else 0.0,
            planned_iteration_time_s=planned_s if len(planned_s) == len(plans) else (),
            create_time_s=self._create_time_s,
        )

    def solved_frontier(self) -> Frontier:
        """Return the frontier.

        Raises:
            JobNotSolvedError: there is none yet.
        """
        if self.frontier is None:
            raise JobNotSolvedError(job_id=self.spec.job_id, state=self.state.value)
        return self.frontier

    # ------------------------------------------------------------------ inputs

    @singledispatchmethod
    def _on(self, event: Input, now_s: float) -> None:
        raise TypeError(f"unknown input {event!r}")

    @_on.register
    def _(self, event: RankJoined, now_s: float) -> None:
        self._check_running()
        self.spec.check_rank(event.rank)
        rank = self._ranks[event.rank]
        if rank.state in _LIVE and rank.instance_id != event.instance_id:
            raise RankAlreadyServedError(
                job_id=self.spec.job_id,
                pipeline=event.rank.pipeline,
                stage=event.rank.stage,
                tensor=event.rank.tensor,
                instance_id=rank.instance_id,
                hostname=rank.hostname,
            )
        in_force = event.in_force_version if event.in_force_epoch == self._epoch else FOREIGN_VERSION
        if not event.in_force_epoch:
            in_force = NO_VERSION
        self._heard_s[event.rank] = now_s
        self._sent.pop(event.rank, None)
        self._change_rank(
            replace(
                rank,
                state=RankState.CONNECTED,
                instance_id=event.instance_id,
                hostname=event.hostname,
                gpu=event.gpu,
                in_force_version=in_force,
                iteration=event.iteration,
            )
        )
        self._commands.append(AcceptRank(event.rank, event.instance_id))

    @_on.register
    def _(self, event: RankLeft, now_s: float) -> None:
        if self._hear(event.rank, event.instance_id, now_s):
            if event.reason is RankLeftReason.FINISHED:
                self._drop_rank(event.rank, RankState.FINISHED, event.reason.value)
            else:
                self._drop_rank(event.rank, RankState.LOST, event.reason.value)

    @_on.register
    def _(self, event: AgentDisconnected, now_s: float) -> None:
        for rank in self._served_by(event.instance_id, RankState.CONNECTED):
            self._heard_s[rank.coordinates] = now_s
            self._change_rank(replace(rank, state=RankState.DISCONNECTED))

    @_on.register
    def _(self, event: AgentLeft, _now_s: float) -> None:
        for rank in self._served_by(event.instance_id, *_LIVE):
            self._drop_rank(rank.coordinates, RankState.LOST, "agent ended")

    @_on.register
    def _(self, event: AgentHeard, now_s: float) -> None:
        for rank in self._served_by(event.instance_id, RankState.CONNECTED):
            self._heard_s[rank.coordinates] = now_s

    @_on.register
    def _(self, event: TelemetryArrived, now_s: float) -> None:
        batch = event.batch
        if not self._hear(event.rank, event.instance_id, now_s):
            return
        gpu = self._ranks[event.rank].gpu
        assert gpu is not None
        batch.check_clocks(gpu.supported_clocks_mhz)
        if batch.energy is not None:
            self._check_known_computations(event.rank, batch.energy)
        rows = batch.iterations
        if len(rows.iteration):
            self._note_iteration(event.rank, int(rows.iteration.max()))
        period_count = len(self.log.periods)
        last_period = self.log.periods[-1] if self.log.periods else None
        summaries, complete = self.log.add(event.rank, rows)
        self.timelines.add(event.rank, batch.computations)
        for summary in summaries:
            self.timelines.finish(summary)
            self._commands.append(ReportIteration(summary))
        if last_period is not None and self.log.periods[period_count - 1] != last_period:
            self._store(self.log.periods[period_count - 1])
        for period in self.log.periods[period_count:]:
            self._store(period)
        if len(rows.iteration):
            self._store(IterationRows(event.rank, rows, self.log.closed_through))
        self._measure_baseline(complete)
        version = self._pipelines[event.rank.pipeline].offer.version
        if batch.energy is not None and batch.energy.plan_version == version:
            self._estimates[event.rank] = batch.energy

    @_on.register
    def _(self, event: OfferAnswered, now_s: float) -> None:
        pipeline = self._pipelines[event.rank.pipeline]
        offer = pipeline.offer
        if not self._hear(event.rank, event.instance_id, now_s):
            return
        self._note_iteration(event.rank, event.iteration)
        if event.refusal is None or event.epoch != self._epoch or event.version != offer.version:
            return
        if event.refusal is RefusalReason.PAST_START and event.iteration < offer.start_iteration:
            return  # The answer to an earlier start of the same version: the newer one is on its way.
        self._announce(
            EventType.PLAN_REFUSED,
            f"{event.rank} refused version {event.version} ({offer.clocks}): {event.refusal.value}",
            **_by_name(event.rank),
            version=event.version,
            start_iteration=offer.start_iteration,
            iteration=event.iteration,
            reason=event.refusal.name,
            agent_message=event.message,
        )
        if event.refusal is RefusalReason.PAST_START:
            pipeline.late_count += 1
            self._postpone(event.rank.pipeline)
        elif offer.clocks != STOCK:
            self._fall_back(f"{event.rank} refused {offer.clocks}: {event.refusal.value}")

    @_on.register
    def _(self, event: PlanInForce, now_s: float) -> None:
        if not self._hear(event.rank, event.instance_id, now_s):
            return
        self._note_iteration(event.rank, event.iteration)
        rank = self._ranks[event.rank]
        version = event.version if event.epoch == self._epoch else FOREIGN_VERSION
        if not event.epoch:
            version = NO_VERSION
        wanted = self._pipelines[event.rank.pipeline].offer.version
        if rank.in_force_version == wanted != version:
            self._sent.pop(event.rank, None)  # It had the right clocks and fell back: its lease ran out.
        self._change_rank(replace(rank, in_force_version=version), is_news=False)

    @_on.register
    def _(self, event: StragglerReported, _now_s: float) -> None:
        self._check_running()
        straggler = event.straggler
        self.spec.check_pipeline(straggler.pipeline)
        time_s, factor = straggler.iteration_time_s, straggler.slowdown_factor
        if factor is not None and not (math.isfinite(factor) and factor >= 1):
            raise InvalidFieldError(field="slowdown_factor", expected="a number of 1 or more", found=factor)
        if time_s is not None and not (math.isfinite(time_s) and time_s > 0):
            raise InvalidFieldError(field="iteration_time_s", expected="a positive number", found=time_s)
        if (factor is None) == (time_s is None):
            raise InvalidFieldError(field="slowness", expected="a time or a factor", found="none")
        if self._stragglers.get(straggler.pipeline) == straggler:
            return
        self._stragglers[straggler.pipeline] = straggler
        said = f"{factor:g} × T_min" if factor is not None else f"{time_s:g} s"
        times_s = self._straggler_times_s()
        self._announce(
            EventType.STRAGGLER_REPORTED,
            f"pipeline {straggler.pipeline} is slow: {said}",
            pipeline=straggler.pipeline,
            slowdown_factor=factor if factor is not None else "",
            reported_iteration_time_s=time_s if time_s is not None else "",
            iteration_time_s=times_s[straggler.pipeline],
        )
        self._after_straggler_change()

    @_on.register
    def _(self, event: StragglerCleared, _now_s: float) -> None:
        self._check_running()
        self.spec.check_pipeline(event.pipeline)
        if self._stragglers.pop(event.pipeline, None) is not None:
            self._announce(
                EventType.STRAGGLER_CLEARED,
                f"pipeline {event.pipeline} is no longer slow",
                pipeline=event.pipeline,
            )
            self._after_straggler_change()

    @_on.register
    def _(self, event: PolicySet, _now_s: float) -> None:
        self._check_running()
        event.policy.check()
        if event.policy != self.policy:
            self.policy = event.policy
            self._announce(
                EventType.POLICY_SET,
                f"policy: at most {event.policy.max_slowdown_percent:g} % slower than T_min",
                max_slowdown_percent=event.policy.max_slowdown_percent,
            )
            self._store(self._record())
            self._retarget()

    @_on.register
    def _(self, _event: FinishRequested, _now_s: float) -> None:
        if self.state is not JobState.FINISHED:
            self._enter(JobState.FINISHED, "ended on request")

    @_on.register
    def _(self, event: Solved, _now_s: float) -> None:
        self._is_solving = False
        if self.state is JobState.FINISHED:
            return
        frontier = self.frontier = event.frontier
        self._announce(
            EventType.SOLVED,
            f"frontier from T_min {frontier.t_min_s:.6f} s to T_slow {frontier.t_slow_s:.6f} s",
            t_min_s=frontier.t_min_s,
            t_star_s=frontier.t_star_s,
            t_slow_s=frontier.t_slow_s,
            baseline_energy_j=frontier.baseline.energy_j,
            t_min_energy_j=frontier.points[0].energy_j,
            point_count=len(frontier.points),
        )
        self._retarget()

    @_on.register
    def _(self, event: SolveFailed, _now_s: float) -> None:
        self._is_solving = False
        if self.state is not JobState.FINISHED:
            self._announce(EventType.SOLVE_FAILED, f"no frontier: {event.cause}", cause=event.cause)
            self._fall_back(f"no frontier: {event.cause}")

    @_on.register
    def _(self, _event: Tick, now_s: float) -> None:
        ended = {}
        for rank in [rank for rank in self._ranks.values() if rank.state in _LIVE]:
            if now_s - self._heard_s[rank.coordinates] >= self._rules.lease_s:
                if rank.state is RankState.CONNECTED:
                    ended[rank.instance_id] = EndStream(rank.instance_id)
                self._drop_rank(rank.coordinates, RankState.LOST, "lease ran out")
        self._commands.extend(ended.values())

    # ------------------------------------------------------------------ ranks

    def _hear(self, coordinates: Coordinates, instance_id: str, now_s: float) -> bool:
        """Renew a rank's lease; False if the agent does not serve it (any more): what it says is stale."""
        self.spec.check_rank(coordinates)
        rank = self._ranks[coordinates]
        if rank.state is not RankState.CONNECTED or rank.instance_id != instance_id:
            return False
        self._heard_s[coordinates] = now_s
        return True

    def _served_by(self, instance_id: str, *states: RankState) -> list[Rank]:
        return [
            rank for rank in self._ranks.values() if rank.instance_id == instance_id and rank.state in states
        ]

    def _drop_rank(self, coordinates: Coordinates, state: RankState, why: str) -> None:
        """A rank is lost or finished; its GPU is on stock, or will be when its lease runs out there."""
        rank = self._ranks[coordinates]
        self._sent.pop(coordinates, None)
        self._change_rank(replace(rank, state=state, in_force_version=NO_VERSION), why)
        if state is RankState.LOST and self.state in (*_MEASURING, JobState.PLANNED):
            self._enter(JobState.WAITING, f"{coordinates} is lost: {why}")
        if state is RankState.LOST:
            self._estimates.clear()
            self.log.restart()
            self._store(ForgetIterations())

    def _change_rank(self, rank: Rank, why: str = "", is_news: bool = True) -> None:
        before = self._ranks[rank.coordinates]
        if rank == before:
            return
        self._ranks[rank.coordinates] = rank
        self._dirty_ranks[rank.coordinates] = None
        if is_news:
            self._announce(
                EventType.RANK_CHANGED,
                f"{rank.coordinates} is {rank.state.value}{f': {why}' if why else ''}",
                **_by_name(rank.coordinates),
                state=rank.state.name,
                instance_id=rank.instance_id,
                hostname=rank.hostname,
                gpu_uuid=rank.gpu.uuid if rank.gpu else "",
                reason=why,
            )

    def _note_iteration(self, coordinates: Coordinates, iteration: int) -> None:
        rank = self._ranks[coordinates]
        if iteration > rank.iteration:
            self._ranks[coordinates] = replace(rank, iteration=iteration)

    def _check_running(self) -> None:
        if self.state is JobState.FINISHED:
            raise JobFinishedError(job_id=self.spec.job_id)

    def _check_known_computations(self, coordinates: Coordinates, energy: EnergyEstimate) -> None:
        known = {
            (computation.kind, computation.chunk) for computation in self.schedule.orders[coordinates.stage]
        }
        for sample in energy.samples:
            if (sample.kind, sample.chunk) not in known:
                raise InvalidFieldError(
                    field="energy.samples",
                    expected=f"kinds and chunks of the order of stage {coordinates.stage}",
                    found=f"{sample.kind.value} of chunk {sample.chunk}",
                )

    # ------------------------------------------------------------------ states

    def _advance(self) -> None:
        """Move the state as far as what is known allows."""
        states = [rank.state for rank in self._ranks.values()]
        if self.state is not JobState.FINISHED and all(state is RankState.FINISHED for state in states):
            self._enter(JobState.FINISHED, "all ranks are done")
        if self.state is JobState.WAITING and all(state is RankState.CONNECTED for state in states):
            if not self._is_profile_complete:
                self._enter(
                    JobState.PROFILING if self._baseline_time_s else JobState.BASELINE, "all ranks are there"
                )
            elif self.frontier is None:
                self._enter(JobState.SOLVING, "all ranks are there, the profile is complete")
        if self.state is JobState.BASELINE and self._baseline_time_s:
            self._enter(JobState.PROFILING, f"the stock iteration takes {self._baseline_time_s:.6f} s")
        if self.state is JobState.PROFILING:
            self._profile()
        if self.frontier is not None and (
            self.state is JobState.SOLVING
            or (self.state is JobState.WAITING and all(state is RankState.CONNECTED for state in states))
        ):
            self._enter(JobState.PLANNED, "the frontier is solved")

    def _enter(self, state: JobState, why: str) -> None:
        """Enter a state, and say what clocks the pipelines should have in it."""
        before, self.state = self.state, state
        self._announce(
            EventType.STATE_CHANGED,
            f"{before.value} → {state.value}: {why}",
            before=before.name,
            after=state.name,
            reason=why,
        )
        self._estimates.clear()
        self._baseline_times_s = [] if state is JobState.BASELINE else None
        if state is JobState.PROFILING:
            self._profile()
        elif state is JobState.PLANNED:
            self._retarget()
        else:
            self._offer(range(len(self._pipelines)), STOCK)
        if state is JobState.SOLVING:
            self._solve()
        if state is not JobState.WAITING:
            for pipeline in self._pipelines:
                self.log.label(pipeline.offer.version, self.state)
        self._store(self._record())

    def _fall_back(self, why: str) -> None:
        if self.state not in (JobState.STOCK, JobState.FINISHED):
            self._enter(JobState.STOCK, why)

    def _measure_baseline(self, complete: Sequence[JobIteration]) -> None:
        """Take regular iterations at stock; the first one seen is dropped: it may have begun otherwise."""
        times_s = self._baseline_times_s
        if times_s is None:
            return
        wanted = tuple(pipeline.offer.version for pipeline in self._pipelines)
        times_s.extend(
            iteration.iteration_time_s
            for iteration in complete
            if iteration.is_regular and iteration.versions == wanted
        )
        if len(times_s) > self._rules.baseline_iterations:
            measured_s = times_s[1 : self._rules.baseline_iterations + 1]
            self._baseline_time_s = math.fsum(measured_s) / len(measured_s)

    def _profile(self) -> None:
        """Hold the next clock once the one that is held now has been measured on all ranks."""
        clocks_mhz = common_clocks_mhz(rank.gpu for rank in self._ranks.values() if rank.gpu)
        while True:
            measured_mhz = {profile.clock_mhz for profile in self.profiles}
            left_mhz = [clock_mhz for clock_mhz in clocks_mhz if clock_mhz not in measured_mhz]
            if not clocks_mhz:
                self._fall_back("the GPUs have no clock in common")
                return
            if not left_mhz or has_swept_enough(self.profiles, self.schedule):
                self._is_profile_complete = True
                self._enter(JobState.SOLVING, f"{len(self.profiles)} clocks are measured")
                return
            held = HoldClock(left_mhz[0])
            self._offer(range(len(self._pipelines)), held)
            if not self._has_measured(held.clock_mhz):
                return
            profile = merge(held.clock_mhz, self._estimates, self.spec.parallelism, self.schedule)
            self._estimates.clear()
            self.profiles.append(profile)
            self.profiles.sort(key=lambda profile: -profile.clock_mhz)
            self._store(profile)
            self._announce(
                EventType.CLOCK_PROFILED,
                f"{held.clock_mhz} MHz is measured on all ranks",
                clock_mhz=held.clock_mhz,
                **{
                    f"blocking_power_w.{stage}": power_w
                    for stage, power_w in enumerate(profile.blocking_power_w)
                },
            )

    def _has_measured(self, clock_mhz: int) -> bool:
        return len(self._estimates) == len(self._ranks) and all(
            is_measured(estimate, self.schedule.orders[rank.stage], clock_mhz, self._rules.profile_iterations)
            for rank, estimate in self._estimates.items()
        )

    def _solve(self) -> None:
        if self._is_solving or self.frontier is not None:
            return
        try:
            problem = build_problem(self.profiles, self.schedule)
        except SolverError as error:
            self._announce(EventType.SOLVE_FAILED, f"no frontier: {error}", cause=str(error))
            self._fall_back(f"no frontier: {error}")
            return
        self._is_solving = True
        self._commands.append(Solve(problem))

    # ------------------------------------------------------------------ plans

    def _straggler_times_s(self) -> dict[int, float]:
        if self.frontier is None:
            return dict.fromkeys(self._stragglers, 0.0)
        return {
            pipeline: straggler_time_s(straggler, self.frontier, self._baseline_time_s)
            for pipeline, straggler in sorted(self._stragglers.items())
        }

    def _after_straggler_change(self) -> None:
        self.log.mark_straggler(self._highest_iteration() + 1, bool(self._stragglers))
        self._store(self._record())
        self._retarget()

    def _retarget(self) -> None:
        """Give every pipeline the plan of its target time; pipelines of the same plan share its version."""
        if self.state is not JobState.PLANNED or self.frontier is None:
            return
        targets_s = target_times_s(
            self.frontier, self.policy, self._straggler_times_s(), len(self._pipelines)
        )
        for target_s in sorted(set(targets_s)):
            clocks = PlannedClocks(self.frontier.plan_within(target_s))
            self._offer([pipeline for pipeline, own_s in enumerate(targets_s) if own_s == target_s], clocks)

    def _offer(self, pipelines: Sequence[int], clocks: Clocks) -> None:
        """Let these pipelines have these clocks; those that have them already keep their version."""
        changing = [pipeline for pipeline in pipelines if self._pipelines[pipeline].offer.clocks != clocks]
        if changing:
            self._offer_anew(changing, clocks)

    def _offer_anew(self, pipelines: Sequence[int], clocks: Clocks) -> None:
        self._version += 1
        self._store(self._record())
        self.log.label(self._version, self.state)
        for number in pipelines:
            pipeline = self._pipelines[number]
            pipeline.late_count = 0
            pipeline.offer = Offer(self._version, self._start_iteration(pipeline), clocks)
            self._estimates = {
                rank: some for rank, some in self._estimates.items() if rank.pipeline != number
            }
            self._dirty_pipelines[number] = None
            self._announce(
                EventType.PLAN_OFFERED,
                f"pipeline {number} is offered {clocks} as version {self._version} "
                f"from iteration {pipeline.offer.start_iteration}",
                pipeline=number,
                version=self._version,
                start_iteration=pipeline.offer.start_iteration,
                clocks=clocks,
                **(
                    {"iteration_time_s": clocks.plan.iteration_time_s, "energy_j": clocks.plan.energy_j}
                    if isinstance(clocks, PlannedClocks)
                    else {}
                ),
            )

    def _postpone(self, number: int) -> None:
        """Give a pipeline's offer a later start, for all ranks that do not have it in force."""
        pipeline = self._pipelines[number]
        pipeline.offer = replace(pipeline.offer, start_iteration=self._start_iteration(pipeline))
        self._dirty_pipelines[number] = None

    def _highest_iteration(self) -> int:
        return max((rank.iteration for rank in self._ranks.values() if rank.state in _LIVE), default=-1)

    def _start_iteration(self, pipeline: _Pipeline) -> int:
        margin = LEAST_MARGIN
        if self.log.iteration_time_s:
            margin = max(margin, 1 + math.ceil(TRANSIT_S / self.log.iteration_time_s))
        margin = min(MOST_MARGIN, margin << min(pipeline.late_count, 8))
        return self._highest_iteration() + margin

    def _settle(self) -> None:
        """Send offers to the connected ranks that need one, and note where a plan is in force everywhere."""
        by_pipeline: list[list[Rank]] = [[] for _ in self._pipelines]
        for rank in self._ranks.values():
            by_pipeline[rank.coordinates.pipeline].append(rank)
        for number, (pipeline, ranks) in enumerate(zip(self._pipelines, by_pipeline, strict=True)):
            needing = self._needing(pipeline, ranks)
            if needing and pipeline.offer.version == NO_VERSION:
                self._offer_anew([number], STOCK)  # Something unknown is in force: stock has to be said.
                needing = self._needing(pipeline, ranks)
            elif needing and pipeline.offer.start_iteration < self._start_iteration(pipeline):
                self._postpone(number)
                needing = self._needing(pipeline, ranks)
            for rank in needing:
                offer = pipeline.offer
                self._sent[rank.coordinates] = (offer.version, offer.start_iteration)
                self._change_rank(replace(rank, offered_version=offer.version), is_news=False)
                self._commands.append(SendOffer(rank.coordinates, rank.instance_id, offer))
            version = pipeline.offer.version
            if version != pipeline.announced_version and all(
                rank.in_force_version == version for rank in ranks
            ):
                pipeline.announced_version = version
                pipeline.late_count = 0
                self._announce(
                    EventType.PLAN_IN_FORCE,
                    f"version {version} ({pipeline.offer.clocks}) is in force on pipeline {number}",
                    pipeline=number,
                    version=version,
                    clocks=pipeline.offer.clocks,
                )

    def _needing(self, pipeline: _Pipeline, ranks: Sequence[Rank]) -> list[Rank]:
        offer = pipeline.offer
        return [
            rank
            for rank in ranks
            if rank.state is RankState.CONNECTED
            and rank.in_force_version != offer.version
            and self._sent.get(rank.coordinates) != (offer.version, offer.start_iteration)
        ]

    # ------------------------------------------------------------------ commands

    def _announce(self, kind: EventType, message: str, **attributes: object) -> None:
        self._sequence += 1
        texts = {name: str(value) for name, value in attributes.items()}
        self._commands.append(Announce(Happening(self._sequence, kind, message, texts)))

    def _store(self, record: object) -> None:
        self._commands.append(Store(record))  # type: ignore[arg-type]

    def _record(self) -> JobRecord:
        return JobRecord(
            policy=self.policy,
            state=self.state,
            version=self._version,
            baseline_time_s=self._baseline_time_s,
            is_profile_complete=self._is_profile_complete,
            stragglers=tuple(self._stragglers[pipeline] for pipeline in sorted(self._stragglers)),
        )

    def _take_commands(self) -> list[Command]:
        """Return what has gathered, records first, each once and as it is now."""
        records: list[Command] = [
            Store(self._record()) if isinstance(command.record, JobRecord) else command
            for command in self._commands
            if isinstance(command, Store)
        ]
        records.extend(
            Store(OfferRecord(number, self._pipelines[number].offer)) for number in self._dirty_pipelines
        )
        records.extend(Store(self._ranks[coordinates]) for coordinates in self._dirty_ranks)
        others = [command for command in self._commands if not isinstance(command, Store)]
        self._commands, self._dirty_ranks, self._dirty_pipelines = [], {}, {}
        return [*records, *others]


def _by_name(rank: Coordinates) -> dict[str, int]:
    return {"pipeline": rank.pipeline, "stage": rank.stage, "tensor": rank.tensor}
