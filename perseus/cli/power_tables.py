"""Tables of `perseus power`."""

from collections.abc import Iterable

from google.protobuf.timestamp_pb2 import Timestamp
from rich.table import Table

from perseus.v1.power_service_pb2 import Budget, BudgetState, FeedState


def budget_table(budgets: Iterable[Budget]) -> Table:
    """Return a table with one line for each budget."""
    table = Table("budget", "feed", "state", "limit, W", "from (UTC)", "until (UTC)", "set by", "correlation")
    for budget in budgets:
        limit = f"{budget.limit_w:.0f}"
        if budget.HasField("percent"):
            limit += f" ({budget.percent:g} %)"
        table.add_row(
            budget.budget_id,
            budget.feed,
            BudgetState.Name(budget.state).removeprefix("BUDGET_STATE_").lower().replace("_", " "),
            limit,
            _shown(budget.start_time),
            _shown(budget.end_time) if budget.HasField("end_time") else "cancelled",
            budget.principal,
            budget.correlation_id,
        )
    return table


def feed_table(feeds: Iterable[FeedState]) -> Table:
    """Return a table with one line for each feed."""
    columns = ("limit, W", "may draw, W", "drawn, W", "planned, W", "others, W", "kept", "held back")
    table = Table("feed", *columns)
    for feed in feeds:
        table.add_row(
            feed.feed,
            f"{feed.limit_w:.0f}" if feed.HasField("limit_w") else "none",
            f"{feed.power_cap_w:.0f}" if feed.HasField("power_cap_w") else "anything",
            f"{feed.measured_w:.0f}",
            f"{feed.managed_w:.0f}",
            f"{feed.unmanaged_w:.0f}",
            _kept(feed),
            " ".join(feed.slowed_job_ids),
        )
    return table


def feed_line(feed: FeedState) -> str:
    """Return a feed's state in one line."""
    if not feed.HasField("limit_w") and not feed.HasField("power_cap_w"):
        return f"{feed.feed}: {feed.measured_w:.0f} W drawn, no limit"
    limit = f"{feed.limit_w:.0f} W" if feed.HasField("limit_w") else "none yet"
    line = f"{feed.feed}: {feed.measured_w:.0f} W drawn, limit {limit}, {_kept(feed)}"
    return f"{line}; held back: {' '.join(feed.slowed_job_ids)}" if feed.slowed_job_ids else line


def _kept(feed: FeedState) -> str:
    if not feed.is_compliant:
        paused = f", pause {' '.join(feed.job_ids_to_pause)}" if feed.job_ids_to_pause else ""
        return f"NOT KEPT{paused}{_conflicts(feed)}"
    return f"{'in transition' if feed.is_in_transition else 'kept'}{_conflicts(feed)}"


def _conflicts(feed: FeedState) -> str:
    if not feed.conflicting_gpu_count:
        return ""
    return f", {feed.conflicting_gpu_count} GPUs with conflicting readings"


def _shown(moment: Timestamp) -> str:
    return f"{moment.ToDatetime():%Y-%m-%d %H:%M:%S}"
