"""`perseus demo`: the main job, or a training script, on this machine with emulated GPUs."""

import asyncio
import enum
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from perseus.cli.terminal import FAILURE, console, fail, os_error_text, print_whole

T = TypeVar("T")


class Nvml(enum.Enum):
    """The NVML libraries that the demo's agents can use."""

    STUB = "stub"


class Scenario(enum.Enum):
    """The demo's scenarios."""

    STRAGGLER = "straggler"
    GRID = "grid"


def demo(
    output: Annotated[Path, typer.Option(help="Folder for summary, pictures and logs.")] = Path("demo-out"),
    script: Annotated[
        Path | None,
        typer.Option(
            help="Train with this script instead: a pipeline of four stages that attaches, as in examples/. "
            "The demo ends once its plan has been measured.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    scenario: Annotated[
        Scenario,
        typer.Option(help="One job, until a straggler recovers; or three jobs under a power budget."),
    ] = Scenario.STRAGGLER,
    nvml: Annotated[
        Nvml | None,
        typer.Option(
            help="Let the agents reach the emulated GPUs through a stand-in for the NVML library, compiled "
            "here. By default they reach them directly."
        ),
    ] = None,
) -> None:
    """Train emulated jobs under Perseus, through a straggler or a power budget."""
    from perseus.demo.display import LiveDisplay, phase_table
    from perseus.demo.example import ScriptError, show
    from perseus.demo.straggler_scenario import DEMO_SCRIPT, judge, run_scenario
    from perseus.demo.workload import DEMO

    _check_folder(output)
    through_nvml = nvml is Nvml.STUB
    if scenario is Scenario.GRID:
        if script is not None or through_nvml:
            fail("--scenario grid: expected neither --script nor --nvml beside it")
        _show_grid(output)
        return
    if script is not None:
        try:
            measurements = _run(show(script, output, _print, through_nvml=through_nvml))
        except ScriptError as error:
            fail(str(error))
        print_whole(phase_table(measurements.phases))
        console.print(f"Logs are in {output}.", highlight=False)
        return
    with LiveDisplay(console) as display:
        measurements = _run(run_scenario(DEMO, DEMO_SCRIPT, output, display, through_nvml=through_nvml))
    print_whole(phase_table(measurements.phases))
    if (evaluations := measurements.evaluations) is not None and evaluations.later_count:
        console.print(
            f"Evaluations of {DEMO.evaluation_s:g} s between iterations, {evaluations.later_count} since the "
            f"first clock was set: {evaluations.later_time_s:.3f} s on average, "
            f"{evaluations.longest_later_time_s:.3f} s at most.",
            highlight=False,
        )
    console.print(f"Summary, pictures and logs are in {output}.", highlight=False)
    problems = judge(measurements, DEMO_SCRIPT, DEMO)
    if problems:
        fail("; ".join(problems), FAILURE)


def _show_grid(output: Path) -> None:
    from perseus.demo.grid_display import GridLiveDisplay, grid_table
    from perseus.demo.grid_scenario import judge_grid, run_grid_scenario

    with GridLiveDisplay(console) as display:
        outcome = _run(run_grid_scenario(output, display))
    print_whole(grid_table(outcome))
    console.print(f"Summary, picture and logs are in {output}.", highlight=False)
    if problems := judge_grid(outcome):
        fail("; ".join(problems), FAILURE)


def _check_folder(output: Path) -> None:
    """Exit if the folder can't be made, before any process starts."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--output: {os_error_text(error)}")


def _run(shown: "Coroutine[Any, Any, T]") -> T:
    """Return the measurements; exit with the cluster's error."""
    from perseus.demo.cluster import ClusterError
    from perseus.demo.nvml_stub import StubError
    from perseus.demo.observation import ObservationError

    foreseen = (ClusterError, ObservationError, StubError, OSError)
    try:
        return asyncio.run(shown)
    except foreseen as error:
        fail(str(error), FAILURE)
    except ExceptionGroup as group:
        matching, rest = group.split(foreseen)
        if matching is None or rest is not None:
            raise
        fail("; ".join(str(error) for error in matching.exceptions), FAILURE)


def _print(message: str) -> None:
    console.print(f"  {message}", highlight=False)
