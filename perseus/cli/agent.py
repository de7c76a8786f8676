"""`perseus agent`: run the sidecar."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from perseus import configuration, logs
from perseus.cli.terminal import FAILURE, fail


def agent(
    config: Annotated[Path | None, typer.Option(help="TOML file with the settings below.")] = None,
    coordinator: Annotated[str | None, typer.Option(help="The coordinator's HOST:PORT.")] = None,
    socket: Annotated[Path | None, typer.Option(help="Local socket that trainers connect to.")] = None,
    gpu_backend: Annotated[str | None, typer.Option(help="nvml or emulated.")] = None,
    emulated_gpus: Annotated[Path | None, typer.Option(help="Folder of emulated GPUs.")] = None,
    observe: Annotated[
        bool | None, typer.Option("--observe", help="Measure, but never set a clock; needs no privileges.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="console or json.")] = None,
) -> None:
    """Run the agent of one node. Every flag is also PERSEUS_AGENT_… in the environment."""
    from perseus.agent.gpu import GpuError
    from perseus.agent.settings import AgentSettings
    from perseus.agent.shell import run

    flags = {
        "coordinator": coordinator,
        "socket": socket,
        "gpu_backend": gpu_backend,
        "emulated_gpus": emulated_gpus,
        "observe": observe,
        "log_level": log_level,
        "log_format": log_format,
    }
    try:
        settings = configuration.load(AgentSettings, config, flags)
    except configuration.ConfigurationError as error:
        fail(str(error))
    logs.configure(settings.log_level, settings.log_format)
    try:
        asyncio.run(run(settings))
    except (OSError, GpuError) as error:
        fail(f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error), FAILURE)
