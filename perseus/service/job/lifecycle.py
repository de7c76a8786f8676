"""Moves a job through its states. Part of the state machine.

`states` has the picture. `Lifecycle` holds all parts of the machine and makes them work together; `machine`
takes the inputs, and `iteration_judge` evaluates iterations. Each state determines the pipelines' desired
clocks.
"""

from collections.abc import Iterable, Sequence

from perseus.service.domain.commands import FindProfile
from perseus.service.domain.errors import JobFinishedError
from perseus.service.domain.messages import NUMBERS
from perseus.service.domain.model import (
    HoldClocks,
    JobState,
    MaxClock,
    PlannedClocks,
    Rank,
    RankState,
    StockClocks,
)
from perseus.service.domain.records import ForgetIterations, IterationRows, ProfiledWork
from perseus.service.domain.stall import RETRIED, StockReason
from perseus.service.job.profiling.work_keys import WorkKeys
from perseus.service.job.ranks.usable_clocks import MIN_CLOCKS, stages_at_stock
from perseus.service.job.retry_delay import RetryDelay
from perseus.service.job.run import Run
from perseus.service.job.states import NEEDS_ALL_RANKS, check_transition
from perseus.solver import Frontier, Plan, Refinement, SolverError
from perseus.v1 import event_pb2


class Lifecycle:
    """Moves a run through its states."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._record = run.record
        self._keys = WorkKeys(run.spec, run.schedule)
        # The work keys that the measurements belong to; empty while there are none.
        self._measured_work: tuple[str, ...] = ()
        # The state and the frontier for which the report and the straggler detection know the offers.
        self._labelled: tuple[JobState, Frontier | None] | None = None
        # Whether a slow plan was not explained by measurements that were made anew for that reason.
        self._has_measured_anew = False
        self._retry_delay = RetryDelay()

    def resume_restored(self, open_rows: Iterable[IterationRows]) -> None:
        """Continue a restored run: repeat the requests whose answers are not stored."""
        run, state = self._run, self._record.state
        if state not in (JobState.PROFILING, JobState.PLANNED):
            run.max_clock_enforcer.offer_stock()  # a quarantined run had other clocks
        if state is JobState.STOCK and self._record.stock_reason in RETRIED:
            self._delay_retry()
        if run.baseline.time_s:
            self._measured_work = self._work_keys()
        self._label_versions()
        for rows in open_rows:
            # They complete no iteration, or it would have been stored as complete: the time does not matter.
            run.log.add(rows.rank, rows.rows, run.create_time_s, run.ranks.plausible_through)
        if self._record.is_profile_complete and state not in (JobState.STOCK, JobState.FINISHED):
            self.solve()
        if self._record.state is JobState.PROFILING:
            self._find_profile()
            if run.max_clock_enforcer.max_clock is not None and self.held_clocks() is None:
                self._profile(held=None)  # a deferred round is not stored

    def reconcile(self) -> None:
        """Move the state as far as possible after an input, and offer the desired clocks."""
        run = self._run
        run.progress.check(run.now_s, run.wall_time_s)
        self._advance()
        run.offers.reconcile()
        self._label_versions()

    # ------------------------------------------------------------------ rank

    def lose(self, ranks: Sequence[Rank], why: str) -> None:
        """Lose ranks. The job can't continue without them, and may return at another iteration."""
        run = self._run
        for rank in ranks:
            run.offers.forget_sent(rank.coordinates)
            run.ranks.lose(rank.coordinates, why, run.now_s)
        if ranks:
            places = [rank.coordinates for rank in ranks]
            run.planner.latency.forget(places)
            run.caps.forget(places)
            run.log.restart()
            run.stragglers.restart()
            run.buffer.store(ForgetIterations())
            if self._record.state in NEEDS_ALL_RANKS:
                self.enter(JobState.WAITING, f"{ranks[0].coordinates} is lost: {why}")

    def plan_without(self, why: str) -> None:
        """Plan or profile again, as some clocks are no longer available."""
        run = self._run
        if len(stages_at_stock(run.ranks.usable_clocks_mhz())) == run.spec.parallelism.stage_count:
            self.fall_back(StockReason.NO_CLOCKS, f"every stage has to stay at stock: {why}")
        elif self._record.state is JobState.PROFILING:
            self.enter(JobState.PROFILING, why)
        else:
            run.planner.drop_frontier()
            self.enter(JobState.SOLVING, why)

    def profile_more(self, why: str) -> None:
        """Profile again, as more clocks may be available than were measured."""
        self._run.planner.drop_frontier()
        self._record.is_profile_complete = False
        if self._record.state in (JobState.PROFILING, JobState.SOLVING, JobState.PLANNED):
            self.enter(JobState.PROFILING, why)

    def forget_measured(self) -> None:
        """Discard all measurements: they belong to other work, or to other GPUs."""
        run = self._run
        run.planner.drop_frontier()
        self._record.lag_s = self._record.overhead_s = 0.0
        self._record.is_profile_complete = False
        run.profiler.forget()
        run.baseline.forget()
        run.counted_work.forget()
        run.variations.forget()
        run.caps.restart()
        run.ranks.lift_caps()

    def check_work(self, why: str) -> None:
        """Measure anew if the GPUs, or their limits, differ from those of the measurements.

        Earlier prediction violations no longer count then. While ranks are missing, the check is postponed
        until all are connected.
        """
        if self._record.state in (JobState.WAITING, JobState.FINISHED):
            return
        work = self._work_keys()
        if work == self._measured_work:
            return
        self._measured_work = work
        self.forget_measured()
        self._run.planner.watch.forgive()
        if self._record.state in NEEDS_ALL_RANKS and self._record.state is not JobState.BASELINE:
            self.enter(JobState.BASELINE, f"{why}: it is measured anew")

    def measure_again(self, why: str) -> None:
        """Measure stock and plan again, as the GPUs reach other clocks than before."""
        run = self._run
        run.planner.drop_frontier()
        self._record.is_profile_complete = False
        run.baseline.forget()
        self.enter(JobState.BASELINE, why)

    def check_running(self) -> None:
        """Refuse a request that makes no sense once the job has ended.

        Raises:
            JobFinishedError: it has.
        """
        if self._record.state is JobState.FINISHED:
            raise JobFinishedError(job_id=self._run.spec.job_id)

    # ------------------------------------------------------------------ clocks

    def held_clocks(self) -> HoldClocks | None:
        """Return the clocks that all pipelines are to hold, if any."""
        clocks = self._run.offers[0].clocks
        return clocks if isinstance(clocks, HoldClocks) else None

    def _label_versions(self) -> None:
        """Pass the states of offers to the report, and the predictions of plans to the straggler detection.

        Only for offers that have changed; or for all, if the state or the frontier has.
        """
        run = self._run
        if self._record.state is JobState.WAITING:
            return
        basis = self._record.state, run.planner.frontier
        changed = run.offers.take_changed()
        if basis != self._labelled:
            self._labelled, changed = basis, range(len(run.offers))
        if not changed:
            return
        for pipeline in changed:
            run.log.label(pipeline, run.offers[pipeline], self._record.state)
        run.planner.update_expectations(changed)

    # ------------------------------------------------------------------ states

    def _advance(self) -> None:
        """Move the state as far as possible."""
        run = self._run
        if self._record.state is not JobState.FINISHED and run.ranks.are_all(RankState.FINISHED):
            self.enter(JobState.FINISHED, "all ranks are done")
        if self._record.state is JobState.WAITING and run.ranks.are_all(RankState.CONNECTED):
            why = "all ranks are connected"
            work, self._measured_work = self._measured_work, self._work_keys()
            if work not in ((), self._measured_work) and (run.baseline.time_s or run.profiler.profiles):
                self.forget_measured()
                why = f"{why}, on GPUs of another model or power limit, which are measured anew"
            self.enter(self._state_with_all_ranks(), why)
        if self._record.state is JobState.BASELINE and run.baseline.time_s:
            why = f"the stock iteration takes {run.baseline.time_s:.6f} s"
            self.enter(self._state_with_all_ranks(), why)
        if self._record.state is JobState.PROFILING:
            if run.progress.is_silent:
                self._release_clocks()
            elif run.max_clock_enforcer.deferred_round is None:
                self._profile(self.held_clocks())
        if self._record.state is JobState.SOLVING and run.planner.frontier is not None:
            self.enter(JobState.PLANNED, "the frontier is solved")

    def _state_with_all_ranks(self) -> JobState:
        run = self._run
        if not run.baseline.time_s:
            return JobState.BASELINE
        if not self._record.is_profile_complete:
            return JobState.PROFILING
        return JobState.SOLVING if run.planner.frontier is None else JobState.PLANNED

    def enter(self, state: JobState, why: str) -> None:
        """Enter a state, and set the pipelines' desired clocks for it."""
        run = self._run
        check_transition(self._record.state, state)
        before, self._record.state, self._record.state_reason = self._record.state, state, why
        self._record.stock_reason = None
        if before is JobState.BASELINE and run.baseline.iteration is not None:
            run.timelines.keep_baseline()
        if state is JobState.FINISHED:
            self._record.finish_time_s = run.wall_time_s
            run.planner.stop_solving()
            run.timelines.end()
            run.variations.forget()
        run.buffer.announce(
            event_pb2.JOB_EVENT_TYPE_STATE_CHANGED,
            f"{before.value} → {state.value}: {why}",
            event_pb2.StateChanged(before=NUMBERS[before], after=NUMBERS[state], reason=why),
        )
        run.max_clock_enforcer.deferred_round = None
        run.baseline.restart()
        run.planner.watch.restart()
        run.stock_blocks.restart()
        run.progress.enter(before, run.now_s)
        match state:
            case JobState.PROFILING:
                self._find_profile()
                self._profile(held=None)
            case JobState.BASELINE:
                if run.spec.stage_work and all(run.spec.stage_work):
                    self._find_profile()  # identical work: comparing it with the baseline is enough
                run.max_clock_enforcer.offer_stock()
                self._announce_waiting()
            case JobState.PLANNED:
                self.retarget()
            case JobState.SOLVING:
                run.max_clock_enforcer.offer_stock()
                self.solve()
            case _:
                run.max_clock_enforcer.offer_stock()

    def fall_back(self, reason: StockReason, why: str) -> None:
        """Go to stock, and stay there; for some reasons, until it is time to try again."""
        if self._record.state not in (JobState.STOCK, JobState.FINISHED):
            if reason in RETRIED:
                self._record.fall_back_count += 1
                self._record.fall_back_time_s = self._run.wall_time_s
                why = f"{why}; it is tried again after {self._delay_retry() / 60:.0f} min at stock"
            self.enter(JobState.STOCK, why)
            self._record.stock_reason = reason

    def _delay_retry(self) -> float:
        run = self._run
        self._retry_delay.failure_count = max(0, self._record.fall_back_count - 1)
        passed_s = max(0.0, run.wall_time_s - self._record.fall_back_time_s)
        return self._retry_delay.begin(run.now_s - passed_s)

    def retry_when_due(self) -> None:
        """Try again, if the job has been at stock for long enough after a disturbance.

        The second time, the profile is measured again: the disturbance may have been there before.
        """
        if self._retry_delay.is_over(self._run.now_s) and self._record.stock_reason in RETRIED:
            if self._record.fall_back_count == 2:
                self.forget_measured()
            self.leave_stock("it is tried again: what disturbed it may have passed")

    def leave_stock(self, why: str) -> None:
        """Begin again at the baseline; measurements that still fit are kept."""
        run = self._run
        self._has_measured_anew = False
        run.planner.drop_frontier()
        run.planner.watch.forgive()
        run.baseline.forget()
        self.enter(JobState.BASELINE if run.ranks.are_all(RankState.CONNECTED) else JobState.WAITING, why)

    def _profile(self, held: HoldClocks | None) -> None:
        """Hold clocks round by round, until the measurements suffice."""
        run = self._run
        clocks_mhz = run.ranks.usable_clocks_mhz()
        if not any(clocks_mhz):
            self.fall_back(StockReason.NO_COMMON_CLOCK, "the GPUs have no clock in common")
            return
        following = run.profiler.next_round(held, clocks_mhz)
        if isinstance(following, HoldClocks):
            if following is not held:
                self._hold(following)
        elif following.is_enough:
            self._record.is_profile_complete = True
            for stage, key in enumerate(self._work_keys()):
                run.buffer.store(ProfiledWork(stage, key))
            self.enter(JobState.SOLVING, following.why)
        else:
            self.fall_back(StockReason.PROFILED_TOO_LITTLE, following.why)

    def _find_profile(self) -> None:
        """Request earlier profiles, as long as they can be compared with the first measurements."""
        run = self._run
        if run.profiler.clock_count < MIN_CLOCKS and not run.profiler.known:
            run.buffer.do(FindProfile(self._work_keys()))

    def _work_keys(self) -> tuple[str, ...]:
        return self._keys.of(self._run.ranks.gpu_kinds())

    def _release_clocks(self) -> None:
        """Hold no clocks while their cost is unknown; the round begins anew once it is known."""
        run = self._run
        if self.held_clocks() is not None:
            run.profiler.budget_tracker.take_silence(run.progress.silence_s(run.now_s), run.baseline.time_s)
            run.max_clock_enforcer.offer_stock()

    # ------------------------------------------------------------------ maximum clock

    def limit(self, max_clock: MaxClock | None) -> None:
        """Set the maximum clock where no plan is in force, or (None) lift it, at once."""
        run = self._run
        was_waiting = run.max_clock_enforcer.why_waiting(self._record.state) is not None
        if not run.max_clock_enforcer.order(max_clock):
            return
        if self._record.state is JobState.PLANNED:
            self.retarget()  # no block at stock beside the plans
            return
        held = run.max_clock_enforcer.deferred_round or self.held_clocks()
        if held is not None:
            self._hold(held)
        else:
            run.max_clock_enforcer.offer_stock(is_urgent=True)
            run.baseline.restart()
            self._announce_waiting()
        if was_waiting and run.max_clock_enforcer.why_waiting(self._record.state) is None:
            self._record.state_reason = "the maximum clock no longer delays it"

    def _hold(self, round_: HoldClocks) -> None:
        self._run.max_clock_enforcer.hold(round_)
        self._announce_waiting()

    def _announce_waiting(self) -> None:
        """Mention in the state's reason what waits until the maximum clock is lifted."""
        self._record.state_reason = (
            self._run.max_clock_enforcer.why_waiting(self._record.state) or self._record.state_reason
        )

    # ------------------------------------------------------------------ solving

    def solve(self) -> None:
        """Request a frontier for the measurements; if there can be none, go to stock."""
        try:
            self._run.planner.solve()
        except SolverError as error:
            self._give_up_solving(str(error))

    def take_frontier(self, frontier: Frontier) -> None:
        """Take the requested frontier."""
        if self._has_use_for_answer():
            self._run.planner.take_frontier(frontier)
            if (why := self._run.planner.why_too_noisy) is not None:
                self.fall_back(StockReason.NOISY, why)
            self.retarget()

    def take_plan(self, refinement: Refinement, plan: Plan) -> None:
        """Take the requested plan, offer it if it saves enough, and request the next one."""
        if self._run.planner.take_plan(refinement, plan):
            self.retarget()

    def do_without_plan(self, refinement: Refinement, cause: str) -> None:
        """Continue without an exact plan that could not be made."""
        if self._run.planner.do_without_plan(refinement, cause):
            self.retarget()

    def take_failure(self, cause: str) -> None:
        """Take the failure to solve for a frontier."""
        if self._has_use_for_answer():
            self._give_up_solving(cause)

    def do_without_lag(self, found: event_pb2.MeasurementsUnexplained) -> None:
        """Measure anew, the first time: no lag explains the slow plan, and solving would give the same one.

        A disturbance of a few seconds, while clocks were measured, is enough for such a plan. If the next one
        is not explained either, go to stock.
        """
        if not self._has_use_for_answer():
            return
        self._run.planner.announce_unexplained(found)
        why = "the model does not explain why the plan is slow"
        if self._has_measured_anew:
            self.fall_back(StockReason.UNEXPLAINED, why)
            return
        self._has_measured_anew = True
        self.forget_measured()
        self._run.planner.watch.forgive()
        self.enter(JobState.BASELINE, f"{why}: it is measured anew, in case something disturbed that")

    def _has_use_for_answer(self) -> bool:
        """Record that an answer has arrived, and solve again if it is obsolete but still needed."""
        is_of_use = self._run.planner.end_solving()
        if not is_of_use and self._record.state is JobState.SOLVING:
            self.solve()
        return is_of_use and self._record.state not in (JobState.STOCK, JobState.FINISHED)

    def _give_up_solving(self, cause: str) -> None:
        self._run.buffer.announce(
            event_pb2.JOB_EVENT_TYPE_SOLVE_FAILED, f"no frontier: {cause}", event_pb2.SolveFailed(cause=cause)
        )
        self.fall_back(StockReason.NO_FRONTIER, f"no frontier: {cause}")

    # ------------------------------------------------------------------ plans

    def after_straggler_change(self) -> None:
        """Update the report and the plans after stragglers or their factors have changed."""
        run = self._run
        run.log.mark_straggler(run.ranks.highest_iteration() + 1, bool(run.stragglers))
        self.retarget()

    def retarget(self, *, is_urgent: bool = False) -> None:
        """If plans are in force, set those for the current targets and stragglers.

        `is_urgent`: offer them as urgent.
        """
        if self._record.state is JobState.PLANNED:
            self._run.stock_blocks.restart()
            self._run.planner.retarget(is_urgent=is_urgent)

    # ------------------------------------------------------------------ checks

    def validate(self) -> None:
        """Check the invariants that hold between two inputs."""
        run = self._run
        run.ranks.validate()
        run.offers.validate()
        run.log.validate()
        planner, clocks = run.planner, [offer.clocks for offer in run.offers]
        match self._record.state:
            case JobState.PROFILING:
                assert len(set(clocks)) == 1
                is_at_stock = run.progress.is_silent or run.max_clock_enforcer.deferred_round is not None
                assert isinstance(clocks[0], StockClocks if is_at_stock else HoldClocks)
                assert not self._record.is_profile_complete
            case JobState.PLANNED:
                kinds = {type(some) for some in clocks}
                assert kinds == {StockClocks if run.offers.is_beside_plans else PlannedClocks} or (
                    kinds == {StockClocks} and planner.is_solving  # restarted in a block at stock
                )
                assert planner.frontier is not None or planner.is_solving
            case _:
                assert all(isinstance(some, StockClocks) for some in clocks)
        run.max_clock_enforcer.validate(self._record.state, clocks)
        if self._record.state in NEEDS_ALL_RANKS:
            assert not any(rank.state in (RankState.EXPECTED, RankState.LOST) for rank in run.ranks)
        if self._record.state is JobState.WAITING:
            assert not run.ranks.are_all(RankState.CONNECTED)
        if self._record.state is JobState.SOLVING:
            assert planner.is_solving
        if self._record.state is JobState.BASELINE:
            assert not run.baseline.time_s
        if self._record.is_profile_complete:
            assert run.profiler.clock_count >= MIN_CLOCKS
        if planner.frontier is not None or (planner.is_solving and not planner.is_in_vain):
            assert self._record.is_profile_complete
        planner.validate()
        run.progress.validate()
        run.stragglers.validate()
