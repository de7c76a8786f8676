"""Enforces one feed's limit: its power cap, the measured power, and the target that remains. Pure.

Plans predict a power that GPUs don't keep to the watt. Each job's deviation is known from its past power
(:mod:`perseus.service.fleet.power.meter`), and the remaining error is paid back: energy drawn above a limit
within its window is subtracted from the target until the window's mean is right.

Jobs without plans (while their baseline is measured or they are profiled, and at stock) draw what they need,
and other jobs make room as far as their owners allow. If that is not enough, the maximum clock of the jobs
without plans falls. Where voltage falls with the clock, power falls at least as fast as the clock, so a share
of the highest clock draws at most the same share of the power. Below that range the limit may not be kept,
and the feed's status reports it.
"""

import math
from collections import deque

from perseus.service.domain.power import Budget, Feed
from perseus.service.fleet.power import budgets
from perseus.service.fleet.power.messages import FeedShared
from perseus.service.fleet.power.meter import RECENT_S, MovingAverage, PredictionError

MIN_WINDOW_S = 60.0
WINDOW_ITERATIONS = 3
SHORT_WINDOW_S = 10.0
SHORT_EXCESS = 1.02
SHORT_ITERATION_S = 2.0
"""With shorter iterations than this, no mean over ten seconds may exceed the limit by more than 2 %."""

FIRST_MARGIN = 0.006
"""Share of the limit that is not planned while the feed's noise is unknown, as the mean of a window must not
exceed the limit. Later it is twice that at most."""

MARGIN_DEVIATIONS, BRAKE_DEVIATIONS, TOLERANCE_DEVIATIONS = 3.0, 1.5, 0.5
"""In standard deviations of a window's mean: the margin, which one window in 700 exceeds; the excess over the
planned mean from which power is cut before that happens, in one window of 15; and by how much the expected
power may exceed its target, as it changes a little with every measurement."""

UNTRIED_MARGIN = 0.025
"""The same until plans that keep the limit have been measured for a while: under new plans, jobs draw up to
2 % more than their other plans suggest."""

SETTLING_TIME_S = 5.0
"""The most time until all GPUs run at a new target."""

CLOCK_STEP = 0.05
"""Steps of the maximum clock, as a share of the highest: noise must not move it, as each change spoils an
iteration."""

_PAY_BACK_S = 15.0
_DIGITS = 1e-9


class FeedWatch:
    """The state of one feed, or of our share in it, if it is divided over slots.

    Attributes:
        feed: its name and ramps.
        feed_cap_w: the power that may be drawn from all of it now; infinite without a limit.
        shared: our share in it.
        power_cap_w: our part of `feed_cap_w`; all the other powers are ours, too.
        rose_s: when the power cap last rose.
        others: the power of GPUs in no job.
        clock_share: the maximum clock of jobs without plans, as a share of their highest; 1 for no maximum.
        managed_w, unmanaged_w: the expected power of planned jobs, and of all others, at the current targets.
        max_w: the expected power of all without any limit.
        job_ids: jobs that draw on it.
    """

    def __init__(self, feed: Feed, feed_cap_w: float = math.inf, lift_from_s: float = -math.inf) -> None:
        """`feed_cap_w`: its power cap so far, lifted from a time on by when all that draw are known."""
        self.feed = feed
        self.feed_cap_w, self.power_cap_w = feed_cap_w, math.inf
        self._lift_from_s = lift_from_s if feed_cap_w < math.inf else -math.inf
        self.shared = FeedShared(feed.name, 1.0, 0.0, 0.0)
        self.rose_s = -math.inf
        self.others = MovingAverage(RECENT_S)
        self.clock_share = 1.0
        self.begin_sums()
        self._moved_s: float | None = None
        self._down_w_per_s = math.inf
        self._limit_w = self._whole_limit_w = math.inf
        self._are_plans_tried = False
        self._judged_from_s = math.inf
        self._recent_mean = MovingAverage(MIN_WINDOW_S)
        self._judged = MovingAverage(MIN_WINDOW_S)
        self._error = PredictionError(FIRST_MARGIN / MARGIN_DEVIATIONS)
        self._drawn = MovingAverage(SHORT_WINDOW_S)
        self._caps_w: deque[tuple[float, float]] = deque()
        """Recent power caps, each with the time from which it applied."""
        self._above_since_s = math.inf
        self._longest_iteration_s = 0.0

    def begin_sums(self) -> None:
        """Reset the sums of expected power, before jobs are added."""
        self.managed_w = 0.0
        self.unmanaged_w = self.max_w = self.others.mean_w()
        self.job_ids: list[str] = []

    def add(self, job_id: str, power_w: float, max_w: float, *, is_planned: bool) -> None:
        """Add a job's expected power, and its power without any limit."""
        if is_planned:
            self.managed_w += power_w
        else:
            self.unmanaged_w += power_w
        self.max_w += max_w
        if power_w > 0:
            self.job_ids.append(job_id)

    @property
    def expected_w(self) -> float:
        """The total expected power."""
        return self.managed_w + self.unmanaged_w

    def move(self, some: list[Budget], now_s: float) -> None:
        """Advance time: move the power cap towards the budgets' goal."""
        elapsed_s = 0.0 if self._moved_s is None else now_s - self._moved_s
        self._moved_s = now_s
        goal_w, self._down_w_per_s = budgets.goal_w(some, self.feed, now_s)
        if self.shared.share is None:
            goal_w = math.inf  # a ramp begins at what all draw, which nobody knows yet
        before_w = self.power_cap_w
        self.feed_cap_w = budgets.ramped_power_cap_w(
            power_cap_w=self.feed_cap_w,
            drawn_w=self._drawn_by_all_w,
            goal=goal_w,
            ramps_w_per_s=(self._down_w_per_s, self.feed.ramp_up_w_per_s),
            elapsed_s=elapsed_s,
        )
        self.power_cap_w = self._own_w(self.feed_cap_w)
        if before_w < self.power_cap_w < math.inf:
            self.rose_s = now_s
        whole_w = budgets.limit_w(some, self.feed, now_s)
        limit_w = self._own_w(whole_w)
        max_w = self.max_w + self.shared.elsewhere_max_w
        if limit_w == math.inf and min(goal_w, self.feed_cap_w) >= max_w and now_s >= self._lift_from_s:
            self.feed_cap_w = self.power_cap_w = math.inf  # no job would draw more
        self._caps_w.append((now_s, self.power_cap_w))
        is_reached = limit_w < math.inf and self.power_cap_w <= limit_w * (1 + _DIGITS)
        if limit_w != self._limit_w or not is_reached:
            # Nearly the same plans keep a share that moved a little.
            is_near = abs(limit_w - self._limit_w) <= UNTRIED_MARGIN * limit_w
            self._are_plans_tried = is_near and whole_w == self._whole_limit_w and self._untried_w() == 0
            self._whole_limit_w = whole_w
            # Only power drawn since the same limit had to be kept is judged.
            self._judged.clear()
            self._judged_from_s = now_s + SETTLING_TIME_S if is_reached else math.inf
            self._limit_w = limit_w if is_reached else math.nan
        elif limit_w == math.inf:
            self._judged_from_s = math.inf

    def limit_w(self, some: list[Budget], now_s: float) -> float:
        """Return our part of the limit in force; infinite if there is none."""
        return self._own_w(budgets.limit_w(some, self.feed, now_s))

    def _own_w(self, power_w: float) -> float:
        share = self.shared.share
        return math.inf if power_w == math.inf or share is None else share * power_w

    def to_divide_w(self, some: list[Budget], now_s: float) -> float:
        """Return the power that shares must keep: the feed's cap, or the limit to come; infinite without."""
        if self.feed_cap_w < math.inf:
            return self.feed_cap_w
        goal_w, down_w_per_s = budgets.goal_w(some, self.feed, now_s)
        if goal_w < math.inf:
            return goal_w if down_w_per_s == math.inf else max(goal_w, self._drawn_by_all_w)
        ahead = min(
            (each for each in some if each.start_s > now_s), key=lambda each: each.start_s, default=None
        )
        return math.inf if ahead is None else ahead.limit_w

    @property
    def _drawn_by_all_w(self) -> float:
        return min(self.expected_w, self.max_w) + self.shared.elsewhere_w

    def share_clocks(self, free_w: float, left_w: float) -> None:
        """Set the clock share of jobs without plans from their unlimited power and the power left for them.

        The share falls at once, and rises only when there is room for more than a step.
        """
        share = math.inf if free_w <= 0 else max(0.0, left_w) / free_w
        if self.clock_share <= share < self.clock_share + 2 * CLOCK_STEP and self.clock_share < 1:
            return
        self.clock_share = 1.0 if share >= 1 else math.floor(share / CLOCK_STEP) * CLOCK_STEP

    def take(
        self,
        now_s: float,
        duration_s: float,
        power_w: float,
        drawn_w: float,
        others_w: float,
        longest_iteration_s: float,
        unsettled_w: tuple[float, float],
    ) -> None:
        """Add a measurement over the time until now.

        `power_w`: the total power, that of outdated measurements as expected; `drawn_w`: the same as it was
        measured; `others_w`: of GPUs in no job; `unsettled_w`: of jobs whose plans say nothing about that
        time, as included in `power_w`, and as expected.
        """
        self.others.take(now_s, duration_s, others_w)
        self._longest_iteration_s = longest_iteration_s
        window_s = max(MIN_WINDOW_S, WINDOW_ITERATIONS * longest_iteration_s)
        for mean in (self._recent_mean, self._judged):
            mean.window_s = window_s
        self._recent_mean.take(now_s, duration_s, power_w)
        counted_w, unsettled_expected_w = unsettled_w
        if unsettled_expected_w <= self.expected_w / 2:
            predicted_w = self.expected_w - unsettled_expected_w
            self._error.take(duration_s, power_w - counted_w, predicted_w, window_s)
        if now_s - duration_s >= self._judged_from_s:
            self._judged.take(now_s, duration_s, power_w)
        self._drawn.window_s = max(SHORT_WINDOW_S, longest_iteration_s)
        self._drawn.take(now_s, duration_s, drawn_w)
        from_s = now_s - self._drawn.window_s - SETTLING_TIME_S
        while len(self._caps_w) > 1 and self._caps_w[1][0] <= from_s:
            self._caps_w.popleft()
        allowed_w = max((cap_w for _, cap_w in self._caps_w), default=math.inf)
        is_above = self._drawn.mean_w() > allowed_w * (1 + _DIGITS)
        self._above_since_s = min(self._above_since_s, now_s) if is_above else math.inf

    @property
    def target_w(self) -> float:
        """The power that plans may add up to: the power cap, less the margin and the debt to pay back."""
        deviation_w = self.power_cap_w * self._error.deviation
        margin_w = MARGIN_DEVIATIONS * deviation_w
        debt_j = 0.0
        if self._judged.covered_s:
            excess_j = self._judged.covered_s * (self._judged.mean_w() - self.power_cap_w)
            planned_j = BRAKE_DEVIATIONS * deviation_w * self._judged.window_s
            debt_j = max(0.0, excess_j, excess_j + self._judged.covered_s * margin_w - planned_j)
        return max(0.0, self.ramped_w - margin_w - debt_j / _PAY_BACK_S)

    @property
    def tolerated_w(self) -> float:
        """The expected power above which jobs are slowed: the target, and the error of what is expected."""
        return self.target_w + TOLERANCE_DEVIATIONS * self.power_cap_w * self._error.deviation

    @property
    def ramped_w(self) -> float:
        """The power that jobs may be expected to draw: the power cap, reduced while plans are new."""
        return self.power_cap_w - self._untried_w()

    def _untried_w(self) -> float:
        """Return the extra margin while the plans that keep the limit are new; it grows along the ramp."""
        is_short = self._judged.covered_s < SHORT_WINDOW_S
        if self._judged_from_s == math.inf or self._are_plans_tried or not is_short:
            return 0.0
        max_w = self.power_cap_w * (UNTRIED_MARGIN - MARGIN_DEVIATIONS * self._error.deviation)
        if self._down_w_per_s == math.inf:
            return max_w
        assert self._moved_s is not None
        reached_s = self._judged_from_s - SETTLING_TIME_S
        return min(max_w, self._own_w(self._down_w_per_s) * (self._moved_s - reached_s))

    @property
    def measured_w(self) -> float:
        """The mean power over the window."""
        return self._recent_mean.mean_w()

    @property
    def judged_w(self) -> float | None:
        """The mean over the last ten seconds in which the limit had to be kept; None if there are none."""
        return self._judged.mean_w(SHORT_WINDOW_S) if self._judged.covered_s else None

    @property
    def judged_mean_w(self) -> float | None:
        """The mean over the part of the window in which the limit had to be kept; None if there is none."""
        return self._judged.mean_w() if self._judged.covered_s else None

    @property
    def judged_s(self) -> float:
        """How much time that mean covers."""
        return self._judged.covered_s

    def is_measured_within(self, limit_w: float) -> bool:
        """Return whether measured power keeps a limit, since it has had to be kept or else lately."""
        mean = self._judged if self._judged.covered_s >= SHORT_WINDOW_S else self._recent_mean
        return mean.covered_s >= SHORT_WINDOW_S and mean.mean_w() <= limit_w

    def is_above_power_cap(self, now_s: float) -> bool:
        """Return whether more than the power cap is drawn, and was all along for the averaging window.

        Unlike :meth:`is_kept`, this needs no limit that is reached and stays, and no plans that are measured.
        """
        return self.power_cap_w < math.inf and now_s - self._above_since_s >= self._recent_mean.window_s

    def in_transition(self, now_s: float) -> bool:
        """Return whether a limit can't be judged yet, or the power cap still rises after one."""
        if self.power_cap_w == math.inf:
            return False
        return now_s < self._judged_from_s or self._judged_from_s == math.inf

    def is_kept(self) -> bool:
        """Return whether the judged power keeps the limit; True until a whole window is measured."""
        if self._judged_from_s == math.inf:
            return True
        short_limit_w = SHORT_EXCESS * self._limit_w
        if (
            self._longest_iteration_s < SHORT_ITERATION_S
            and self._judged.covered_s >= SHORT_WINDOW_S
            and self._judged.mean_w(SHORT_WINDOW_S) > short_limit_w
        ):
            return False
        if self._judged.covered_s < self._judged.window_s - 1e-6:
            return True
        return self._judged.mean_w() <= self._limit_w * (1 + _DIGITS)
