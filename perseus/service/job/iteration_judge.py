"""What iterations of the whole job show, and what follows for its course. Part of the state machine.

Which stragglers there are, whether plans keep their promises, which clocks GPUs do not reach, whether the
work is the one that was measured. What counts as evidence of that, the `limiter` says.
"""

from collections.abc import Collection, Sequence

from perseus.service.domain.commands import ReportIteration
from perseus.service.domain.measured import JobIteration
from perseus.service.domain.messages import coordinates_to_proto
from perseus.service.domain.model import HoldClocks, JobState
from perseus.service.domain.records import IterationRows
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.telemetry import IterationColumns
from perseus.service.job.course import Course
from perseus.service.job.planning.caps import Cap
from perseus.service.job.planning.drift import changed_work
from perseus.service.job.stragglers.straggler_book import NOTHING_JUDGED
from perseus.v1 import event_pb2


class IterationJudge:
    """Takes what ranks report of iterations."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._progress = course.progress
        self._caps = course.caps
        self._log = course.log
        self._timelines = course.timelines
        self._journal = course.journal
        self._meter = course.meter
        self._offers = course.offers
        self._limiter = course.limiter
        self._planner = course.planner
        self._stragglers = course.stragglers
        self._profiler = course.profiler
        self._baseline = course.baseline
        self._ranks = course.ranks

    def take_iterations(self, rank: Coordinates, rows: IterationColumns) -> None:
        """Take the iterations that a rank reports, and judge those of the whole job that they complete."""
        self._progress.take_rows(rank, rows)
        self._caps.take(rank, rows)
        count = len(self._log.periods)
        last = self._log.periods[-1] if self._log.periods else None
        summaries, complete = self._log.add(rank, rows, self._course.wall_time_s)
        for summary in summaries:
            self._timelines.finish(summary)
            self._journal.do(ReportIteration(summary))
        self._journal.store(IterationRows(rank, rows, self._log.closed_through))
        if not complete:
            return
        for period in self._log.periods[max(0, count - 1) :]:
            if period != last:
                self._journal.store(period)
        self._journal.store(self._meter.take(complete, self._log.latest_baseline, self._course.wall_time_s))
        self._planner.count_done(sum(1 + iteration.skipped_count for iteration in complete))
        self._offers.iteration_time_s = complete[-1].iteration_time_s
        is_free = self._limiter.ceiling is None
        for iteration in complete:
            gap_s = self._progress.silence_s(self._course.now_s)
            self._progress.take_iteration(iteration, self._course.now_s)
            is_evidence = self._limiter.is_evidence(iteration)
            judgement = NOTHING_JUDGED
            if is_evidence:
                self._planner.watch.learn(iteration)
                judgement = self._stragglers.judge(iteration)
            if judgement.has_changed:
                self._course.after_straggler_change()
            if self._course.state is JobState.PROFILING:
                self._note_profiled(iteration, judgement.slowed, gap_s, is_evidence=is_evidence)
            elif self._course.state is JobState.PLANNED:
                if is_evidence:
                    self._watch_plans(iteration)
                if is_free:
                    self._watch_gpus()
            elif (
                is_evidence and self._limiter.ceiling is None and iteration.versions == self._offers.versions
            ):
                self._planner.watch.take_stock(iteration)
        self._planner.latency.follow(self._course.now_s)
        if self._course.state is JobState.BASELINE and is_free:
            self._baseline.take(complete, self._offers.versions)

    def _note_profiled(
        self, iteration: JobIteration, slowed: Collection[int], gap_s: float, *, is_evidence: bool
    ) -> None:
        """Let the profiler count an iteration, unless it ran at stock because nothing is held for now.

        `gap_s`: since the one before. One that is no evidence only counts for what profiling costs.
        """
        if iteration.skipped_count:
            self._profiler.spending.take_gap(iteration, gap_s, self._baseline.time_s)
        self._profiler.spending.end_gap()
        is_as_offered = iteration.versions == self._offers.versions
        if is_as_offered and self._course.held_clocks() is None:
            return
        baseline = self._baseline.iteration
        assert baseline is not None
        self._profiler.take_iteration(
            iteration, is_as_offered and is_evidence, {*self._stragglers.pipelines, *slowed}, baseline
        )
        if (held := self._course.held_clocks()) is not None:
            self._profile_without(held)

    def _profile_without(self, held: HoldClocks) -> None:
        """Profile without the clocks that GPUs do not reach: they would be held in vain."""
        usable_mhz = self._ranks.usable_clocks_mhz()
        caps = self._caps.explain([held] * len(self._offers), usable_mhz, ())
        if caps:
            unmeasured = self._profiler.unmeasured_ranks(held, usable_mhz)
            caps = tuple(cap for cap in caps if cap.rank in unmeasured)
        if caps:
            self._cap(caps)
            self._course.enter(JobState.PROFILING, f"{caps[0].rank} is held below its clocks")

    def _watch_plans(self, iteration: JobIteration) -> None:
        frontier = self._planner.frontier
        verdict = self._planner.judge(self._limiter.without_gaps(iteration), self._caps)
        if verdict.caps:
            self._do_without(verdict.caps)
            return
        if verdict.withdraw is not None and verdict.solve_again and frontier is not None:
            latest = map(self._timelines.latest, range(len(self._offers)))
            changed = changed_work(frontier.pipeline, filter(None, latest))
            if changed is not None:
                stage, ratio = changed
                self._course.forget_measured()
                why = f"stage {stage} takes {ratio:.2f} × the time planned: it is profiled again"
                self._course.enter(JobState.BASELINE, why)
                return
        if verdict.is_irregular and verdict.withdraw is not None:
            self._baseline.forget()
            self._course.enter(JobState.BASELINE, verdict.withdraw)
        elif verdict.withdraw is None:
            if verdict.solve_again:
                self._course.solve()
        elif verdict.solve_again:
            self._planner.drop_frontier(verdict.slow)
            self._course.enter(JobState.SOLVING, verdict.withdraw)
        else:
            self._course.fall_back(verdict.withdraw)

    def _do_without(self, caps: Sequence[Cap]) -> None:
        """Plan without the clocks that GPUs do not reach."""
        self._cap(caps)
        self._course.measure_again(
            f"{caps[0].rank} is held below its clocks: stock is measured again, and planned anew"
        )

    def _cap(self, caps: Sequence[Cap]) -> None:
        hold_s = self._caps.hold(self._course.now_s)
        for cap in caps:
            self._ranks.cap_clock(cap.rank, cap.clock_mhz)
            self._journal.announce(
                event_pb2.JOB_EVENT_TYPE_CLOCK_CAPPED,
                f"{cap.rank} reaches {cap.clock_mhz} MHz, where it is to have {cap.planned_mhz} MHz "
                f"(clock event reasons {cap.reasons:#x}): it does without higher ones for {hold_s:.0f} s",
                event_pb2.ClockCapped(
                    rank=coordinates_to_proto(cap.rank),
                    clock_mhz=cap.clock_mhz,
                    planned_clock_mhz=cap.planned_mhz,
                    clock_event_reasons=cap.reasons,
                    hold_s=hold_s,
                ),
            )

    def _watch_gpus(self) -> None:
        """Plan anew where GPUs take another time to set a clock, or may reach clocks again."""
        if self._course.state is not JobState.PLANNED:
            return
        if self._caps.is_over(self._course.now_s) and self._ranks.lift_caps():
            self._course.measure_again("clocks that GPUs did not reach are tried again")
        elif self._planner.is_outdated:
            self._course.solve()
