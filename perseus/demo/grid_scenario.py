"""The demo of a power budget: three jobs are planned, a budget falls, falls again, and ends."""

import asyncio
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from perseus import pictures
from perseus.demo.power_log import PowerLog, summary
from perseus.demo.site import Site
from perseus.demo.site_watch import SiteWatch, watching
from perseus.demo.workload import Workload
from perseus.emulation.physics import A100_SXM, Work

PLANNING, FREE, CUT, DEEPER, OVER = "planning", "no budget", "budget", "lower budget", "budget over"
STEPS = (PLANNING, FREE, CUT, DEEPER, OVER)

_STRICT = Workload(
    job_id="strict",
    pipeline_count=1,
    stage_weights=(0.8, 1.0, 0.9),
    microbatch_count=4,
    forward=Work(compute_s=0.018, memory_s=0.004, activity=0.85),
    backward=Work(compute_s=0.038, memory_s=0.008, activity=0.95),
    optimizer_s=0.01,
    gpu=A100_SXM.with_clocks(6),
)
JOBS = (
    _STRICT,
    replace(_STRICT, job_id="usual", stage_weights=(1.0, 0.85, 0.9)),
    replace(_STRICT, job_id="easy", stage_weights=(0.9, 1.0)),
)
TERMS = {"strict": (3.0, 2.0), "usual": (25.0, 1.0), "easy": (40.0, 0.5)}
"""For each job, the largest share of its speed that a budget may take, in percent, and its weight."""


@dataclass(frozen=True, slots=True)
class GridScript:
    """The scenario's parameters: the budgets as shares of the free draw, and the duration of each step."""

    shares: tuple[float, float]
    free_s: float
    budget_s: float
    over_s: float
    ramp_time_s: float
    """Time in which the power cap falls by a tenth of the free draw."""
    settled_s: float
    """Time from a change until power has settled. The rest of a step, and the step without a budget, are as
    long as the means that a budget is kept in (`power_log.MEAN_S`): power and speed of shorter spans swing
    with the host's load."""


GRID_SCRIPT = GridScript(
    (0.87, 0.78), free_s=10.0, budget_s=20.0, over_s=14.0, ramp_time_s=4.0, settled_s=10.0
)

_PLANNING_TIMEOUT_S = 240.0
_BACK_S = 4.0


class GridDisplay(Protocol):
    """Shows the scenario while it runs."""

    def begin(self, step: str) -> None:
        """Show that a step has begun."""

    def refresh(self, watch: SiteWatch) -> None:
        """Show the current state, once a second."""

    def note(self, lines: list[str]) -> None:
        """Print lines that stay."""


@dataclass(slots=True)
class GridOutcome:
    """The power log and the steps, each with its begin and end."""

    log: PowerLog
    phases: list[tuple[str, float, float]]


async def run_grid_scenario(
    out_dir: Path, display: GridDisplay, script: GridScript = GRID_SCRIPT
) -> GridOutcome:
    """Run the whole scenario; write summary.json to `out_dir`.

    Raises:
        ClusterError: a process did not start, or died.
        ObservationError: something did not happen in time.
        OSError: `out_dir` can't be written.
    """
    with (
        tempfile.TemporaryDirectory(prefix="perseus-") as run_dir,
        Site(JOBS, Path(run_dir), out_dir / "logs", serves_page=True) as site,
    ):
        display.begin(PLANNING)
        await asyncio.to_thread(site.start)
        display.note(site.page_lines())
        async with watching(site, display.refresh) as watch:
            phases = await _play(watch, display, script)
        await asyncio.to_thread(site.stop)
    document = {"phases": summary(watch.log, phases, list(TERMS))}
    (out_dir / "summary.json").write_text(json.dumps(document, indent=2) + "\n")
    return GridOutcome(watch.log, phases)


async def _play(watch: SiteWatch, display: GridDisplay, script: GridScript) -> list[tuple[str, float, float]]:
    phases: list[tuple[str, float, float]] = []
    await watch.until("plans in force for all jobs", watch.are_planned, _PLANNING_TIMEOUT_S)
    for job_id, terms in TERMS.items():
        await watch.set_terms(job_id, *terms)

    async def pass_time(step: str, duration_s: float) -> None:
        display.begin(step)
        begin_s = watch.now_s()
        await asyncio.sleep(duration_s)
        phases.append((step, begin_s, watch.now_s()))

    await pass_time(FREE, script.free_s)
    free_w = watch.log.mean_w(*phases[-1][1:])
    ramp_w_per_s = 0.1 * free_w / script.ramp_time_s
    for step, share in zip((CUT, DEEPER), script.shares, strict=True):
        await watch.set_budget("peak", share * free_w, ramp_w_per_s)
        await pass_time(step, script.budget_s)
    await watch.cancel_budget("peak")
    await pass_time(OVER, script.over_s)
    return phases


def draw(log: PowerLog, first_s: float, feed: str = "default") -> bytes:
    """Return a PNG of the power under its limit and of each job's speed, from a time on.

    Raises:
        ImportError: matplotlib is not installed.
    """
    shown = log.between(first_s, float("inf"))
    picture = pictures.FleetPicture(
        title="Jobs under a power budget that falls and ends: emulated GPUs, real processes",
        times=[sample.time_s - first_s for sample in shown],
        supplies=[
            pictures.Supply(
                feed,
                [sample.power_w for sample in shown],
                [sample.limit_w for sample in shown],
                [sample.power_cap_w for sample in shown],
            )
        ],
        speeds={
            job_id: [sample.speeds.get(job_id, float("nan")) for sample in shown]
            for job_id in shown[-1].powers_w
        },
        signals={},
        unit="s",
    )
    return pictures.draw_fleet(picture, "png")


def judge_grid(outcome: GridOutcome, script: GridScript = GRID_SCRIPT) -> list[str]:
    """Return the problems of an outcome; none if budgets were kept, and power rose again after them."""
    found = []
    log, begun = outcome.log, {name: (begin_s, end_s) for name, begin_s, end_s in outcome.phases}
    free_w = log.mean_w(*begun[FREE])
    for step in (CUT, DEEPER):
        begin_s, end_s = begun[step]
        limit_w, mean_w = (
            log.between(begin_s, end_s)[-1].limit_w,
            log.mean_w(begin_s + script.settled_s, end_s),
        )
        if not mean_w <= 1.02 * limit_w:
            found.append(f"{step}: expected at most {limit_w:.0f} W and 2 %, found {mean_w:.0f} W")
    # A busy host may delay a pipeline, and then the others draw less: once is enough.
    back_w = log.worst_mean_w(*begun[OVER], window_s=_BACK_S)
    if back_w < 0.95 * free_w:
        found.append(f"{OVER}: expected {free_w:.0f} W again, found {back_w:.0f} W")
    return found
