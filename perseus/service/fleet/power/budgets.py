"""Feeds, and the budgets that limit them for a time; the lowest of those in force counts.

Power can't fall in no time, and an operator does not want it to: ramps are bounded both ways. So what jobs
may draw, the *ceiling*, runs ahead of a budget that is known in advance, to be at its limit when it starts;
for one that is set at once it falls from what is drawn; and after the last one it rises again before it is
lifted.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from perseus.service.domain.bounds import check_ascii, check_range, check_text
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.fleet.power.demand import MAX_FEED_POWER_W

MAX_IDENTIFIER_LENGTH = 128
MAX_TIME_S = 1e11
"""Since 1970: three thousand years."""


@dataclass(frozen=True, slots=True)
class Feed:
    """A supply.

    Attributes:
        name: by which ranks are on it.
        reference_w: what percentages are of; None if no budget may be given in percent.
        ramp_down_w_per_s, ramp_up_w_per_s: how fast the ceiling may move; jobs' plans are apart by steps,
            so power follows it in steps.

    Raises:
        InvalidFieldError: a figure is out of range.
    """

    name: str
    reference_w: float | None = None
    ramp_down_w_per_s: float = math.inf
    ramp_up_w_per_s: float = math.inf

    def __post_init__(self) -> None:
        check_text("name", self.name, 1)
        if self.reference_w is not None:
            check_range("reference_w", self.reference_w, 1, MAX_FEED_POWER_W)
        for name in ("ramp_down_w_per_s", "ramp_up_w_per_s"):
            if not getattr(self, name) > 0:
                raise InvalidFieldError(field=name, expected="more than 0", found=getattr(self, name))


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit on a feed from a start to an end.

    Attributes:
        budget_id: its identifier; the same one again replaces it.
        feed: the feed's name.
        limit_w: the most that may be drawn on average.
        start_s, end_s: seconds since 1970; in force from the start until before the end, or for good.
        correlation_id: what whoever asked calls it.

    Raises:
        InvalidFieldError: a figure is out of range, or the end is not after the start.
    """

    budget_id: str
    feed: str
    limit_w: float
    start_s: float
    end_s: float | None = None
    correlation_id: str = ""

    def __post_init__(self) -> None:
        check_ascii("budget_id", self.budget_id, 1, MAX_IDENTIFIER_LENGTH)
        check_text("feed", self.feed, 1)
        check_text("correlation_id", self.correlation_id)
        check_range("limit_w", self.limit_w, 0, MAX_FEED_POWER_W)
        check_range("start_s", self.start_s, 0, MAX_TIME_S)
        if self.end_s is not None:
            check_range("end_s", self.end_s, 0, MAX_TIME_S)
            if self.end_s <= self.start_s:
                expected = f"after the start, {self.start_s:g}"
                raise InvalidFieldError(field="end_s", expected=expected, found=f"{self.end_s:g}")

    def is_in_force(self, now_s: float) -> bool:
        """Whether it limits its feed at that time."""
        return self.start_s <= now_s and not self.is_over(now_s)

    def is_over(self, now_s: float) -> bool:
        """Whether it will not limit its feed any more."""
        return self.end_s is not None and now_s >= self.end_s


def percent_of_reference_w(feed: Feed, percent: float) -> float:
    """Return a limit that is given in percent of the feed's reference.

    Raises:
        InvalidFieldError: it is none, or the feed has no reference.
    """
    check_range("percent", percent, 0, 1000)
    if feed.reference_w is None:
        expected = f"a reference of feed {feed.name!r}, for a limit in percent"
        raise InvalidFieldError(field="reference_w", expected=expected, found="none")
    return feed.reference_w * percent / 100


def limit_w(budgets: Iterable[Budget], now_s: float) -> float:
    """Return the lowest limit in force among the budgets of one feed; infinite if none is."""
    return min((budget.limit_w for budget in budgets if budget.is_in_force(now_s)), default=math.inf)


def goal_w(budgets: Iterable[Budget], feed: Feed, now_s: float) -> float:
    """Return where the feed's ceiling belongs: low enough to be at each limit when that comes into force."""
    return min(
        (
            budget.limit_w + feed.ramp_down_w_per_s * (budget.start_s - now_s)
            if now_s < budget.start_s
            else budget.limit_w
            for budget in budgets
            if not budget.is_over(now_s)
        ),
        default=math.inf,
    )


def moved_ceiling_w(feed: Feed, ceiling_w: float, drawn_w: float, goal: float, elapsed_s: float) -> float:
    """Return the ceiling some time later, on its way to the goal no faster than the feed's ramps.

    Args:
        feed: whose ramps bound it.
        ceiling_w: where it was; infinite if nothing was limited.
        drawn_w: what is drawn, from where it falls if nothing was limited.
        goal: where it belongs.
        elapsed_s: since it was where it was.
    """
    if ceiling_w == math.inf:
        if goal == math.inf:
            return math.inf
        ceiling_w = max(drawn_w, goal)
    if goal < ceiling_w:
        return max(goal, ceiling_w - _step_w(feed.ramp_down_w_per_s, elapsed_s))
    return min(goal, ceiling_w + _step_w(feed.ramp_up_w_per_s, elapsed_s))


def _step_w(ramp_w_per_s: float, elapsed_s: float) -> float:
    return math.inf if ramp_w_per_s == math.inf else ramp_w_per_s * elapsed_s


def next_change_s(budgets: Iterable[Budget], now_s: float) -> float:
    """Return when a budget starts or ends next; infinite if none does."""
    times_s = (time_s for budget in budgets for time_s in (budget.start_s, budget.end_s))
    return min((time_s for time_s in times_s if time_s is not None and time_s > now_s), default=math.inf)
