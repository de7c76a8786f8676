"""The display of the power budget demo: live on a terminal, line by line elsewhere."""

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from perseus.demo.grid_scenario import STEPS, TERMS, GridOutcome
from perseus.demo.power_log import Sample, summary
from perseus.demo.screen import Screen, steps_table
from perseus.demo.site_watch import SiteWatch
from perseus.v1 import job_pb2

_DESCRIPTIONS = dict(
    zip(
        STEPS,
        (
            "each job's clocks are tried while it trains, and its frontier is solved",
            "every job runs its own plan",
            "the power cap falls by its ramp; the jobs give up what costs least",
            "further down, within each job's tolerance",
            "back up",
        ),
        strict=True,
    )
)
WORDS = {
    "budget": "a limit on the power of all jobs, for a time",
    "power cap": "what they may draw now; it falls and rises by ramps",
    "may lose": "the share of a job's speed that its owner lets budgets take",
    "weight": "how much a job's lost speed counts against that of others",
    "speed": "of an iteration, relative to the GPUs' highest clocks",
}
"""The words that the demo's lines use."""

_BAR = 40


class GridLiveDisplay(Screen):
    """Shows steps, jobs and the feed; a context manager."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, "Perseus demo: a power budget", _DESCRIPTIONS)
        self._printed: dict[str, str] = {}

    def refresh(self, watch: SiteWatch) -> None:
        """Show the current state."""
        if self.is_live:
            done = dict.fromkeys(STEPS[: STEPS.index(self.step)], "")
            self.show(Group(steps_table(STEPS, _DESCRIPTIONS, self.step, done), _jobs(watch), _feed(watch)))
            return
        for job_id, job in watch.jobs.items():
            state = job_pb2.JobState.Name(job.state).removeprefix("JOB_STATE_").lower()
            if self._printed.get(job_id) != state:
                self._printed[job_id] = state
                self.print_line(f"{job_id}: {state}")


def _jobs(watch: SiteWatch) -> RenderableType:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("job", "state", "iteration", "speed", "power", "may lose", "weight"):
        table.add_column(column, justify="left" if column in ("job", "state") else "right")
    latest = watch.log.samples[-1] if watch.log.samples else Sample(0.0, {}, {})
    for job_id, job in sorted(watch.jobs.items()):
        tolerance_percent, weight = TERMS[job_id]
        speed = latest.speeds.get(job_id)
        state = job_pb2.JobState.Name(job.state).removeprefix("JOB_STATE_").lower()
        is_held = job.HasField("budget_target_iteration_time_s")
        table.add_row(
            job_id,
            Text.assemble(state, (" held back", "yellow")) if is_held else state,
            f"{job.figures.iteration_time_s:.3f} s" if job.figures.iteration_time_s else "",
            f"{100 * speed:.0f} %" if speed else "",
            f"{latest.powers_w.get(job_id, 0.0):.0f} W",
            f"{tolerance_percent:g} %",
            f"{weight:g}",
        )
    return table


def _feed(watch: SiteWatch) -> RenderableType:
    if not watch.log.samples:
        return Text("")
    latest = watch.log.samples[-1]
    max_w = max(sample.power_w for sample in watch.log.samples)
    filled = round(_BAR * latest.power_w / max_w) if max_w else 0
    parts: list[str | tuple[str, str]] = [
        "\n  ",
        ("█" * filled, "green" if latest.power_w <= latest.power_cap_w else "red"),
        ("░" * (_BAR - filled), "dim"),
        f"  {latest.power_w:.0f} W",
    ]
    if latest.limit_w < float("inf"):
        parts.append(f"   limit {latest.limit_w:.0f} W, power cap now {latest.power_cap_w:.0f} W")
        parts.append(("   not kept", "red") if not latest.is_compliant else ("   kept", "green"))
    return Text.assemble(*parts)


def grid_table(outcome: GridOutcome) -> Table:
    """Return the closing table."""
    table = Table(title="Power from the GPUs' counters, and speed against stock")
    table.add_column("phase", no_wrap=True)
    for column in ("limit", "mean power", "worst 10 s", *TERMS):
        table.add_column(column, justify="right", no_wrap=True)
    for row in summary(outcome.log, outcome.phases, list(TERMS)):
        speeds = (row["speeds"][job_id] for job_id in TERMS)
        table.add_row(
            row["name"],
            f"{row['limit_w']:.0f} W" if row["limit_w"] is not None else "",
            f"{row['power_w']:.0f} W",
            f"{row['worst_ten_second_mean_w']:.0f} W",
            *("" if speed is None else f"{100 * speed:.1f} %" for speed in speeds),
        )
    return table
