"""One feed's limit in reality: where its ceiling is, what was drawn against it, and what that leaves. Pure.

Plans promise a power that GPUs do not keep to the watt. Each job's deviation is known from what it drew
before (:mod:`perseus.service.fleet.power.meter`), and what still goes wrong is paid back: what was drawn
above a limit in the window over which it counts is taken off the target until the window's mean is right.

Jobs without plans (their baseline is measured, they are profiled, at stock) draw what they like, and others
make room for that as far as their owners allow. What is missing then is taken from their clocks: power falls
at least as fast as the clock where voltage falls with it, so a share of the power is had by no more than the
same share of the highest clock. Below that, where it does not, the limit may not be kept, which is said.
"""

import math

from perseus.service.domain.power import Budget, Feed
from perseus.service.fleet.power import budgets
from perseus.service.fleet.power.meter import RECENT_S, MovingAverage

MIN_WINDOW_S = 60.0
WINDOW_ITERATIONS = 3
SHORT_WINDOW_S = 10.0
SHORT_EXCESS = 1.02
SHORT_ITERATION_S = 2.0
"""Where iterations take less, means over ten seconds may be 2 % above the limit, and no more."""

MARGIN = 0.006
"""Of the limit, not planned with: what noise there is in a minute's mean must not break it."""

UNTRIED_MARGIN = 0.025
"""The same until plans that keep the limit have been measured for a while: under plans that are new to them
jobs draw up to 2 % more than their others let expect."""

SETTLING_TIME_S = 5.0
"""Until a change of pace has come to all GPUs, at most."""

CLOCK_STEP = 0.05
"""Of the highest clock: noise is not to move ceilings, as each change spoils an iteration."""

_PAY_BACK_S = 15.0
_DIGITS = 1e-9


class FeedWatch:
    """Follows one feed.

    Attributes:
        feed: its name and ramps.
        ceiling_w: what may be drawn now; infinite where nothing limits it.
        rose_s: when the ceiling was on its way up last.
        others: what GPUs in no job drew.
        clock_share: of their highest clocks, what jobs without plans may have; 1 if all.
        managed_w, unmanaged_w: what planned jobs, and all others, are expected to draw at the paces in force.
        most_w: what all would draw if nothing were limited.
        job_ids: jobs that draw on it.
    """

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.power_cap_w = math.inf
        self.rose_s = -math.inf
        self.others = MovingAverage(RECENT_S)
        self.clock_share = 1.0
        self.begin_sums()
        self._moved_s: float | None = None
        self._down_w_per_s = math.inf
        self._limit_w = math.inf
        self._judged_from_s = math.inf
        self._recent_mean = MovingAverage(MIN_WINDOW_S)
        self._judged = MovingAverage(MIN_WINDOW_S)
        self._longest_iteration_s = 0.0

    def begin_sums(self) -> None:
        """Begin to add up what is expected; jobs are to follow."""
        self.managed_w = 0.0
        self.unmanaged_w = self.max_w = self.others.mean_w()
        self.job_ids: list[str] = []

    def add(self, job_id: str, power_w: float, max_w: float, *, is_planned: bool) -> None:
        """Add what a job is expected to draw, and would if nothing were limited."""
        if is_planned:
            self.managed_w += power_w
        else:
            self.unmanaged_w += power_w
        self.max_w += max_w
        if power_w > 0:
            self.job_ids.append(job_id)

    @property
    def expected_w(self) -> float:
        """What is expected to be drawn in all."""
        return self.managed_w + self.unmanaged_w

    def move(self, some: list[Budget], now_s: float) -> None:
        """Let time pass: the ceiling goes where the budgets want it."""
        elapsed_s = 0.0 if self._moved_s is None else now_s - self._moved_s
        self._moved_s = now_s
        goal_w, self._down_w_per_s = budgets.goal_w(some, self.feed, now_s)
        before_w = self.power_cap_w
        self.power_cap_w = budgets.ramped_power_cap_w(
            power_cap_w=before_w,
            drawn_w=min(self.expected_w, self.max_w),
            goal=goal_w,
            ramps_w_per_s=(self._down_w_per_s, self.feed.ramp_up_w_per_s),
            elapsed_s=elapsed_s,
        )
        if before_w < self.power_cap_w < math.inf:
            self.rose_s = now_s
        limit_w = budgets.limit_w(some, self.feed, now_s)
        if limit_w == math.inf and min(goal_w, self.power_cap_w) >= self.max_w:
            self.power_cap_w = math.inf  # nobody would draw more
        is_reached = limit_w < math.inf and self.power_cap_w <= limit_w * (1 + _DIGITS)
        if limit_w != self._limit_w or not is_reached:
            # A mean counts from when the limit had to be kept; and only against a limit that was the same.
            self._judged.clear()
            self._judged_from_s = now_s + SETTLING_TIME_S if is_reached else math.inf
            self._limit_w = limit_w if is_reached else math.nan
        elif limit_w == math.inf:
            self._judged_from_s = math.inf

    def share_clocks(self, free_w: float, left_w: float) -> None:
        """Take what jobs without plans draw if nothing holds them down, and what is left to them.

        Their share falls at once, and rises when there is room for more than a step.
        """
        share = math.inf if free_w <= 0 else max(0.0, left_w) / free_w
        if self.clock_share <= share < self.clock_share + 2 * CLOCK_STEP and self.clock_share < 1:
            return
        self.clock_share = 1.0 if share >= 1 else math.floor(share / CLOCK_STEP) * CLOCK_STEP

    def take(
        self, now_s: float, duration_s: float, power_w: float, others_w: float, longest_iteration_s: float
    ) -> None:
        """Take what was drawn over the time until now, in all and by GPUs in no job."""
        self.others.take(now_s, duration_s, others_w)
        self._longest_iteration_s = longest_iteration_s
        window_s = max(MIN_WINDOW_S, WINDOW_ITERATIONS * longest_iteration_s)
        for mean in (self._recent_mean, self._judged):
            mean.window_s = window_s
        self._recent_mean.take(now_s, duration_s, power_w)
        if now_s - duration_s >= self._judged_from_s:
            self._judged.take(now_s, duration_s, power_w)

    @property
    def target_w(self) -> float:
        """What plans may add up to: the ceiling, less the margin and what is to be paid back."""
        debt_j = 0.0
        if self._judged.covered_s:
            debt_j = max(0.0, self._judged.covered_s * (self._judged.mean_w() - self.power_cap_w))
        return max(0.0, self.ramped_w - self.power_cap_w * MARGIN - debt_j / _PAY_BACK_S)

    @property
    def ramped_w(self) -> float:
        """What jobs may be expected to draw: the ceiling; less while plans that keep it are new."""
        return self.power_cap_w - self._untried_w()

    def _untried_w(self) -> float:
        """What more is left free while plans that keep the limit are new; the way there keeps the ramp."""
        if self._judged_from_s == math.inf or self._judged.covered_s >= SHORT_WINDOW_S:
            return 0.0
        max_w = self.power_cap_w * (UNTRIED_MARGIN - MARGIN)
        if self._down_w_per_s == math.inf:
            return max_w
        assert self._moved_s is not None
        reached_s = self._judged_from_s - SETTLING_TIME_S
        return min(max_w, self._down_w_per_s * (self._moved_s - reached_s))

    @property
    def measured_w(self) -> float:
        """The mean over the window."""
        return self._recent_mean.mean_w()

    @property
    def judged_w(self) -> float | None:
        """The mean over the last ten seconds in which the limit had to be kept; None if there are none."""
        return self._judged.mean_w(SHORT_WINDOW_S) if self._judged.covered_s else None

    def in_transition(self, now_s: float) -> bool:
        """Whether a limit can't be judged yet, or the ceiling still rises after one."""
        if self.power_cap_w == math.inf:
            return False
        return now_s < self._judged_from_s or self._judged_from_s == math.inf

    def is_kept(self) -> bool:
        """Whether what was measured since the limit had to be kept keeps it; no judgement before a window."""
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
