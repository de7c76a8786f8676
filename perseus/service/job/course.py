"""A job's way through its states: where it stands, why, and where it goes next. Part of the state machine.

`states` has the picture. The course holds all parts of the machine and lets them work together; what comes
from outside is `machine`'s to take, what iterations show `iteration_judge`'s to say. Each state says what
clocks the pipelines should have in it.
"""

from collections.abc import Sequence

from perseus.service.domain.commands import FindProfile
from perseus.service.domain.errors import JobFinishedError
from perseus.service.domain.messages import NUMBERS
from perseus.service.domain.model import (
    NO_VERSION,
    Ceiling,
    Gpu,
    HoldClocks,
    JobState,
    PlannedClocks,
    Rank,
    RankState,
    StockClocks,
)
from perseus.service.domain.records import ForgetIterations, ProfiledWork, StoredJob
from perseus.service.domain.specification import JobSpec
from perseus.service.job.iterations.baseline import Baseline
from perseus.service.job.iterations.energy_meter import EnergyMeter
from perseus.service.job.iterations.iteration_log import IterationLog
from perseus.service.job.iterations.timeline_memory import TimelineMemory
from perseus.service.job.journal import Journal
from perseus.service.job.planning.caps import CapWatch
from perseus.service.job.planning.limiter import Limiter
from perseus.service.job.planning.offers import OfferBoard
from perseus.service.job.planning.planner import Planner
from perseus.service.job.profiling.profiler import Profiler
from perseus.service.job.profiling.work_keys import work_keys
from perseus.service.job.progress import Progress
from perseus.service.job.ranks.rank_table import RankTable
from perseus.service.job.ranks.usable_clocks import LEAST_CLOCKS, stages_at_stock
from perseus.service.job.rules import Rules
from perseus.service.job.states import NEEDS_ALL_RANKS, check_transition
from perseus.service.job.stragglers.straggler_book import StragglerBook
from perseus.solver import Frontier, Plan, Refinement, SolverError
from perseus.v1 import event_pb2


class Course:
    """The state of one run of a job, and its parts.

    Attributes:
        now_s: the time of the input that is being taken, on a clock that never goes back.
        wall_time_s: the same on the wall clock.
        schedule: the job's order of computations.
        state: where the job stands.
        state_reason: why it is there; one sentence.
        finish_time_s: when it finished, on the wall clock; None if it has not.
        is_profile_complete: whether what is measured is enough to plan on.
        journal: where all parts write down what they want done.
        ranks: who serves the job.
        offers: what clocks its pipelines should have.
        limiter: under which ceiling they are without a plan.
        log: its iterations and the report.
        meter: what it uses, for the ledger.
        timelines: the latest iteration of each pipeline.
        baseline: what an iteration takes at stock.
        profiler: what is measured of its stages.
        stragglers: which pipelines are slow.
        planner: the frontier and the plans on it.
        progress: whether the job gets on.
        caps: which GPUs are held below their clocks.
    """

    def __init__(self, spec: JobSpec, rules: Rules, create_time_s: float, created_s: float) -> None:
        """Begin where nothing is known.

        Args:
            spec: the job.
            rules: what the operator has set.
            create_time_s: when it was registered, on the wall clock.
            created_s: the same on the clock that never goes back.
        """
        self._spec = spec
        self.now_s, self.wall_time_s = created_s, create_time_s
        self.schedule = spec.check()
        self.state = JobState.WAITING
        self.state_reason = "some ranks have not joined yet"
        self.finish_time_s: float | None = None
        self.is_profile_complete = False
        counts = spec.parallelism
        self.journal = Journal(len(list(counts.all_coordinates())), create_time_s)
        self.log = IterationLog(list(counts.all_coordinates()))
        self.meter = EnergyMeter()
        self.timelines = TimelineMemory(counts)
        self.ranks = RankTable(spec, rules.lease_s, self.journal, created_s)
        self.offers = OfferBoard(counts, self.ranks, self.journal)
        self.limiter = Limiter(self.ranks, self.offers, self.journal)
        self.baseline = Baseline(rules.baseline_iterations)
        self.profiler = Profiler(counts, self.schedule, rules, self.journal)
        self.stragglers = StragglerBook(self.schedule, counts, self.journal)
        self.planner = Planner(
            counts,
            self.schedule,
            spec.policy,
            rules,
            self.ranks,
            self.offers,
            self.profiler,
            self.baseline,
            self.stragglers,
            self.journal,
        )
        self.progress = Progress(
            self.ranks,
            self.log,
            self.baseline,
            self.offers,
            self.profiler,
            rules.profile_iterations,
            self.journal,
            created_s,
            create_time_s,
        )
        # As many as make the guard's median.
        self.caps = CapWatch(rules.guard_iterations // 2 + 1)
        # What is measured is of this work on these GPUs; empty while nothing is.
        self._measured_work: tuple[str, ...] = ()
        # The state and the frontier for which the report and the detection know the offers.
        self._labelled: tuple[JobState, Frontier | None] | None = None

    def restore(self, stored: StoredJob, now_s: float, wall_time_s: float) -> None:
        """Take what is stored of a run, and ask again for what was asked for and is not stored."""
        version, stall = NO_VERSION, None
        if (record := stored.record) is not None:
            self.state, version, stall = record.state, record.version, record.stall
            self.state_reason, self.finish_time_s = record.state_reason, record.finish_time_s
            self.limiter.ceiling = record.ceiling
            self.planner.policy, self.planner.lag_s = record.policy, record.lag_s
            self.planner.latency.planned_s = record.set_latency_s
            self.planner.pace_s, self.planner.pacing = record.pace_s, record.pacing
            self.baseline.iteration = record.baseline
            self.is_profile_complete = record.is_profile_complete
            self.stragglers.restore(record.stragglers)
            self.planner.watch.broken_count = record.broken_promise_count
            self.profiler.spending.cost, self.profiler.given_up = (
                record.profiling_cost,
                record.given_up_clocks,
            )
        self.ranks.restore(stored.ranks, now_s)
        if any(rank.capped_clock_mhz for rank in stored.ranks):
            self.caps.hold(now_s)
        self.offers.restore(version, stored.offers, is_urgent=self.limiter.ceiling is not None)
        self.profiler.profiles = stored.profiles
        self.now_s, self.wall_time_s = now_s, wall_time_s
        self.progress.restore(self.state, stall, now_s)
        self.journal.sequence, self.journal.wall_time_s = stored.last_sequence, wall_time_s
        self.log.restore(stored.periods)
        self.meter.restore(stored.latest_hour)
        self.log.mark_straggler(-1, bool(self.stragglers))
        if self.state not in (JobState.PROFILING, JobState.PLANNED):
            self.limiter.offer_stock()  # a run that was put aside had other clocks
        if self.baseline.time_s:
            self._measured_work = self._work_keys()
        self._label_versions()
        for rows in stored.open_rows:
            # They complete nothing, or it would have been stored as complete: the time is of no matter.
            self.log.add(rows.rank, rows.rows, stored.create_time_s)
        if self.is_profile_complete and self.state not in (JobState.STOCK, JobState.FINISHED):
            self.solve()
        if self.state is JobState.PROFILING:
            self._find_profile()
            if self.limiter.ceiling is not None and self.held_clocks() is None:
                self._profile(held=None)  # what was put off is not stored

    def begin(self, now_s: float, wall_time_s: float) -> None:
        """An input is taken at this time."""
        self.now_s, self.wall_time_s = now_s, wall_time_s
        self.journal.begin(now_s, wall_time_s)

    def settle(self) -> None:
        """An input was taken: move the state as far as what is known allows, and offer what follows."""
        self.progress.check(self.now_s, self.wall_time_s)
        self._advance()
        self.offers.settle()
        self._label_versions()

    # ------------------------------------------------------------------ rank

    def lose(self, ranks: Sequence[Rank], why: str) -> None:
        """Lose ranks. The job can't go on without them, and may come back at another iteration."""
        for rank in ranks:
            self.offers.forget_sent(rank.coordinates)
            self.ranks.lose(rank.coordinates, why, self.now_s)
        if ranks:
            places = [rank.coordinates for rank in ranks]
            self.planner.latency.forget(places)
            self.caps.forget(places)
            self.log.restart()
            self.stragglers.restart()
            self.journal.store(ForgetIterations())
            if self.state in NEEDS_ALL_RANKS:
                self.enter(JobState.WAITING, f"{ranks[0].coordinates} is lost: {why}")

    def plan_without(self, why: str) -> None:
        """Settle on what can be: there are clocks that are no longer to be had."""
        if len(stages_at_stock(self.ranks.usable_clocks_mhz())) == self._spec.parallelism.stage_count:
            self.fall_back(f"no stage can have other clocks than stock: {why}")
        elif self.state is JobState.PROFILING:
            self.enter(JobState.PROFILING, why)
        else:
            self.planner.drop_frontier()
            self.enter(JobState.SOLVING, why)

    def profile_more(self, why: str) -> None:
        """There may be more clocks to plan on than were measured."""
        self.planner.drop_frontier()
        self.is_profile_complete = False
        if self.state in (JobState.PROFILING, JobState.SOLVING, JobState.PLANNED):
            self.enter(JobState.PROFILING, why)

    def forget_measured(self) -> None:
        """What was measured is of other work, or on other GPUs."""
        self.planner.drop_frontier()
        self.planner.lag_s = 0.0
        self.is_profile_complete = False
        self.profiler.forget()
        self.baseline.forget()
        self.caps.restart()
        self.ranks.lift_caps()

    def check_work(self, why: str) -> None:
        """Measure anew if GPUs are others than those that were measured, or under other limits.

        No promise holds then. While ranks are missing nothing is done: it is looked at once all are there.
        """
        if self.state in (JobState.WAITING, JobState.FINISHED):
            return
        work = self._work_keys()
        if work == self._measured_work:
            return
        self._measured_work = work
        self.forget_measured()
        self.planner.watch.forgive()
        if self.state in NEEDS_ALL_RANKS and self.state is not JobState.BASELINE:
            self.enter(JobState.BASELINE, f"{why}: it is measured anew")

    def measure_again(self, why: str) -> None:
        """GPUs reach other clocks than before: what stock takes, and what can be planned on, is another."""
        self.planner.drop_frontier()
        self.is_profile_complete = False
        self.baseline.forget()
        self.enter(JobState.BASELINE, why)

    def check_running(self) -> None:
        """Refuse what makes no sense once the job has ended.

        Raises:
            JobFinishedError: it has.
        """
        if self.state is JobState.FINISHED:
            raise JobFinishedError(job_id=self._spec.job_id)

    # ------------------------------------------------------------------ clocks

    def held_clocks(self) -> HoldClocks | None:
        """Return the clocks that all pipelines are to hold, if they are to."""
        clocks = self.offers[0].clocks
        return clocks if isinstance(clocks, HoldClocks) else None

    def _label_versions(self) -> None:
        """Let the report know for what state clocks were offered, and the detection what plans promise.

        Only of what has changed: the offers of some pipelines; or, for all, the state or the frontier.
        """
        if self.state is JobState.WAITING:
            return
        basis = self.state, self.planner.frontier
        changed = self.offers.take_changed()
        if basis != self._labelled:
            self._labelled, changed = basis, range(len(self.offers))
        if not changed:
            return
        for pipeline in changed:
            self.log.label(pipeline, self.offers[pipeline], self.state)
        self.planner.tell_expectations(changed)

    # ------------------------------------------------------------------ states

    def _advance(self) -> None:
        """Move the state as far as what is known allows."""
        if self.state is not JobState.FINISHED and self.ranks.are_all(RankState.FINISHED):
            self.enter(JobState.FINISHED, "all ranks are done")
        if self.state is JobState.WAITING and self.ranks.are_all(RankState.CONNECTED):
            why = "all ranks are there"
            work, self._measured_work = self._measured_work, self._work_keys()
            if work not in ((), self._measured_work) and (self.baseline.time_s or self.profiler.profiles):
                self.forget_measured()
                why = f"{why}, on GPUs of another model or power limit: they are measured anew"
            self.enter(self._state_with_all_ranks(), why)
        if self.state is JobState.BASELINE and self.baseline.time_s:
            why = f"the stock iteration takes {self.baseline.time_s:.6f} s"
            self.enter(self._state_with_all_ranks(), why)
        if self.state is JobState.PROFILING:
            if self.progress.is_silent:
                self._release_clocks()
            elif self.limiter.put_off is None:
                self._profile(self.held_clocks())
        if self.state is JobState.SOLVING and self.planner.frontier is not None:
            self.enter(JobState.PLANNED, "the frontier is solved")

    def _state_with_all_ranks(self) -> JobState:
        if not self.baseline.time_s:
            return JobState.BASELINE
        if not self.is_profile_complete:
            return JobState.PROFILING
        return JobState.SOLVING if self.planner.frontier is None else JobState.PLANNED

    def enter(self, state: JobState, why: str) -> None:
        """Enter a state, and say what clocks the pipelines should have in it."""
        check_transition(self.state, state)
        before, self.state, self.state_reason = self.state, state, why
        if before is JobState.BASELINE and self.baseline.iteration is not None:
            self.timelines.keep_baseline()
        if state is JobState.FINISHED:
            self.finish_time_s = self.wall_time_s
            self.planner.stop_solving()
            self.timelines.end()
        self.journal.announce(
            event_pb2.JOB_EVENT_TYPE_STATE_CHANGED,
            f"{before.value} → {state.value}: {why}",
            event_pb2.StateChanged(before=NUMBERS[before], after=NUMBERS[state], reason=why),
        )
        self.limiter.put_off = None
        self.baseline.restart()
        self.planner.watch.restart()
        self.progress.enter(state, self.now_s)
        match state:
            case JobState.PROFILING:
                self._find_profile()
                self._profile(held=None)
            case JobState.BASELINE:
                if self._spec.stage_work and all(self._spec.stage_work):
                    self._find_profile()  # the very same work: the baseline is enough to hold it against
                self.limiter.offer_stock()
                self._tell_what_waits()
            case JobState.PLANNED:
                self.retarget()
            case JobState.SOLVING:
                self.limiter.offer_stock()
                self.solve()
            case _:
                self.limiter.offer_stock()

    def fall_back(self, why: str) -> None:
        """Go to stock, and stay there."""
        if self.state not in (JobState.STOCK, JobState.FINISHED):
            self.enter(JobState.STOCK, why)

    def _profile(self, held: HoldClocks | None) -> None:
        """Hold clocks round by round, until what is measured is enough."""
        clocks_mhz = self.ranks.usable_clocks_mhz()
        if not any(clocks_mhz):
            self.fall_back("the GPUs have no clock in common")
            return
        following = self.profiler.next_round(held, clocks_mhz)
        if isinstance(following, HoldClocks):
            if following is not held:
                self._hold(following)
        elif following.is_enough:
            self.is_profile_complete = True
            for stage, key in enumerate(self._work_keys()):
                self.journal.store(ProfiledWork(stage, key))
            self.enter(JobState.SOLVING, following.why)
        else:
            self.fall_back(following.why)

    def _find_profile(self) -> None:
        """Ask for what is known from before, as long as it can be held against the first measurements."""
        if self.profiler.clock_count < LEAST_CLOCKS and not self.profiler.known:
            self.journal.do(FindProfile(self._work_keys()))

    def _work_keys(self) -> tuple[str, ...]:
        gpus: list[list[Gpu]] = [[] for _ in range(self._spec.parallelism.stage_count)]
        for rank in self.ranks:
            if rank.gpu is not None:
                gpus[rank.coordinates.stage].append(rank.gpu)
        return work_keys(self._spec, self.schedule, gpus)

    def _release_clocks(self) -> None:
        """Hold nothing while nobody knows what the clocks cost; the round begins anew once that is known."""
        if self.held_clocks() is not None:
            self.profiler.spending.take_silence(self.progress.silence_s(self.now_s), self.baseline.time_s)
            self.limiter.offer_stock()

    # ------------------------------------------------------------------ ceiling

    def limit(self, ceiling: Ceiling | None) -> None:
        """Let no clock be above a ceiling where nothing is planned, or (None) any again: at once."""
        was_waiting = self.limiter.why_waiting(self.state) is not None
        if not self.limiter.order(ceiling) or self.state is JobState.PLANNED:
            return
        held = self.limiter.put_off or self.held_clocks()
        if held is not None:
            self._hold(held)
        else:
            self.limiter.offer_stock(is_urgent=True)
            self.baseline.restart()
            self._tell_what_waits()
        if was_waiting and self.limiter.why_waiting(self.state) is None:
            self.state_reason = "the ceiling no longer holds it up"

    def _hold(self, round_: HoldClocks) -> None:
        self.limiter.hold(round_)
        self._tell_what_waits()

    def _tell_what_waits(self) -> None:
        """Say in the state's reason what waits for the end of the ceiling."""
        self.state_reason = self.limiter.why_waiting(self.state) or self.state_reason

    # ------------------------------------------------------------------ solving

    def solve(self) -> None:
        """Ask for a frontier of what is measured; where there can be none, go to stock."""
        try:
            self.planner.solve()
        except SolverError as error:
            self._give_up_solving(str(error))

    def take_frontier(self, frontier: Frontier) -> None:
        """Take the frontier that was asked for."""
        if self._has_use_for_answer():
            self.planner.take_frontier(frontier)
            self.retarget()

    def take_plan(self, refinement: Refinement, plan: Plan) -> None:
        """Take the plan that was asked for; it is offered where it pays, and the next one asked for."""
        if self.planner.take_plan(refinement, plan):
            self.retarget()

    def do_without_plan(self, refinement: Refinement, cause: str) -> None:
        """Take note that there will be no such plan."""
        if self.planner.do_without_plan(refinement, cause):
            self.retarget()

    def take_failure(self, cause: str) -> None:
        """Take note that there will be no frontier."""
        if self._has_use_for_answer():
            self._give_up_solving(cause)

    def do_without_lag(self, found: event_pb2.MeasurementsUnexplained) -> None:
        """No lag explains the slow plan: the same plan would be as slow again, so there is none."""
        if self._has_use_for_answer():
            self.planner.announce_unexplained(found)
            self.fall_back("the model does not explain why the plan is slow")

    def _has_use_for_answer(self) -> bool:
        """Take note that there is an answer; one that is of no use any more may have to be asked for anew."""
        is_of_use = self.planner.end_solving()
        if not is_of_use and self.state is JobState.SOLVING:
            self.solve()
        return is_of_use and self.state not in (JobState.STOCK, JobState.FINISHED)

    def _give_up_solving(self, cause: str) -> None:
        self.journal.announce(
            event_pb2.JOB_EVENT_TYPE_SOLVE_FAILED, f"no frontier: {cause}", event_pb2.SolveFailed(cause=cause)
        )
        self.fall_back(f"no frontier: {cause}")

    # ------------------------------------------------------------------ plans

    def after_straggler_change(self) -> None:
        """Other pipelines are slow than before, or by other factors."""
        self.log.mark_straggler(self.ranks.highest_iteration() + 1, bool(self.stragglers))
        self.retarget()

    def retarget(self, *, is_urgent: bool = False) -> None:
        """Where plans are in force, let them be those for what is wanted, and waited for, now.

        `is_urgent`: at once.
        """
        if self.state is JobState.PLANNED:
            self.planner.retarget(is_urgent=is_urgent)

    # ------------------------------------------------------------------ checks

    def validate(self) -> None:
        """Check what must always hold between two inputs."""
        self.ranks.validate()
        self.offers.validate()
        self.log.validate()
        planner, clocks = self.planner, [offer.clocks for offer in self.offers]
        match self.state:
            case JobState.PROFILING:
                assert len(set(clocks)) == 1
                is_at_stock = self.progress.is_silent or self.limiter.put_off is not None
                assert isinstance(clocks[0], StockClocks if is_at_stock else HoldClocks)
                assert not self.is_profile_complete
            case JobState.PLANNED:
                assert all(isinstance(some, PlannedClocks) for some in clocks)
                assert planner.frontier is not None or planner.is_solving
            case _:
                assert all(isinstance(some, StockClocks) for some in clocks)
        self.limiter.validate(self.state, clocks)
        if self.state in NEEDS_ALL_RANKS:
            assert not any(rank.state in (RankState.EXPECTED, RankState.LOST) for rank in self.ranks)
        if self.state is JobState.WAITING:
            assert not self.ranks.are_all(RankState.CONNECTED)
        if self.state is JobState.SOLVING:
            assert planner.is_solving
        if self.state is JobState.BASELINE:
            assert not self.baseline.time_s
        if self.is_profile_complete:
            assert self.profiler.clock_count >= LEAST_CLOCKS
        if planner.frontier is not None or (planner.is_solving and not planner.is_in_vain):
            assert self.is_profile_complete
        planner.validate()
        self.progress.validate()
        self.stragglers.validate()
