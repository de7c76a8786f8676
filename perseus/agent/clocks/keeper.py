"""Decides which clock a rank's GPU should have, and when: raises early, lowers at the end. Pure.

A set takes 10–20 ms, and only one is in progress at a time. **Lateness costs joules, never seconds**: the
clock in force must never be lower than the one planned for the current computation. So

- the keeper requests a raise one lead time (`clocks.lead_time`) before the moment that needs it, as predicted
  by the timetable;
- it requests a lower clock when the previous computation has ended, unless a raise would follow so soon that
  this set would delay it: then the clock stays unchanged;
- it requests the highest clock that is needed before the set after this one can be in force.

As long as the timetable has no data (the first iterations under a plan), this reduces to: when a computation
begins, request the clock of the next one if it is higher; when it ends, request the next one's.

Clocks that come into force during an iteration (`go_on`) are requested at once, regardless of later needs.

Stock counts as the highest clock. The order is cyclic: after the last computation comes the first of the next
iteration.

**Nothing is planned between the last computation of an iteration and the first of the next, so nothing may be
slowed there for long.** Evaluation, optimizer and checkpoints run there. So

- in the gap the keeper requests no lower clock until the next begin; but at once a higher one, if the next
  iteration begins with it;
- in a gap that is usually long, the GPU goes to its *fallback* at its begin; in one that turns out long,
  as soon as it has. A gap is long from four set latencies on. A fallback below the first clock of the next
  iteration (a power budget's maximum clock) would make that clock late: then, if the usual gap is short, only
  a longer one counts as long.

The GPU also goes to its fallback when no mark arrives for long during an iteration: the trainer can't be
computing as planned.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from perseus.agent.clocks.lead_time import LeadTime
from perseus.agent.clocks.sets import ResetClock, ScheduleClock, SetClock
from perseus.agent.clocks.timetable import Prediction, Timetable

Clocks = tuple[int | None, ...]
"""A clock for each computation of the order, MHz, None for stock."""

Commands = list[SetClock | ResetClock | ScheduleClock]

_ERRORS_KEPT = 64
_LONG_GAP_LATENCIES = 4
_MAX_KEPT_GAP_S = 1.0
# Silence counts as long from this multiple of the longest recent span on, but never below the minimum.
_LONG_SILENCE_SPANS = 4
_MIN_SILENCE_S = 1.0
_UNKNOWN_SILENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class _Need:
    """The lowest clock that is allowed for one computation from `begin_s` on."""

    begin_s: float
    clock_mhz: int | None


class ClockKeeper:
    """One GPU's clock. Methods take a mark's time and the current time, and return commands.

    Attributes:
        fallback_mhz: the clock of a GPU without planned computations: stock (None), or a maximum clock.
        position: that of the current or next computation; None if nothing planned is running.
    """

    def __init__(self) -> None:
        self.lead = LeadTime()
        self.fallback_mhz: int | None = None
        self.position: int | None = None
        self._is_in_gap = False
        self._keeps_gaps = False
        self._wanted_mhz: int | None = None
        self._scheduled: ScheduleClock | None = None
        self._clocks: Clocks = ()
        self._timetable = Timetable(0)
        self._predicted_end_s: float | None = None
        self._predicted_begin: Prediction | None = None
        self._errors_s = deque[float](maxlen=_ERRORS_KEPT)

    @property
    def wanted_mhz(self) -> int | None:
        """The clock requested last; one that is only scheduled does not count."""
        return self._wanted_mhz

    @property
    def prediction_error_s(self) -> float | None:
        """Median absolute error of predicted ends of computations; None before the first."""
        return median(map(abs, self._errors_s)) if self._errors_s else None

    def follow(self, clocks: Clocks, *, keeps_gaps: bool = False) -> None:
        """Bring a plan into force and discard the durations measured before.

        `keeps_gaps`: keep the clock through a gap that is no longer than usual, however long that is. This is
        for measuring a first computation that is the only one of its kind in the iteration, which would
        otherwise never be at its clock.
        """
        is_other_work = len(clocks) != len(self._clocks)
        self._clocks = clocks
        self._keeps_gaps = keeps_gaps
        self._timetable = Timetable(len(clocks), None if is_other_work else self._timetable)
        self._predicted_begin = self._predicted_end_s = None

    def fall_back(self) -> Commands:
        """Go to the fallback at once, without a plan or after a deviation, until the next request."""
        self.position = None
        self._timetable.interrupt()
        self._predicted_begin = self._predicted_end_s = None
        return self._ask(self.fallback_mhz, None)

    def change_fallback(self, fallback_mhz: int | None, now_s: float) -> Commands:
        """Change the fallback; it takes effect at once if nothing planned is running."""
        if fallback_mhz == self.fallback_mhz:
            return []
        self._reconcile(now_s)
        self.fallback_mhz = fallback_mhz
        return self._ask(fallback_mhz, None) if self.position is None else []

    def go_on(self, now_s: float) -> Commands:
        """Apply the clocks of the last `follow` to the current computation.

        If nothing planned is running, they apply from the next iteration on, and until then a maximum clock
        applies.
        """
        self._reconcile(now_s)
        if self.position is not None:
            return self._ask(self._clocks[self.position], None)
        return [] if self.fallback_mhz is None else self._ask(self.fallback_mhz, None)

    def is_silent(self, heard_at_s: float, now_s: float) -> bool:
        """Return whether the last mark is so old that the trainer can't be computing as planned."""
        self._reconcile(now_s)
        silence_s = now_s - heard_at_s
        if silence_s < _MIN_SILENCE_S or self._wanted_mhz == self.fallback_mhz:
            return False
        longest_s = self._timetable.longest_s()
        return silence_s >= (_UNKNOWN_SILENCE_S if longest_s is None else _LONG_SILENCE_SPANS * longest_s)

    def begin_iteration(self, now_s: float) -> Commands:
        """Begin an iteration, whose first computation may begin at once."""
        self._is_in_gap, self.position = False, 0
        needs = self._needs(self._timetable.from_start(now_s), now_s, self._clocks)
        return self._decide(needs, now_s, now_s)

    def begin(self, position: int, time_s: float, now_s: float, following: Clocks) -> Commands:
        """Note the begin of a computation. `following`: the clocks of the next iteration."""
        self._is_in_gap, self.position = False, position
        predicted = self._predicted_begin
        if predicted is not None and predicted.position % len(self._clocks) == position:
            self.lead.mispredicted(predicted.begin_s - time_s)
        self._timetable.begin(position, time_s)
        duration_s = self._timetable.duration_s(position)
        self._predicted_end_s = None if duration_s is None else time_s + duration_s
        next_mark_s = max(now_s, time_s + (duration_s or 0.0))
        self._predicted_begin = None
        if duration_s is not None:
            self._predicted_begin = next(self._timetable.after_begin(position, time_s))
        if self._has_nothing_to_set(following):
            return []
        ahead = self._timetable.after_begin(position, time_s)
        own = _Need(now_s, self._clocks[position])
        return self._decide([own, *self._needs(ahead, next_mark_s, following)], now_s, next_mark_s)

    def end_iteration(self, time_s: float, now_s: float, following: Clocks) -> Commands:
        """Note the end of an iteration; the end mark of its last computation may be lost."""
        return [] if self._is_in_gap or not self._clocks else self._begin_gap(time_s, now_s, following)

    def _begin_gap(self, time_s: float, now_s: float, following: Clocks) -> Commands:
        self._is_in_gap, self.position = True, None
        self._reconcile(now_s)
        gap_s = self._timetable.gap_s(0)
        long_s = _LONG_GAP_LATENCIES * self.lead.latency_s
        comes_late = is_higher(following[0], self.fallback_mhz) and gap_s <= _MAX_KEPT_GAP_S
        is_kept = self._keeps_gaps or comes_late
        at_s = time_s + long_s + (gap_s if is_kept else 0.0)
        if (gap_s > long_s and not is_kept) or at_s <= now_s:
            return self._ask(self.fallback_mhz, None)
        wanted_mhz = self._wanted_mhz
        if is_higher(following[0], wanted_mhz):
            wanted_mhz = following[0]
        is_other = wanted_mhz != self.fallback_mhz
        return self._ask(wanted_mhz, ScheduleClock(self.fallback_mhz, at_s) if is_other else None)

    def end(self, position: int, time_s: float, now_s: float, following: Clocks) -> Commands:
        """Note the end of a computation."""
        if self._predicted_end_s is not None:
            self._errors_s.append(self._predicted_end_s - time_s)
            self._predicted_end_s = None
        self._timetable.end(position, time_s)
        self.position = position + 1
        if position == len(self._clocks) - 1:
            return self._begin_gap(time_s, now_s, following)
        if self._has_nothing_to_set(following):
            return []
        next_mark_s = max(now_s, time_s + self._timetable.gap_s((position + 1) % len(self._clocks)))
        needs = self._needs(self._timetable.after_end(position, time_s), next_mark_s, following)
        return self._decide(needs, now_s, next_mark_s)

    def _has_nothing_to_set(self, following: Clocks) -> bool:
        """Tell whether all is at stock and stays there: most marks of a job without a plan."""
        is_at_stock = self._wanted_mhz is None and self._scheduled is None
        return is_at_stock and not any(self._clocks) and not any(following)

    def _needs(self, ahead: Iterable[Prediction], next_mark_s: float, following: Clocks) -> list[_Need]:
        """Return all predicted needs that a set requested before the next mark can serve."""
        count = len(self._clocks)
        needs: list[_Need] = []
        for prediction in ahead:
            if needs and prediction.begin_s > next_mark_s + self.lead.reach_s:
                break
            is_following = prediction.position >= count
            clocks = following if is_following else self._clocks
            needs.append(_Need(prediction.begin_s, clocks[prediction.position % count]))
            if is_following and following is not self._clocks:
                break  # another plan has other durations
        return needs

    def _decide(self, needs: Sequence[_Need], now_s: float, next_mark_s: float) -> Commands:
        """Decide on a request. `needs`: in order of time, from the current or next computation on."""
        self._reconcile(now_s)
        wanted_mhz = self._wanted_mhz
        reach_s = now_s + self.lead.reach_s
        soon = [need for need in needs if need.begin_s <= reach_s or self._due_s(need) <= now_s]
        is_due = any(is_higher(need.clock_mhz, wanted_mhz) and self._due_s(need) <= now_s for need in soon)
        enough_mhz = _highest(soon or needs[:1])
        if is_due or is_higher(wanted_mhz, enough_mhz):
            wanted_mhz = enough_mhz
        return self._ask(wanted_mhz, self._next_raise(needs, wanted_mhz, next_mark_s))

    def _reconcile(self, now_s: float) -> None:
        """Count a scheduled clock as requested once it is due."""
        if self._scheduled is not None and self._scheduled.at_s <= now_s:
            self._wanted_mhz, self._scheduled = self._scheduled.clock_mhz, None

    def _next_raise(
        self, needs: Sequence[_Need], wanted_mhz: int | None, next_mark_s: float
    ) -> ScheduleClock | None:
        """Return the raise that falls due before the next expected mark."""
        raises = [need for need in needs if is_higher(need.clock_mhz, wanted_mhz)]
        if not raises:
            return None
        first = min(raises, key=self._due_s)
        due_s = self._due_s(first)
        if due_s > next_mark_s:
            return None
        reach_s = due_s + self.lead.reach_s
        return ScheduleClock(_highest([first, *(need for need in raises if need.begin_s <= reach_s)]), due_s)

    def _due_s(self, need: _Need) -> float:
        return need.begin_s - self.lead.of(need.clock_mhz)

    def _ask(self, wanted_mhz: int | None, scheduled: ScheduleClock | None) -> Commands:
        commands: Commands = []
        is_withdrawn = self._scheduled is not None and scheduled is None
        if wanted_mhz != self._wanted_mhz or is_withdrawn:
            commands.append(ResetClock() if wanted_mhz is None else SetClock(wanted_mhz))
        if scheduled is not None and (commands or scheduled != self._scheduled):
            commands.append(scheduled)
        self._wanted_mhz, self._scheduled = wanted_mhz, scheduled
        return commands

    def validate(self, supported_clocks_mhz: Sequence[int]) -> None:
        """Check the invariants; AssertionError otherwise. Called by tests."""
        known = {None, *supported_clocks_mhz}
        assert self._wanted_mhz in known
        if self._scheduled is not None:
            assert self._scheduled.clock_mhz in known
            is_fallback = self._is_in_gap and self._scheduled.clock_mhz == self.fallback_mhz
            is_raise = is_higher(self._scheduled.clock_mhz, self._wanted_mhz)
            assert is_fallback or is_raise, "a lower clock is never early"


def is_higher(clock_mhz: int | None, than_mhz: int | None) -> bool:
    """Return whether a clock is higher than another; stock (None) is the highest."""
    return _height(clock_mhz) > _height(than_mhz)


def _height(clock_mhz: int | None) -> float:
    return float("inf") if clock_mhz is None else clock_mhz


def _highest(needs: Sequence[_Need]) -> int | None:
    return max((need.clock_mhz for need in needs), key=_height)
