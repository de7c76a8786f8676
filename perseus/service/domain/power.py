"""Power budgets as values: feeds, their limits, and the requests that set them."""

import enum
import hashlib
import math
from collections.abc import Collection
from dataclasses import dataclass

from perseus.service.domain.bounds import check_ascii, check_range, check_text
from perseus.service.domain.errors import BudgetOwnerMismatchError, InvalidFieldError
from perseus.service.domain.principals import Principal, Scope

MAX_IDENTIFIER_LENGTH = 128
MAX_TIME_S = 1e11
"""Since 1970: three thousand years."""
MAX_FEED_POWER_W = 1e12
"""Upper bound on the power of a feed or job: more than all data centres draw."""
MIN_RAMP_W_PER_S = 1e-3
MAX_PERCENT = 1000

DEFAULT_FEED = "default"
"""The feed of ranks whose host is on no configured feed."""


@dataclass(frozen=True, slots=True)
class Feed:
    """An electrical supply.

    Attributes:
        name: its identifier.
        reference_w: the power that percentages refer to; None if budgets can't be given in percent.
        ramp_down_w_per_s, ramp_up_w_per_s: how fast the power cap may move; jobs' plans are discrete, so
            power follows it in steps.
        limit_w: its rating, a limit that is always in force; None if unspecified.
        default_w: the limit while no budget is in force; None for none.

    Raises:
        InvalidFieldError: a figure is out of range.
    """

    name: str
    reference_w: float | None = None
    ramp_down_w_per_s: float = math.inf
    ramp_up_w_per_s: float = math.inf
    limit_w: float | None = None
    default_w: float | None = None

    def __post_init__(self) -> None:
        check_text("name", self.name, 1)
        for name, minimum in (("reference_w", 1), ("limit_w", 0), ("default_w", 0)):
            if (figure := getattr(self, name)) is not None:
                check_range(name, figure, minimum, MAX_FEED_POWER_W)
        for name in ("ramp_down_w_per_s", "ramp_up_w_per_s"):
            if not getattr(self, name) > 0:
                raise InvalidFieldError(field=name, expected="more than 0", found=getattr(self, name))


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit on a feed from a start to an end.

    Attributes:
        budget_id: its identifier; the same one again replaces it.
        feed: the feed's name.
        limit_w: the highest mean power allowed.
        start_s, end_s: seconds since 1970; in force from the start until before the end, or for good.
        correlation_id: the requester's own identifier for it.
        ramp_w_per_s: how fast the power cap falls to it, if slower than the feed's ramp; None for the feed's.

    Raises:
        InvalidFieldError: a figure is out of range, or the end is not after the start.
    """

    budget_id: str
    feed: str
    limit_w: float
    start_s: float
    end_s: float | None = None
    correlation_id: str = ""
    ramp_w_per_s: float | None = None

    def __post_init__(self) -> None:
        check_budget_id(self.budget_id)
        check_text("feed", self.feed, 1)
        check_text("correlation_id", self.correlation_id)
        check_range("limit_w", self.limit_w, 0, MAX_FEED_POWER_W)
        check_range("start_s", self.start_s, 0, MAX_TIME_S)
        if self.ramp_w_per_s is not None:
            check_range("ramp_w_per_s", self.ramp_w_per_s, MIN_RAMP_W_PER_S, MAX_FEED_POWER_W)
        if self.end_s is not None:
            check_range("end_s", self.end_s, 0, MAX_TIME_S)
            if self.end_s <= self.start_s:
                expected = f"after the start, {self.start_s:g}"
                raise InvalidFieldError(field="end_s", expected=expected, found=f"{self.end_s:g}")

    def is_in_force(self, now_s: float) -> bool:
        """Return whether it limits its feed at a time."""
        return self.start_s <= now_s and not self.is_over(now_s)

    def is_over(self, now_s: float) -> bool:
        """Return whether it has ended by a time."""
        return self.end_s is not None and now_s >= self.end_s


def check_budget_id(budget_id: str) -> str:
    """Return a budget's identifier after checking it.

    Raises:
        InvalidFieldError: it is empty, too long or not of printable ASCII characters.
    """
    check_ascii("budget_id", budget_id, 1, MAX_IDENTIFIER_LENGTH)
    return budget_id


def percent_of_reference_w(feed: Feed, percent: float) -> float:
    """Convert a limit in percent of the feed's reference to watts.

    Raises:
        InvalidFieldError: the percentage is out of range, or the feed has no reference.
    """
    check_range("percent", percent, 0, MAX_PERCENT)
    if feed.reference_w is None:
        expected = f"a reference of feed {feed.name!r}, for a limit in percent"
        raise InvalidFieldError(field="percent", expected=expected, found="none")
    return feed.reference_w * percent / 100


class BudgetStage(enum.Enum):
    """The stage of a budget's life cycle."""

    SCHEDULED = "scheduled"
    IN_FORCE = "in force"
    ENDED = "ended"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class BudgetRecord:
    """A budget as it was accepted, stored and shown.

    Attributes:
        budget: the enforced budget.
        request_id: of the request that set it last; repeating that request changes nothing.
        principal: who set it first, and owns it; "" if unknown.
        set_time_s: when, on the wall clock.
        percent: the limit in percent of the feed's reference at that time, if it was given in percent.
        cancel_time_s: when it was cancelled; None if it was not.
    """

    budget: Budget
    request_id: str
    principal: str
    set_time_s: float
    percent: float | None = None
    cancel_time_s: float | None = None

    def check_owner(self, principal: Principal) -> None:
        """Check that a principal may replace or cancel it: its owner or an operator.

        Raises:
            BudgetOwnerMismatchError: it may not.
        """
        if principal.grant.scope is not Scope.OPERATOR and principal.name != self.principal:
            raise BudgetOwnerMismatchError(
                budget_id=self.budget.budget_id,
                owner=self.principal or "an unknown principal",
                principal=principal.name,
            )

    @property
    def over_time_s(self) -> float | None:
        """When it stops limiting its feed; None if unknown."""
        return self.cancel_time_s if self.cancel_time_s is not None else self.budget.end_s

    def is_over(self, now_s: float) -> bool:
        """Return whether it has ended by a time or was cancelled."""
        return self.cancel_time_s is not None or self.budget.is_over(now_s)

    def stage(self, now_s: float) -> BudgetStage:
        """Return its stage at a time."""
        if self.cancel_time_s is not None:
            return BudgetStage.CANCELLED
        if self.budget.is_over(now_s):
            return BudgetStage.ENDED
        return BudgetStage.IN_FORCE if self.budget.is_in_force(now_s) else BudgetStage.SCHEDULED


@dataclass(frozen=True, slots=True)
class UnreadableBudget:
    """An accepted budget whose stored form can't be read.

    Attributes:
        budget_id: its identifier.
        over_time_s: when it stops limiting its feed; None if unknown.
        feed, limit_w: its feed and limit; None if unreadable.
        problem: why it can't be read.
    """

    budget_id: str
    over_time_s: float | None
    feed: str | None
    limit_w: float | None
    problem: str

    def in_its_place(self, feeds: Collection[str]) -> list[Budget]:
        """Return budgets at least as strict: of 0 W if its limit is unknown, on all feeds if its feed is."""
        limit_w = self.limit_w if self.limit_w is not None and 0 <= self.limit_w <= MAX_FEED_POWER_W else 0.0
        is_known = self.over_time_s is not None and 0 < self.over_time_s <= MAX_TIME_S
        names = [self.feed] if self.feed is not None and self.feed in feeds else sorted(feeds)
        try:
            first_id = check_budget_id(self.budget_id)
        except InvalidFieldError:
            first_id = f"unreadable-{hashlib.sha256(repr(self.budget_id).encode()).hexdigest()[:16]}"
        ids = [first_id, *(f"{first_id[:64]} on {number}" for number in range(1, len(names)))]
        return [
            Budget(budget_id, name, limit_w, 0.0, self.over_time_s if is_known else None)
            for budget_id, name in zip(ids, names, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class BudgetRequest:
    """A requested budget: a limit in watts, or in percent of its feed's reference.

    Times are on the wall clock; without a start, it starts now.
    """

    budget_id: str
    request_id: str
    feed: str
    limit_w: float | None
    percent: float | None
    start_s: float | None
    end_s: float | None
    ramp_w_per_s: float | None
    correlation_id: str


@dataclass(frozen=True, slots=True)
class FeedStatus:
    """The status of a feed, published whenever anything but its powers changes.

    Attributes:
        feed: its name.
        limit_w: the lowest limit in force; None if there is none.
        in_transition: its power cap is still moving, or was a few seconds ago.
        is_compliant: plans and measurements keep the limit, or it can't be judged yet.
        to_pause: jobs that would have to be paused to keep the limit.
        beyond_tolerance: jobs on it whose fastest plan is slower than their owners allow.
        measured_w: mean over the longer of a minute and three iterations.
        managed_w: the expected power of planned jobs.
        unmanaged_w: the recent power of jobs without plans and of GPUs in no job.
        power_cap_w: the power that may be drawn now; None if there is no limit.
        held: jobs on it that a budget slows down.
        judged_w: mean over the last ten seconds in which the limit had to be kept; None if there are none.
        judged_mean_w, judged_s: the mean that decides whether the limit is kept, and the time that it covers;
            None and 0 while the limit does not have to be kept.
        is_above_power_cap: more than the power cap was drawn all along for the averaging window.
        conflicting_gpu_count: GPUs with conflicting readings.
    """

    feed: str
    limit_w: float | None
    in_transition: bool
    is_compliant: bool
    to_pause: tuple[str, ...]
    beyond_tolerance: tuple[str, ...]
    measured_w: float
    managed_w: float
    unmanaged_w: float
    power_cap_w: float | None
    held: tuple[str, ...]
    judged_w: float | None
    judged_mean_w: float | None
    judged_s: float
    is_above_power_cap: bool
    conflicting_gpu_count: int = 0
