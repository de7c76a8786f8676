"""Whether a job makes progress, and why not. Part of the state machine.

The kind of progress depends on the job's state:

    WAITING             ranks join
    PROFILING           clocks are measured, for which the ranks send energy estimates
    every other, too    iterations of the whole job, regular and under the clocks that were offered

STOCK and FINISHED need no progress, and no iterations are expected once the first rank has finished.

The rule: a job without progress for `NO_PROGRESS_TIMEOUT_S`, or for `NO_PROGRESS_ITERATIONS` times its
iteration time if that is longer, is stalled. The iteration time is the latest, or the baseline's if that is
longer. Before one is known, a job counts as stalled during a longer first iteration. A round of profiling may
additionally take the iterations that it measures. Useless iterations (irregular, or under other clocks) stall
a job after `NO_PROGRESS_ITERATIONS` in a row; iterations before the start of an offer do not count as
useless, unless that start was postponed.

A reason is announced once until the job makes progress, which is announced as well. Reasons may change in
between: the job shows the latest one, in WAITING always the ranks that are missing now.

The cost of a message is proportional to its changes: the ranks to which a reason applies are only determined
when it is announced, and at most once per timeout after that.
"""

from collections.abc import Sequence

from perseus.service.domain.measured import JobIteration
from perseus.service.domain.messages import NUMBERS, coordinates_to_proto, time_to_proto
from perseus.service.domain.model import HoldClocks, JobState, RankState
from perseus.service.domain.records import JobRecord
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.stall import Stall, StallReason
from perseus.service.domain.telemetry import IterationColumns
from perseus.service.job.command_buffer import CommandBuffer
from perseus.service.job.iterations.baseline import Baseline
from perseus.service.job.iterations.iteration_log import IterationLog
from perseus.service.job.planning.offers import OfferBoard
from perseus.service.job.profiling.profiler import Profiler
from perseus.service.job.ranks.rank_table import RankTable
from perseus.v1 import event_pb2

NO_PROGRESS_TIMEOUT_S = 10.0
NO_PROGRESS_ITERATIONS = 3

_RUNNING = frozenset({JobState.BASELINE, JobState.PROFILING, JobState.SOLVING, JobState.PLANNED})


class Progress:
    """Watches one job.

    Attributes:
        is_silent: whether no iteration of the whole job has come for so long that it is unknown what runs.
    """

    def __init__(
        self,
        record: JobRecord,
        ranks: RankTable,
        log: IterationLog,
        baseline: Baseline,
        offers: OfferBoard,
        profiler: Profiler,
        round_iterations: int,
        buffer: CommandBuffer,
        now_s: float,
        wall_time_s: float,
    ) -> None:
        self.is_silent = False
        self._record = record
        self._ranks = ranks
        self._log = log
        self._baseline = baseline
        self._offers = offers
        self._profiler = profiler
        self._round_iterations = round_iterations
        self._buffer = buffer
        # The wall clock minus the monotonic clock.
        self._wall_offset_s = wall_time_s - now_s
        # Since the last progress.
        self._announced_reasons = set() if record.stall is None else {record.stall.reason}
        self._heard_s = self._checked_s = self._useful_s = now_s
        self._useless_count = 0
        # The time of the first iteration of a round of profiling, and the complete rounds seen so far.
        self._measuring_s: float | None = None
        self._whole_round_count = 0
        # The highest iteration by rank, on its current connection.
        self._reported: dict[Coordinates, int] = {}
        self._latest_iteration = -1
        self._repeating: set[Coordinates] = set()

    @property
    def stall(self) -> Stall | None:
        """Why the job makes no progress now; None if it does, or still has time to."""
        return self._find_missing() if self._state is JobState.WAITING else self._announced

    @property
    def _state(self) -> JobState:
        return self._record.state

    @property
    def _announced(self) -> Stall | None:
        """The latest announced reason, until the job makes progress."""
        return self._record.stall

    def enter(self, before: JobState, now_s: float) -> None:
        """Take a change of the job's state, and thus of the expected progress."""
        state = self._state
        self.is_silent = False
        self.restart(now_s)
        if state not in _RUNNING | {JobState.WAITING}:
            self._record.stall = None
            self._announced_reasons.clear()
        elif self._announced is not None and state is not before:
            reason = self._announced.reason
            has_all = reason is StallReason.RANK_MISSING and not self._ranks.missing
            if has_all or reason is StallReason.NO_ENERGY_ESTIMATES:
                self._end_stall()

    def forget(self, rank: Coordinates) -> None:
        """Forget the iterations of a rank that has joined: they may begin anywhere."""
        self._reported.pop(rank, None)
        self._repeating.discard(rank)

    def take_rows(self, rank: Coordinates, rows: IterationColumns) -> None:
        """Take the iterations that a rank reports."""
        highest = self._reported.get(rank, -1)
        if min(rows.iteration) <= highest:
            self._repeating.add(rank)
        self._latest_iteration = max(rows.iteration)
        self._reported[rank] = max(highest, self._latest_iteration)

    def take_iteration(self, iteration: JobIteration, now_s: float) -> None:
        """Take an iteration of the whole job."""
        if self._state not in _RUNNING:
            return
        self._heard_s = self._checked_s = now_s
        self.is_silent = False
        if iteration.is_regular and iteration.versions == self._offers.versions:
            self._useful_s, self._useless_count = now_s, 0
            self._repeating.clear()
            if self._state is JobState.PROFILING and self._measuring_s is None and self._held() is not None:
                self._measuring_s = now_s
            if self._announced is not None and self._announced.reason is not StallReason.NO_ENERGY_ESTIMATES:
                self._end_stall()
        elif iteration.has_clock_change:
            return
        elif not iteration.is_regular or not self._offers.is_pending(iteration.iteration):
            self._useless_count += 1
            if (
                self._useless_count >= NO_PROGRESS_ITERATIONS
                and now_s >= self._useful_s + NO_PROGRESS_TIMEOUT_S
            ):
                self._announce_useless(iteration, now_s)

    def check(self, now_s: float, wall_time_s: float) -> None:
        """Announce why the job makes no progress, if the timeout has passed."""
        self._wall_offset_s = wall_time_s - now_s
        if self._profiler.whole_round_count != self._whole_round_count:
            self._whole_round_count = self._profiler.whole_round_count
            self._measuring_s = None
            if self._announced is not None and self._announced.reason is StallReason.NO_ENERGY_ESTIMATES:
                self._end_stall()
        since_s = self._heard_s if self._measuring_s is None else min(self._heard_s, self._measuring_s)
        if now_s < since_s + NO_PROGRESS_TIMEOUT_S:  # no timeout is shorter
            return
        deadline_s = self.next_deadline_s()
        if deadline_s is None or now_s < deadline_s:
            return
        if self._state is JobState.WAITING:
            missing = self._find_missing()
            if missing is not None:
                self._announce_stall(missing, now_s)
        elif now_s >= self._silence_deadline_s():
            self._checked_s = now_s
            self.is_silent = True
            self._announce_silence(now_s)
        else:
            self._announce_unmeasured(now_s)

    def next_deadline_s(self) -> float | None:
        """Return when `check` may have a reason to announce if no input arrives; None if never."""
        if self._state is JobState.WAITING:
            is_announced = StallReason.RANK_MISSING in self._announced_reasons
            return None if is_announced else self._heard_s + NO_PROGRESS_TIMEOUT_S
        if self._state not in _RUNNING or self._ranks.counts[RankState.FINISHED]:
            return None
        deadline_s = self._silence_deadline_s()
        if self._measuring_s is not None and StallReason.NO_ENERGY_ESTIMATES not in self._announced_reasons:
            deadline_s = min(deadline_s, self._measuring_s + self._timeout_s(self._round_iterations))
        return deadline_s

    def silence_s(self, now_s: float) -> float:
        """Return how long no iteration of the whole job has been reported."""
        return now_s - self._heard_s

    def validate(self) -> None:
        """Check the invariants."""
        assert (self._announced is None) == (not self._announced_reasons)
        assert not self.is_silent or self._state in _RUNNING

    def restart(self, now_s: float) -> None:
        """Restart all timers."""
        self._heard_s = self._checked_s = self._useful_s = now_s
        self._useless_count = 0
        self._measuring_s = None

    def _timeout_s(self, more_iterations: int = 0) -> float:
        iteration_s = max(self._log.iteration_time_s, self._baseline.time_s)
        return max(NO_PROGRESS_TIMEOUT_S, (NO_PROGRESS_ITERATIONS + more_iterations) * iteration_s)

    def _silence_deadline_s(self) -> float:
        return max(self._heard_s, self._checked_s) + self._timeout_s()

    def _held(self) -> HoldClocks | None:
        clocks = self._offers[0].clocks
        return clocks if isinstance(clocks, HoldClocks) else None

    # ------------------------------------------------------------------ reasons

    def _find_missing(self) -> Stall | None:
        """Return the missing ranks as a stall; in WAITING, the finished ranks if none is missing."""
        if (first := self._ranks.missing.first()) is not None:
            place, since_s = first
            return self._stall(StallReason.RANK_MISSING, [place], since_s, len(self._ranks.missing))
        if self._state is JobState.WAITING:
            finished = [rank.coordinates for rank in self._ranks if rank.state is RankState.FINISHED]
            return self._stall(StallReason.RANK_MISSING, finished, self._heard_s) if finished else None
        return None

    def _announce_silence(self, now_s: float) -> None:
        stall = self._find_missing()
        if stall is None and self._repeating:
            stall = self._stall(StallReason.REPEATED_ITERATIONS, sorted(self._repeating), self._heard_s)
        if stall is None:
            stall = self._stall(StallReason.NO_ITERATIONS, self._log.silent_ranks(), self._heard_s)
        self._announce_stall(stall, now_s)

    def _announce_useless(self, iteration: JobIteration, now_s: float) -> None:
        if iteration.is_regular:
            reason, ranks = StallReason.OTHER_CLOCKS, self._log.ranks_under_others(self._offers)
        else:
            reason, ranks = StallReason.IRREGULAR_ITERATIONS, self._log.irregular_ranks()
        if ranks and (self._announced is None or self._announced.reason is not reason):
            self._announce_stall(self._stall(reason, ranks, self._useful_s), now_s)

    def _announce_unmeasured(self, now_s: float) -> None:
        held, since_s = self._held(), self._measuring_s
        self._measuring_s = None
        if held is not None and since_s is not None:
            ranks = self._profiler.unmeasured_ranks(held, self._ranks.usable_clocks_mhz())
            if ranks:
                self._announce_stall(self._stall(StallReason.NO_ENERGY_ESTIMATES, ranks, since_s), now_s)

    def _stall(
        self, reason: StallReason, ranks: Sequence[Coordinates], since_s: float, count: int | None = None
    ) -> Stall:
        count = len(ranks) if count is None else count
        is_all = count == len(self._ranks) > 1
        since_time_s = since_s + self._wall_offset_s
        return Stall(reason, None if is_all else ranks[0], count, since_time_s, self._latest_iteration)

    def _announce_stall(self, stall: Stall, now_s: float) -> None:
        self._record.stall = stall
        if stall.reason not in self._announced_reasons:
            self._announced_reasons.add(stall.reason)
            lasted_s = now_s + self._wall_offset_s - stall.since_time_s
            self._announce(event_pb2.JOB_EVENT_TYPE_STALLED, f"{stall}, for {lasted_s:.0f} s", stall)

    def _end_stall(self) -> None:
        assert self._announced is not None
        stall, self._record.stall = self._announced, None
        self._announced_reasons.clear()
        self._announce(
            event_pb2.JOB_EVENT_TYPE_STALL_ENDED, f"the job makes progress again; before, {stall}", stall
        )

    def _announce(self, kind: event_pb2.JobEventType.ValueType, message: str, stall: Stall) -> None:
        self._buffer.announce(
            kind,
            message,
            event_pb2.Stall(
                reason=NUMBERS[stall.reason],
                rank=None if stall.rank is None else coordinates_to_proto(stall.rank),
                rank_count=stall.rank_count,
                since_time=time_to_proto(stall.since_time_s),
                iteration=stall.iteration,
            ),
        )
