"""Limits and power caps of feeds under their budgets; the lowest limit in force applies.

Power can't fall instantly, and an operator does not want it to: ramps are bounded both ways. So the *power
cap* starts to fall ahead of a budget that is known in advance, to reach its limit when the budget starts. For
a budget that starts at once, it falls from the present power. After the last budget, it rises before it is
lifted.
"""

import math
from collections.abc import Iterable, Sequence

from perseus.service.domain.power import Budget, Feed


def limit_w(budgets: Sequence[Budget], feed: Feed, now_s: float) -> float:
    """Return the lowest limit in force on a feed: of its budgets (else its default) and its rating.

    The result is infinite if there is none.
    """
    in_force_w = [budget.limit_w for budget in budgets if budget.is_in_force(now_s)]
    if not in_force_w and feed.default_w is not None:
        in_force_w = [feed.default_w]
    return min([*in_force_w, math.inf if feed.limit_w is None else feed.limit_w])


def ramp_down_w_per_s(budget: Budget, feed: Feed) -> float:
    """Return how fast the power cap falls to a budget's limit."""
    ramp_w_per_s = feed.ramp_down_w_per_s
    return ramp_w_per_s if budget.ramp_w_per_s is None else min(ramp_w_per_s, budget.ramp_w_per_s)


def goal_w(budgets: Sequence[Budget], feed: Feed, now_s: float) -> tuple[float, float]:
    """Return the power cap that a feed should have, and how fast it may fall to it, watts per second.

    The goal is low enough to reach each limit by the time that it comes into force.
    """
    ahead = [
        (ramp_down_w_per_s(each, feed), each.limit_w, max(0.0, each.start_s - now_s))
        for each in budgets
        if not each.is_over(now_s)
    ]
    if feed.limit_w is not None:
        ahead.append((feed.ramp_down_w_per_s, feed.limit_w, 0.0))
    if feed.default_w is not None and (begin_s := _default_begin_s(budgets, now_s)) < math.inf:
        ahead.append((feed.ramp_down_w_per_s, feed.default_w, begin_s - now_s))
    return min(
        ((limit + (ramp * wait_s if wait_s else 0.0), ramp) for ramp, limit, wait_s in ahead),
        default=(math.inf, feed.ramp_down_w_per_s),
    )


def _default_begin_s(budgets: Sequence[Budget], now_s: float) -> float:
    """Return the first time at which no budget is in force; infinite if one always is."""
    begin_s = now_s
    while in_force := [budget for budget in budgets if budget.is_in_force(begin_s)]:
        begin_s = max(math.inf if budget.end_s is None else budget.end_s for budget in in_force)
        if begin_s == math.inf:
            break
    return begin_s


def ramped_power_cap_w(
    power_cap_w: float,
    drawn_w: float,
    goal: float,
    ramps_w_per_s: tuple[float, float],
    elapsed_s: float,
) -> float:
    """Return the power cap some time later, on its way to the goal at no more than the ramps.

    Args:
        power_cap_w: the previous cap; infinite if there was none.
        drawn_w: the present power, from which a new cap falls.
        goal: the cap to reach.
        ramps_w_per_s: down and up.
        elapsed_s: since the previous cap.
    """
    down_w_per_s, up_w_per_s = ramps_w_per_s
    if power_cap_w == math.inf:
        if goal == math.inf:
            return math.inf
        power_cap_w = max(drawn_w, goal)
    if goal < power_cap_w:
        return max(goal, power_cap_w - _step_w(down_w_per_s, elapsed_s))
    return min(goal, power_cap_w + _step_w(up_w_per_s, elapsed_s))


def _step_w(ramp_w_per_s: float, elapsed_s: float) -> float:
    return math.inf if ramp_w_per_s == math.inf else ramp_w_per_s * elapsed_s


def next_change_s(budgets: Iterable[Budget], now_s: float) -> float:
    """Return the next time at which a budget starts or ends; infinite if none does."""
    times_s = (time_s for budget in budgets for time_s in (budget.start_s, budget.end_s))
    return min((time_s for time_s in times_s if time_s is not None and time_s > now_s), default=math.inf)
