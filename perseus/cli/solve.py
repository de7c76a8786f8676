"""`perseus solve` and `perseus plan`: a frontier from a profile, a plan from a frontier. No service."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from perseus.cli.terminal import check_destination, console, error_console, fail, write_whole

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from perseus.solver import Frontier, Plan


class ScheduleChoice(StrEnum):
    """Schedules that need nothing but a name."""

    ONE_FORWARD_ONE_BACKWARD = "1f1b"
    GPIPE = "gpipe"


def solve(
    profile: Annotated[
        Path,
        typer.Argument(
            help="CSV with the columns stage,instruction,frequency,time,energy "
            "(forward or backward, MHz, seconds, joules per GPU), and time_se,energy_se where "
            "standard errors are known.",
            show_default=False,
        ),
    ],
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches per iteration.", show_default=False)],
    schedule: Annotated[
        ScheduleChoice, typer.Option(help="Order of the computations.")
    ] = ScheduleChoice.ONE_FORWARD_ONE_BACKWARD,
    gpus_per_stage: Annotated[int, typer.Option(min=1, help="GPUs that share each stage.")] = 1,
    blocking_power_w: Annotated[
        float, typer.Option(min=0.0, help="What one GPU draws while it waits on communication, watts.")
    ] = 0.0,
    confidence_percent: Annotated[
        float,
        typer.Option(
            min=50.0,
            max=99.9,
            help="How often a plan keeps its iteration time at least, as far as standard errors tell.",
        ),
    ] = 95.0,
    points: Annotated[int, typer.Option(min=3, max=10_000, help="Plans to realise on the frontier.")] = 100,
    output: Annotated[Path | None, typer.Option(help="Write the frontier here, as JSON.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the frontier here; the suffix names the format.")
    ] = None,
) -> None:
    """Compute the iteration time-energy frontier of one pipeline from its profile."""
    with _without_pyplot():
        from perseus import solver

    check_destination("--output", output)
    check_destination("--plot", plot)
    try:
        profiles = solver.shrink_profiles(solver.read_profile_csv(profile, gpus_per_stage))
        stage_count = 1 + max(stage for stage, _, _ in profiles)
        make = {
            ScheduleChoice.ONE_FORWARD_ONE_BACKWARD: solver.one_forward_one_backward,
            ScheduleChoice.GPIPE: solver.gpipe,
        }[schedule]
        pipeline = solver.Pipeline(
            schedule=make(stage_count, microbatches),
            profiles=profiles,
            blocking_power_w=(blocking_power_w * gpus_per_stage,) * stage_count,
        )
        with _progress() as progress:
            task = progress.add_task("Solving", total=1.0)
            frontier = solver.solve(
                pipeline,
                point_count=points,
                confidence=confidence_percent / 100,
                on_progress=lambda done: progress.update(task, completed=done),
            )
    except solver.SolverError as error:
        fail(str(error))
    console.print(_frontier_table(frontier))
    if frontier.margin is not None:
        console.print(
            f"Measurements are noisy: times have a margin of {100 * frontier.margin.time_share:.2f} %, so "
            f"that plans keep theirs {confidence_percent:g} times in 100. It costs "
            f"{100 * frontier.margin_energy_share:.2f} % of the energy.",
            highlight=False,
        )
    if output is not None:
        from perseus.service.api.translate_problems import frontier_to_proto

        _write_json("--output", output, frontier_to_proto(frontier))
    if plot is not None:
        _draw("--plot", plot, frontier)


def plan(
    frontier_file: Annotated[
        Path,
        typer.Argument(
            metavar="FRONTIER.json", help="A frontier that `perseus solve` has written.", show_default=False
        ),
    ],
    iteration_time: Annotated[
        float | None, typer.Option(help="The plan may not be slower than this, seconds.", show_default=False)
    ] = None,
    no_slowdown: Annotated[
        bool, typer.Option("--no-slowdown", help="The plan may not be slower than the highest clocks.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write the plan here, as JSON.")] = None,
) -> None:
    """Make the plan of least energy that is not slower than an iteration time, or than stock."""
    from google.protobuf import json_format

    with _without_pyplot():
        from perseus import solver
        from perseus.service.api import translate_problems
        from perseus.service.domain import errors
    from perseus.v1 import frontier_pb2

    if (iteration_time is None) != no_slowdown:
        fail("expected one of --iteration-time and --no-slowdown")
    check_destination("--output", output)
    try:
        message = json_format.Parse(frontier_file.read_text(encoding="utf-8"), frontier_pb2.Frontier())
        pipeline = translate_problems.problem_from_proto(message.problem)
        if iteration_time is None:
            iteration_time = solver.fastest_clock_plan(pipeline).iteration_time_s
        made = solver.plan_at(pipeline, iteration_time)
    except OSError as error:
        fail(f"{frontier_file}: can't be read: {error.strerror}")
    except (json_format.ParseError, UnicodeDecodeError) as error:
        fail(f"{frontier_file}: expected a frontier as JSON, found: {error}")
    except solver.DeadlineError as error:
        fail(f"--iteration-time: {error}")
    except (solver.SolverError, errors.ServiceError) as error:
        fail(f"{frontier_file}: {error}")
    console.print(_plan_table(made))
    if output is not None:
        _write_json("--output", output, translate_problems.plan_to_proto(made))


@contextmanager
def _without_pyplot() -> Iterator[None]:
    """Import igraph without pyplot, which it pulls in for drawings that nobody asks for here.

    That would take as long as solving a small problem. Our own pictures import matplotlib when drawn.
    """
    if "matplotlib" in sys.modules:
        yield
        return
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["matplotlib"]


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=error_console,
        transient=True,
    )


def _frontier_table(frontier: "Frontier") -> Table:
    """T_min, no slowdown where that is longer, T* and T_slow, against all-max waiting until the same time."""
    table = Table(title="Iteration time-energy frontier of one pipeline")
    table.add_column("")
    for column in ("iteration time", "energy", "lower bound", "saving"):
        table.add_column(column, justify="right")
    baseline = frontier.baseline
    table.add_row("all-max", f"{baseline.iteration_time_s:.4f} s", f"{baseline.energy_j:.1f} J", "", "")
    not_slower = [
        index
        for index, point in enumerate(frontier.points)
        if point.iteration_time_s <= baseline.iteration_time_s
    ]
    marked = {
        "T_min": 0,
        **({"no slowdown": not_slower[-1]} if not_slower[-1:] > [0] else {}),
        "T*": frontier.t_star_index,
        "T_slow": len(frontier.points) - 1,
    }
    for name, index in marked.items():
        point = frontier.points[index]
        waiting_j = baseline.energy_until_j(max(point.iteration_time_s, baseline.iteration_time_s))
        table.add_row(
            name,
            f"{point.iteration_time_s:.4f} s",
            f"{point.energy_j:.1f} J",
            f"{point.bound_energy_j:.1f} J",
            f"{100 * (1 - point.energy_j / waiting_j):.2f} %",
        )
    table.caption = "saving: against all-max waiting until the same time; no slowdown: all-max's own time"
    return table


def _plan_table(made: "Plan") -> Table:
    table = Table(title=f"Plan of {made.iteration_time_s:.4f} s and {made.energy_j:.1f} J")
    table.add_column("stage", justify="right")
    table.add_column("kind")
    for column in ("computations", "lowest clock", "highest clock"):
        table.add_column(column, justify="right")
    for stage, computations in enumerate(made.stages):
        for kind in sorted({planned.computation.kind for planned in computations}, key=lambda k: k.value):
            clocks_mhz = [p.clock_mhz for p in computations if p.computation.kind is kind]
            table.add_row(
                str(stage),
                kind.value,
                str(len(clocks_mhz)),
                f"{min(clocks_mhz)} MHz",
                f"{max(clocks_mhz)} MHz",
            )
    return table


def _write_json(flag: str, path: Path, message: "Message") -> None:
    from google.protobuf import json_format

    text = json_format.MessageToJson(message, always_print_fields_with_no_presence=True)
    try:
        write_whole(path, lambda draft: draft.write_text(text + "\n", encoding="utf-8"))
    except OSError as error:
        fail(f"{flag}: {path} can't be written: {error.strerror}")


def _draw(flag: str, path: Path, frontier: "Frontier") -> None:
    from perseus import pictures

    picture = pictures.FrontierPicture(
        iteration_time_s=[point.iteration_time_s for point in frontier.points],
        energy_j=[point.energy_j for point in frontier.points],
        bound_energy_j=[point.bound_energy_j for point in frontier.points],
        t_star_index=frontier.t_star_index,
        baseline_time_s=frontier.baseline.iteration_time_s,
        baseline_energy_j=frontier.baseline.energy_j,
        blocking_power_w=sum(frontier.pipeline.blocking_power_w),
    )
    try:
        write_whole(path, lambda draft: pictures.draw_frontier(draft, picture))
    except ValueError as error:
        fail(f"{flag}: {path}: {error}")
    except OSError as error:
        fail(f"{flag}: {path} can't be written: {error.strerror}")
