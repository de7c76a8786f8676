"""Tables of `perseus power`."""

from collections.abc import Iterable

from google.protobuf.timestamp_pb2 import Timestamp
from rich.table import Table

from perseus.v1.power_service_pb2 import Budget, BudgetState, FeedState


def budget_table(budgets: Iterable[Budget]) -> Table:
    """Return a table with one line for each budget."""
    table = Table("budget", "feed", "state", "limit, W")
    table.add_column("from – until (UTC)", no_wrap=True)
    table.add_column("set by", overflow="fold")
    for budget in budgets:
        table.add_row(
            budget.budget_id,
            budget.feed,
            BudgetState.Name(budget.state).removeprefix("BUDGET_STATE_").lower().replace("_", " "),
            _limit(budget),
            f"{_shown(budget.start_time)} –\n{_until(budget)}",
            ", ".join(filter(None, (budget.principal, budget.correlation_id))),
        )
    return table


def budget_text(budget: Budget) -> str:
    """Return a budget in one line."""
    span = f"{_shown(budget.start_time)} – {_until(budget)}"
    return f"{budget.budget_id}, feed {budget.feed}, {_limit(budget)} W, {span}"


def limit_text(limit_w: float, percent: float | None, ramp_w_per_s: float | None) -> str:
    """Return a budget's limit in watts, with its percentage and its ramp if it has them."""
    limit = f"{limit_w:.0f}"
    if percent is not None:
        limit += f" ({percent:g} %)"
    if ramp_w_per_s is not None:
        limit += f", ramp {ramp_w_per_s:g} W/s"
    return limit


def feed_table(feeds: Iterable[FeedState]) -> Table:
    """Return a table with one line for each feed."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("feed", overflow="fold")
    for column in ("limit, W", "power cap, W", "judged mean, W", "drawn, W", "plans + others, W"):
        table.add_column(column, justify="right")
    table.add_column("state", overflow="fold")
    for feed in feeds:
        table.add_row(
            feed.feed,
            f"{feed.limit_w:.0f}" if feed.HasField("limit_w") else "none",
            f"{feed.power_cap_w:.0f}" if feed.HasField("power_cap_w") else "none",
            judged_mean(feed),
            f"{feed.measured_w:.0f}",
            f"{feed.managed_w:.0f} + {feed.unmanaged_w:.0f}",
            state_text(feed) + _slowed(feed),
        )
    return table


def feed_line(feed: FeedState) -> str:
    """Return a feed's state in one line."""
    if not feed.HasField("limit_w") and not feed.HasField("power_cap_w"):
        return f"{feed.feed}: {feed.measured_w:.0f} W drawn, no limit"
    limit = f"limit {feed.limit_w:.0f} W" if feed.HasField("limit_w") else "limit none yet"
    if feed.is_in_transition and feed.HasField("power_cap_w"):
        limit += f", power cap {feed.power_cap_w:.0f} W"
    judged = f", judged mean {mean}" if (mean := judged_mean(feed, unit=" W")) else ""
    line = f"{feed.feed}: {feed.measured_w:.0f} W drawn, {limit}{judged}, {state_text(feed)}"
    return line + _slowed(feed)


def has_excess(feed: FeedState) -> bool:
    """Return whether a feed draws more than it may, or will."""
    return feed.is_above_power_cap or not feed.is_compliant


def judged_mean(feed: FeedState, unit: str = "") -> str:
    """Return the mean that decides whether the limit is kept, with its time; "" if none does."""
    if not feed.HasField("judged_mean_w"):
        return ""
    return f"{feed.judged_mean_w:.0f}{unit} in {feed.judged_s:.0f} s"


def state_text(feed: FeedState) -> str:
    """Return whether a feed keeps its limit and its power cap."""
    if feed.is_above_power_cap:
        state = "ABOVE POWER CAP"
    elif not feed.is_compliant:
        state = "NOT KEPT"
    elif feed.is_in_transition:
        state = "in transition"
    elif not feed.HasField("limit_w"):
        state = "no limit"
    elif not feed.HasField("judged_mean_w") or feed.judged_mean_w > feed.limit_w:
        state = "not judged yet"
    else:
        state = "kept"
    if feed.job_ids_to_pause and not feed.is_compliant:
        state += f", pause {' '.join(feed.job_ids_to_pause)}"
    return f"{state}{_conflicts(feed)}"


def _slowed(feed: FeedState) -> str:
    return f"; slowed: {' '.join(feed.slowed_job_ids)}" if feed.slowed_job_ids else ""


def _conflicts(feed: FeedState) -> str:
    if not feed.conflicting_gpu_count:
        return ""
    return f", {feed.conflicting_gpu_count} GPUs with conflicting readings"


def _limit(budget: Budget) -> str:
    return limit_text(
        budget.limit_w,
        budget.percent if budget.HasField("percent") else None,
        budget.ramp_w_per_s if budget.HasField("ramp_w_per_s") else None,
    )


def _until(budget: Budget) -> str:
    """Return when a budget ends, or ended."""
    if budget.HasField("cancel_time"):
        return _shown(budget.cancel_time)
    return _shown(budget.end_time) if budget.HasField("end_time") else "until cancelled"


def _shown(moment: Timestamp) -> str:
    return f"{moment.ToDatetime():%Y-%m-%d %H:%M:%S}"
