"""The demo's display: live on a terminal, line by line elsewhere."""

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from perseus.demo.observation import Observer
from perseus.demo.screen import Screen, steps_table
from perseus.demo.straggler_scenario import STEPS
from perseus.demo.summary import Phase
from perseus.printable import printable

_EVENT_LINES = 7
_DESCRIPTIONS = dict(
    zip(
        STEPS,
        (
            "every GPU at its highest clock, as without Perseus",
            "one clock after another is tried, to measure time and energy",
            "a clock for every computation: as fast, with less energy",
            "one pipeline has become slower; nobody reports it",
            "Perseus has found it; the other slows down and saves more",
            "the slow pipeline is fast again; so is the other",
        ),
        strict=True,
    )
)
WORDS = {
    "iteration": "one training step of the whole job",
    "pipeline": "one copy of the model, cut into stages with a GPU each",
    "rank": "a trainer with its GPU; tensor: its tensor-parallel number",
    "stock": "the clocks that GPUs have without Perseus",
    "hold": "one clock for a whole pipeline, to measure it",
    "plan": "a clock for every computation of an iteration",
    "frontier": "the plans to choose from, fastest (T_min) to slowest (T_slow)",
    "version": "number of a plan or hold; in force: the pipeline's GPUs run it",
    "straggler": "a pipeline slower than its plan; the others wait for it",
}
"""The words that the demo's lines use."""


class LiveDisplay(Screen):
    """Shows steps, pipelines and events; a context manager."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, "Perseus demo", _DESCRIPTIONS)
        self._printed_events = 0

    def refresh(self, observer: Observer) -> None:
        """Show the observer's current state."""
        if self.is_live:
            done = {
                phase.name: f"{phase.iteration_time_s:.3f} s   {phase.energy_j_per_iteration:.0f} J"
                for phase in observer.measurements.phases
            }
            steps = steps_table(STEPS, _DESCRIPTIONS, self.step, done)
            self.show(Group(steps, _pipelines(observer), _events(observer)))
            return
        for event in observer.events[self._printed_events :]:
            self.print_line(printable(event.message))
        self._printed_events = len(observer.events)


def _pipelines(observer: Observer) -> RenderableType:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("pipeline", "iteration", "time", "energy", "planned time", "version in force"):
        table.add_column(column, justify="right")
    job = observer.job
    if job is None:
        return table
    slow = {straggler.pipeline for straggler in job.stragglers}
    for pipeline in range(job.parallelism.pipeline_count):
        latest = observer.measurements.latest_of(pipeline)
        planned = list(job.planned_iteration_time_s)
        table.add_row(
            Text.assemble(f"{pipeline} ", ("straggler", "red")) if pipeline in slow else str(pipeline),
            str(latest.number) if latest else "",
            f"{latest.time_s:.3f} s" if latest else "",
            f"{latest.energy_j:.0f} J" if latest else "",
            f"{planned[pipeline] + job.iteration_overhead_s:.3f} s" if planned else "",
            str(observer.in_force_version(pipeline) or "stock"),
        )
    return table


def _events(observer: Observer) -> RenderableType:
    lines = [f"{event.sequence:>4}  {printable(event.message)}" for event in observer.events[-_EVENT_LINES:]]
    return Text("\n".join(lines), style="dim", no_wrap=True, overflow="ellipsis")


def phase_table(phases: list[Phase]) -> Table:
    """Return the closing table."""
    table = Table(
        title="Mean of an iteration, by the trainers' clocks and the energy counters",
        caption="slowdown, saved energy: against the phase of the last column",
        caption_justify="left",
    )
    table.add_column("phase", no_wrap=True)
    for column in ("count", "iteration", "energy", "slowdown", "saved"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("against")
    for phase in phases:
        is_own_measure = phase.compared_with == phase.name
        table.add_row(
            phase.name,
            str(phase.iteration_count),
            f"{phase.iteration_time_s:.3f} s",
            f"{phase.energy_j_per_iteration:.0f} J",
            "" if is_own_measure else f"{phase.slowdown_percent:+.1f} %",
            "" if is_own_measure else f"{phase.saving_percent:+.1f} %",
            "" if is_own_measure else phase.compared_with,
        )
    return table
