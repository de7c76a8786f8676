"""`perseus demo`: the main job on this machine, with emulated GPUs."""

import asyncio
import enum
from pathlib import Path
from typing import Annotated

import typer

from perseus.cli.terminal import FAILURE, check_destination, console, fail


class Nvml(enum.Enum):
    """Which NVML the demo's agents use."""

    STUB = "stub"


def demo(
    output: Annotated[Path, typer.Option(help="Folder for summary, pictures and logs.")] = Path("demo-out"),
    nvml: Annotated[
        Nvml | None,
        typer.Option(
            help="Let the agents reach the emulated GPUs through NVML, by a stand-in for its library "
            "(compiled here); without, they reach them directly."
        ),
    ] = None,
) -> None:
    """Train an emulated job of 2 pipelines × 4 stages under Perseus, from profiling to a straggler's end."""
    from perseus.demo.cluster import ClusterError
    from perseus.demo.display import LiveDisplay, phase_table
    from perseus.demo.nvml_stub import StubError
    from perseus.demo.observation import ObservationError
    from perseus.demo.story import DEMO_PLOT, judge, tell
    from perseus.demo.workload import DEMO

    check_destination("--output", output / "summary.json" if output.exists() else output)
    foreseen = (ClusterError, ObservationError, StubError, OSError)
    try:
        with LiveDisplay(console) as display:
            measurements = asyncio.run(tell(DEMO, DEMO_PLOT, output, display, through_nvml=nvml is Nvml.STUB))
    except foreseen as error:
        fail(str(error), FAILURE)
    except ExceptionGroup as group:
        matching, rest = group.split(foreseen)
        if matching is None or rest is not None:
            raise
        fail("; ".join(str(error) for error in matching.exceptions), FAILURE)
    console.print(phase_table(measurements.phases))
    console.print(f"Summary, pictures and logs are in [bold]{output}[/].")
    complaints = judge(measurements, DEMO_PLOT)
    if complaints:
        fail("; ".join(complaints), FAILURE)
