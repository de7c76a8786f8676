"""Screen of `perseus top`: feeds, jobs by power draw, and one job's GPUs."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from perseus.cli.amounts import seconds
from perseus.cli.job_tables import budget_target_text, power_text, rank_table, saved_text, state_name
from perseus.cli.power_tables import feed_line, has_excess
from perseus.v1 import job_pb2, power_service_pb2, rank_pb2

_STYLES = {
    job_pb2.JOB_STATE_PLANNED: "green",
    job_pb2.JOB_STATE_STOCK: "yellow",
    job_pb2.JOB_STATE_WAITING: "yellow",
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The coordinators' answers at one moment; `ranks` are those of the job `job_id`, if one is selected.

    `missing`: which of them did not answer; empty if all did.
    """

    jobs: Sequence[job_pb2.Job]
    feeds: Sequence[power_service_pb2.FeedState] = ()
    ranks: Sequence[rank_pb2.Rank] = field(default=())
    job_id: str | None = None
    missing: str = ""

    @property
    def running(self) -> list[job_pb2.Job]:
        """The jobs that have not finished, by power draw."""
        running = (job for job in self.jobs if job.state != job_pb2.JOB_STATE_FINISHED)
        return sorted(running, key=lambda job: (-job.figures.power_w, job.job_id))


def screen(snapshot: Snapshot, row_count: int, trouble: str = "") -> RenderableType:
    """Return the screen with at most `row_count` rows of jobs and ranks; `trouble`: why it is outdated."""
    running = snapshot.running
    parts: list[RenderableType] = [Text(summary(running), style="bold")]
    if trouble:
        parts.append(Text(trouble, style="red"))
    parts += [
        Text(feed_line(feed), style="red" if has_excess(feed) else "")
        for feed in snapshot.feeds
        if feed.HasField("limit_w")
    ]
    parts.append(_jobs(running[:row_count]))
    if len(running) > row_count:
        parts.append(Text(f"… and {len(running) - row_count} more", style="dim"))
    parts += [
        Text(f"{job.job_id}: {job.next_step}", style="yellow")
        for job in (running[:row_count] if snapshot.job_id is None else running)
        if job.next_step and snapshot.job_id in (None, job.job_id)
    ]
    if snapshot.ranks:
        parts.append(rank_table(snapshot.ranks[:row_count]))
        if len(snapshot.ranks) > row_count:
            parts.append(Text(f"… and {len(snapshot.ranks) - row_count} more", style="dim"))
    return Group(*parts)


def summary(running: Iterable[job_pb2.Job]) -> str:
    """Return all running jobs in one line."""
    jobs = list(running)
    states = Counter(state_name(job.state) for job in jobs)
    counted = ", ".join(f"{count} {state}" for state, count in states.most_common())
    power_kw = sum(job.figures.power_w for job in jobs) / 1000
    rank_count = sum(job.rank_counts.connected_count for job in jobs)
    text = f"{len(jobs)} job{'s' * (len(jobs) != 1)}" + (f" ({counted})" if counted else "")
    return f"{text}, {rank_count} GPUs served, {power_kw:.1f} kW"


def _jobs(jobs: Iterable[job_pb2.Job]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for column in ("job", "state"):
        table.add_column(column, overflow="fold")
    for column in ("GPUs", "iteration", "saved", "slowdown", "power"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("held by", overflow="fold")
    for job in jobs:
        layout, figures = job.parallelism, job.figures
        count = layout.pipeline_count * layout.stage_count * layout.tensor_count
        table.add_row(
            Text(job.job_id),
            Text(state_name(job.state), style=_STYLES.get(job.state, "")),
            f"{job.rank_counts.connected_count}/{count}",
            seconds(figures.iteration_time_s) if figures.HasField("iteration_time_s") else "",
            saved_text(figures),
            f"{figures.saving.slowdown_percent:+z.1f} %" if figures.HasField("saving") else "",
            power_text(figures),
            Text(_holding(job)),
        )
    return table


def _holding(job: job_pb2.Job) -> str:
    """Return why a job is not at its fastest plan, in few words."""
    held = []
    if job.state != job_pb2.JOB_STATE_PLANNED and job.state_reason:
        held.append(job.state_reason)
    if job.straggler_count:
        held.append(f"{job.straggler_count} straggler{'s' * (job.straggler_count != 1)}")
    if job.HasField("budget_target_iteration_time_s"):
        held.append(f"a power budget: {budget_target_text(job)}")
    return "; ".join(held)
