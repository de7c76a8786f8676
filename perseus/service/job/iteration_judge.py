"""Judges iterations of the whole job, and acts on the result. Part of the state machine.

It determines the stragglers, whether predictions hold, the clocks that GPUs do not reach, and whether the
work is still the measured one. `MaxClockEnforcer` decides which iterations are comparable.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import astuple

from perseus.service.domain.commands import ReportIteration
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.measured import JobIteration
from perseus.service.domain.messages import coordinates_to_proto
from perseus.service.domain.model import HoldClocks, JobState, RankState
from perseus.service.domain.pairs import NO_PAIRS, Pair
from perseus.service.domain.records import IterationRows
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.stall import StockReason
from perseus.service.domain.telemetry import ForeignClock, IterationColumns, TelemetryBatch
from perseus.service.job.lifecycle import Lifecycle
from perseus.service.job.planning.caps import Cap
from perseus.service.job.planning.drift import changed_work
from perseus.service.job.planning.plan_watch import MAX_SUSPECTED
from perseus.service.job.planning.stock_blocks import BlockStep
from perseus.service.job.ranks.rank_table import AHEAD_LIMIT
from perseus.service.job.run import Run
from perseus.service.job.stragglers.registry import NOTHING_JUDGED
from perseus.v1 import event_pb2

_UNHEARD_COUNT = 10_000
"""Iterations that all ranks may be ahead of their reports, which come late after a pause."""

_FASTER = 2.0
"""Iterations may get this much faster at once."""


class IterationJudge:
    """Takes the iterations that ranks report."""

    def __init__(self, run: Run, lifecycle: Lifecycle) -> None:
        self._run = run
        self._lifecycle = lifecycle
        # When the latest iteration of the whole job was complete.
        self._complete_s = run.now_s
        # The pipelines whose capped clocks are tried again, until the baseline for that is measured.
        self._retried: set[int] = set()

    def check_far(self, batch: TelemetryBatch) -> TelemetryBatch:
        """Check a rank's batch with iterations where it can't be beside the others' reports.

        These may be late, so the batch is refused only if the others can't have come so far either. Return
        the rows that fit without closing an iteration that the others have yet to report.

        Raises:
            InvalidFieldError: it is refused.
        """
        run = self._run
        plausible, last_placed = (
            run.ranks.plausible_iteration(),
            run.log.last_placed(batch.iterations.iteration),
        )
        if plausible >= 0:
            self._check_possible(batch.iterations, plausible)
        return batch if last_placed is None else batch.until(max(plausible, last_placed))

    def _check_possible(self, rows: IterationColumns, plausible: int) -> None:
        run = self._run
        shortest_s = min(*rows.duration_s, run.log.iteration_time_s or math.inf)
        possible = plausible + _UNHEARD_COUNT + int(_FASTER * (run.now_s - self._complete_s) / shortest_s)
        for row, number in enumerate(rows.iteration):
            if number > possible:
                raise InvalidFieldError(
                    field=f"iterations.iteration[{row}]",
                    expected=f"at most {possible}, as most ranks of the job have reached "
                    f"{plausible - AHEAD_LIMIT}",
                    found=number,
                )

    def take_iterations(self, rank: Coordinates, rows: IterationColumns) -> bool:
        """Take the iterations that a rank reports, and judge the iterations of the job that they complete.

        Return whether they complete any.
        """
        run = self._run
        run.progress.take_rows(rank, rows)
        run.caps.take(rank, rows)
        last = run.log.periods[-1] if run.log.periods else None
        summaries, complete = run.log.add(rank, rows, run.wall_time_s, run.ranks.plausible_through)
        for summary in summaries:
            run.timelines.finish(summary)
            run.buffer.do(ReportIteration(summary))
        run.buffer.store(IterationRows(rank, rows, run.log.closed_through))
        if not complete:
            return False
        self._complete_s = run.now_s
        run.offers.try_again()
        for period in run.log.periods:
            if last is None or (period.number >= last.number and period != last):
                run.buffer.store(period)
        run.buffer.store(run.meter.take(complete, run.log.latest_baseline, run.wall_time_s))
        run.planner.count_done(sum(1 + iteration.skipped_count for iteration in complete))
        run.offers.iteration_time_s = complete[-1].iteration_time_s
        is_free = run.max_clock_enforcer.max_clock is None
        slowed: set[int] = set()
        for iteration in complete:
            run.counted_work.learn(iteration)
            run.variations.take(iteration)
            gap_s = run.progress.silence_s(run.now_s)
            run.progress.take_iteration(iteration, run.now_s)
            is_comparable = run.max_clock_enforcer.is_comparable(iteration)
            judgement = NOTHING_JUDGED
            if is_comparable:
                judgement = run.stragglers.judge(iteration)
                slowed.update(judgement.slowed)
            if judgement.has_changed:
                self._lifecycle.after_straggler_change()
            if run.record.state is JobState.PROFILING:
                self._note_profiled(iteration, judgement.slowed, gap_s, is_comparable=is_comparable)
            elif run.record.state is JobState.PLANNED:
                if is_comparable:
                    self._watch_plans(iteration, self._compare(iteration))
                if is_free:
                    self._watch_gpus()
            elif (
                is_comparable
                and run.max_clock_enforcer.max_clock is None
                and iteration.versions == run.offers.versions
            ):
                run.planner.watch.take_stock(iteration)
        run.planner.latency.follow(run.now_s)
        if run.record.state is JobState.BASELINE and is_free:
            self._measure_baseline(complete, slowed)
        elif run.record.state is JobState.STOCK:
            self._lifecycle.retry_when_due()
        return True

    def _measure_baseline(self, iterations: Sequence[JobIteration], slowed: Collection[int]) -> None:
        run = self._run
        cause = self._disturbance(slowed)
        is_waiting = cause is not None and run.baseline.disturb(cause, run.wall_time_s)
        spoilt = run.log.mark_disturbance(is_disturbed=is_waiting)
        if spoilt is not None:
            run.buffer.store(spoilt)
        if not is_waiting:
            is_doubtful = cause is None and bool(run.stragglers.suspects)
            run.baseline.take(iterations, run.offers.versions, MAX_SUSPECTED if is_doubtful else 0)
        if run.baseline.time_s:
            self._retried.clear()

    def _disturbance(self, slowed: Collection[int]) -> str | None:
        """Say what slows the job at stock and may pass; None if nothing is known to.

        GPUs that can do without their clocks are slow at stock, too, also while these are tried again.
        `slowed`: the pipelines with a GPU that reports that it was slowed.
        """
        run = self._run
        if run.ranks.foreign:
            return f"another client of the driver holds the clock of {min(run.ranks.foreign, key=astuple)}"
        capped = {place.pipeline for place in run.ranks.capped}
        slow = {*run.stragglers.pipelines, *slowed} - capped - self._retried
        return f"pipeline {min(slow)} is slow" if slow else None

    def take_foreign_clock(self, rank: Coordinates, clock: ForeignClock | None) -> bool:
        """Take the clock at which another client holds a rank's GPU; return whether that has changed.

        It takes some seconds to show. If it held the GPU at stock and the job is profiled already, it did so
        while stock was measured, unless plans have run since.
        """
        run = self._run
        was_free = run.ranks[rank].foreign_clock is None
        if not run.ranks.note_foreign_clock(rank, clock):
            return False
        was_at_stock = was_free and clock is not None and not clock.wanted_mhz
        is_first_profiling = run.record.state is JobState.PROFILING and not run.log.has_planned_since_baseline
        if was_at_stock and is_first_profiling:
            self._refute_baseline(f"another client of the driver held the clock of {rank} at stock")
        return True

    def _compare(self, iteration: JobIteration) -> Pair | None:
        """Compare plans with stock beside them; return the pair that the iteration completes, if it does."""
        run = self._run
        versions = run.offers.plan_versions
        period = run.log.periods[-1] if run.log.periods else None
        is_of_plans = period is not None and period.versions == versions
        may_begin = (
            is_of_plans
            and run.planner.frontier is not None
            and not run.planner.is_solving
            and run.offers.are_in_force
            and run.ranks.are_all(RankState.CONNECTED)
            and run.max_clock_enforcer.max_clock is None
            and run.record.budget_target_time_s is None
            and not run.stragglers
        )
        baseline = run.baseline.iteration
        step = run.stock_blocks.take(
            iteration,
            versions,
            period.time_pairs.count if period is not None and is_of_plans else 0,
            baseline.gap_time_s if baseline is not None else None,
            may_begin=may_begin,
        )
        match step:
            case BlockStep.STOCK:
                run.offers.suspend()
            case BlockStep.PLANS:
                run.offers.resume()
            case Pair() if (compared := run.log.compare(step, versions)) is not None:
                run.buffer.store(compared)
                return step
        return None

    def _refute_baseline(self, why: str) -> None:
        """Compare nothing with the wrong baseline any more, and measure stock again."""
        run = self._run
        run.buffer.store(wrong := run.log.refute_baseline())
        run.buffer.store(run.meter.refute(wrong))
        run.baseline.forget()
        self._lifecycle.enter(
            JobState.BASELINE, f"{why}: it is measured again, and nothing is compared with it any more"
        )

    def _note_profiled(
        self, iteration: JobIteration, slowed: Collection[int], gap_s: float, *, is_comparable: bool
    ) -> None:
        """Let the profiler count an iteration, unless it ran at stock because no clocks are held for now.

        `gap_s` is the time since the previous iteration. One that is not comparable only counts for the cost
        of profiling.
        """
        run = self._run
        if iteration.skipped_count:
            run.profiler.budget_tracker.take_gap(iteration, gap_s, run.baseline.time_s)
        run.profiler.budget_tracker.end_gap()
        is_as_offered = iteration.versions == run.offers.versions
        if is_as_offered and self._lifecycle.held_clocks() is None:
            return
        baseline = run.baseline.iteration
        assert baseline is not None
        run.profiler.take_iteration(
            iteration, is_as_offered and is_comparable, {*run.stragglers.pipelines, *slowed}, baseline
        )
        if (held := self._lifecycle.held_clocks()) is not None:
            self._profile_without(held)

    def _profile_without(self, held: HoldClocks) -> None:
        """Continue profiling without the clocks that GPUs do not reach: holding them would be in vain."""
        run = self._run
        usable_mhz = run.ranks.usable_clocks_mhz()
        caps = run.caps.explain([held] * len(run.offers), usable_mhz, ())
        if caps:
            unmeasured = run.profiler.unmeasured_ranks(held, usable_mhz)
            caps = tuple(cap for cap in caps if cap.rank in unmeasured)
        if caps:
            self._cap(caps)
            self._lifecycle.enter(JobState.PROFILING, f"{caps[0].rank} is held below its clocks")

    def _watch_plans(self, iteration: JobIteration, pair: Pair | None) -> None:
        run = self._run
        frontier = run.planner.frontier
        pairs = run.log.periods[-1].time_pairs if pair is not None else NO_PAIRS
        verdict = run.planner.judge(iteration, run.caps, pair, pairs)
        if verdict.caps:
            self._do_without(verdict.caps)
            return
        if pair is not None:
            run.baseline.renew(run.log.periods[-1])
            why = run.planner.why_undecided(run.log.periods[-1]) if verdict.withdraw is None else None
            if why is not None:
                self._lifecycle.fall_back(StockReason.UNDECIDED, why)
                return
        elif verdict.withdraw is None and run.planner.renew_variation():
            self._lifecycle.retarget()
        if verdict.withdraw is not None and verdict.solve_again and frontier is not None:
            latest = map(run.timelines.latest, range(len(run.offers)))
            changed = changed_work(frontier.pipeline, filter(None, latest))
            if changed is not None:
                stage, ratio = changed
                self._lifecycle.forget_measured()
                why = f"stage {stage} takes {ratio:.2f} × its planned time: it is profiled again"
                self._lifecycle.enter(JobState.BASELINE, why)
                return
        if verdict.is_irregular and verdict.withdraw is not None:
            run.baseline.forget()
            self._lifecycle.enter(JobState.BASELINE, verdict.withdraw)
        elif verdict.withdraw is None:
            if verdict.solve_again:
                self._lifecycle.solve()
        elif verdict.solve_again:
            run.planner.drop_frontier(verdict.slow)
            self._lifecycle.enter(JobState.SOLVING, verdict.withdraw)
        else:
            self._lifecycle.fall_back(StockReason.PREDICTIONS_VIOLATED, verdict.withdraw)

    def _do_without(self, caps: Sequence[Cap]) -> None:
        """Plan without the clocks that GPUs do not reach."""
        self._cap(caps)
        self._lifecycle.measure_again(
            f"{caps[0].rank} is held below its clocks: stock is measured again, and plans are solved anew"
        )

    def _cap(self, caps: Sequence[Cap]) -> None:
        run = self._run
        hold_s = run.caps.hold(run.now_s)
        for cap in caps:
            run.ranks.cap_clock(cap.rank, cap.clock_mhz)
            run.buffer.announce(
                event_pb2.JOB_EVENT_TYPE_CLOCK_CAPPED,
                f"{cap.rank} reaches only {cap.clock_mhz} of {cap.planned_mhz} MHz (clock event reasons "
                f"{cap.reasons:#x}): it does without higher clocks for {hold_s:.0f} s",
                event_pb2.ClockCapped(
                    rank=coordinates_to_proto(cap.rank),
                    clock_mhz=cap.clock_mhz,
                    planned_clock_mhz=cap.planned_mhz,
                    clock_event_reasons=cap.reasons,
                    hold_s=hold_s,
                ),
            )

    def _watch_gpus(self) -> None:
        """Plan anew if the GPUs' set latency has changed, or if GPUs may reach capped clocks again."""
        run = self._run
        if run.record.state is not JobState.PLANNED:
            return
        retried = {place.pipeline for place in run.ranks.capped}
        if run.caps.is_over(run.now_s) and run.ranks.lift_caps():
            self._retried = retried
            self._lifecycle.measure_again("clocks that GPUs did not reach are tried again")
        elif run.planner.is_outdated:
            self._lifecycle.solve()
