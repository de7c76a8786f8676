"""`perseus demo`: the main job, or a training script, on this machine with emulated GPUs."""

import asyncio
import enum
import shutil
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from perseus.cli.terminal import FAILURE, TOO_BUSY, console, fail, os_error_text, print_whole, warn

T = TypeVar("T")


class Nvml(enum.Enum):
    """The NVML libraries that the demo's agents can use."""

    STUB = "stub"


class Scenario(enum.Enum):
    """The demo's scenarios."""

    STRAGGLER = "straggler"
    GRID = "grid"
    SERVING = "serving"


def demo(
    output: Annotated[Path, typer.Option(help="Folder for summary, pictures and logs.")] = Path("demo-out"),
    script: Annotated[
        Path | None,
        typer.Option(
            help="Train with this script instead: a pipeline of four stages, or two replicas, that attaches, "
            "as in examples/. The demo ends once its plan has been measured.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    scenario: Annotated[
        Scenario,
        typer.Option(
            help="One job, until a straggler recovers; three jobs under a power budget; or an inference "
            "engine whose load rises and falls."
        ),
    ] = Scenario.STRAGGLER,
    nvml: Annotated[
        Nvml | None,
        typer.Option(
            help="Let the agents reach the emulated GPUs through a stand-in for the NVML library, compiled "
            "here. By default they reach them directly."
        ),
    ] = None,
) -> None:
    """Train emulated jobs under Perseus, through a straggler or a power budget; or serve a model.

    It takes some two minutes, and needs the extras coordinator and certificates, and plot for its pictures.
    """
    from perseus.demo.display import WORDS, LiveDisplay, phase_table
    from perseus.demo.example import ScriptError, judge_script, show
    from perseus.demo.straggler_scenario import DEMO_SCRIPT, draw, judge, run_scenario
    from perseus.demo.workload import DEMO

    _check_folder(output)
    through_nvml = nvml is Nvml.STUB
    if scenario is not Scenario.STRAGGLER:
        if script is not None or through_nvml:
            fail(f"--scenario {scenario.value}: expected neither --script nor --nvml beside it")
        (_show_grid if scenario is Scenario.GRID else _show_serving)(output)
        return
    if script is not None:
        _explain(WORDS)
        try:
            trained, busy = _run(show(script, output, _print, through_nvml=through_nvml))
        except ScriptError as error:
            fail(str(error))
        print_whole(phase_table(trained.measurements.phases))
        _suggest(
            {f"{output}/logs": "what each process did", "docs/tutorial.md": "to a first job of your own"}
        )
        _conclude(judge_script(trained), busy)
        return
    has_pictures = _has_pictures()
    _explain(WORDS)
    with LiveDisplay(console) as display:
        outcome, busy = _run(run_scenario(DEMO, DEMO_SCRIPT, output, display, through_nvml=through_nvml))
    measurements = outcome.measurements
    print_whole(phase_table(measurements.phases))
    if has_pictures:
        _draw(lambda: draw(outcome, output))
    pictures = {
        f"{output}/timeline.png": "an iteration at stock and under the plan",
        f"{output}/frontier.png": "the energy of its plans, fastest to slowest",
    }
    _suggest(
        (pictures if has_pictures else {f"{output}/summary.json": "the table's figures"})
        | {f"{_command()} demo --scenario grid": "three jobs under a power budget"}
        | {"docs/tutorial.md": "to a first job of your own"}
    )
    _conclude(judge(measurements, DEMO_SCRIPT, DEMO), busy)


def _show_grid(output: Path) -> None:
    from perseus.demo.grid_display import WORDS, GridLiveDisplay, grid_table
    from perseus.demo.grid_scenario import draw, judge_grid, run_grid_scenario

    has_pictures = _has_pictures()
    _explain(WORDS)
    with GridLiveDisplay(console) as display:
        outcome, busy = _run(run_grid_scenario(output, display))
    print_whole(grid_table(outcome))
    if has_pictures:
        _draw(lambda: (output / "power.png").write_bytes(draw(outcome.log, outcome.phases[0][1])))
    _suggest(
        ({f"{output}/power.png": "power and speeds over time"} if has_pictures else {})
        | {
            f"{output}/summary.json": "the table's figures",
            "docs/power.md": "power budgets for your own jobs",
        }
    )
    _conclude(judge_grid(outcome), busy)


def _show_serving(output: Path) -> None:
    from perseus.demo.serving_display import WORDS, ServingLiveDisplay, serving_table
    from perseus.demo.serving_scenario import draw_serving, judge_serving, run_serving_scenario

    has_pictures = _has_pictures()
    _explain(WORDS)
    with ServingLiveDisplay(console) as display:
        outcome, busy = _run(run_serving_scenario(output, display))
    print_whole(serving_table(outcome))
    if has_pictures:
        _draw(lambda: (output / "serving.png").write_bytes(draw_serving(outcome)))
    _suggest(
        ({f"{output}/serving.png": "load, clocks and energy over time"} if has_pictures else {})
        | {
            f"{output}/summary.json": "the table's figures",
            "docs/serving.md": "clocks for your own engines",
        }
    )
    _conclude(judge_serving(outcome), busy)


def _has_pictures() -> bool:
    """Return whether pictures can be drawn; warn before anything runs if not."""
    if find_spec("matplotlib") is not None:
        return True
    warn("the demo draws no pictures without matplotlib: pip install 'perseus-energy[plot]'")
    return False


def _draw(draw: Callable[[], object]) -> None:
    """Draw pictures, after the table: whatever fails, that is there."""
    try:
        draw()
    except OSError as error:
        fail(os_error_text(error), FAILURE)


def _explain(words: Mapping[str, str]) -> None:
    from perseus.demo.screen import two_columns

    print_whole(two_columns(words))


def _suggest(places: Mapping[str, str]) -> None:
    from perseus.demo.screen import two_columns

    console.print("Next:", highlight=False)
    print_whole(two_columns(places))


def _command() -> str:
    """Return how to call this command again: `make demo` has it in a folder that isn't searched."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "perseus" and shutil.which("perseus") is None else "perseus"


def _check_folder(output: Path) -> None:
    """Exit if the folder can't be made, before any process starts."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--output: {os_error_text(error)}")


def _run(shown: "Coroutine[Any, Any, T]") -> tuple[T, str]:
    """Return the outcome and whether the machine was too busy, in words; exit with the cluster's error."""
    from perseus.demo.lateness import Lateness
    from perseus.demo.nvml_stub import StubError
    from perseus.demo.observation import ObservationError
    from perseus.demo.processes import ClusterError

    late = (ClusterError, ObservationError)
    foreseen = (*late, StubError, OSError)
    errors: Sequence[Exception]
    with Lateness() as lateness:
        try:
            return asyncio.run(shown), lateness.explain()
        except foreseen as error:
            errors = [error]
        except ExceptionGroup as group:
            matching, rest = group.split(foreseen)
            if matching is None or rest is not None:
                raise
            errors = matching.exceptions
    is_late = all(isinstance(error, late) for error in errors)
    raise _end([str(error) for error in errors], lateness.explain() if is_late else "")


def _conclude(problems: Sequence[str], busy: str) -> None:
    if problems:
        raise _end(problems, busy)


def _end(problems: Sequence[str], busy: str) -> typer.Exit:
    """Print problems, and return the exit: without a verdict if the machine was too busy, else a failure."""
    if not busy:
        fail("; ".join(problems), FAILURE)
    warn(f"{busy}. Run it again when it is idle. Not as expected: {'; '.join(problems)}")
    return typer.Exit(TOO_BUSY)


def _print(message: str) -> None:
    console.print(f"  {message}", highlight=False)
