"""`perseus coordinator`: run the service."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from perseus import configuration, logs
from perseus.cli.terminal import FAILURE, fail


def coordinator(
    config: Annotated[Path | None, typer.Option(help="TOML file with the settings below.")] = None,
    listen: Annotated[
        str | None, typer.Option(help="HOST:PORT to listen on; port 0 takes a free one.")
    ] = None,
    database: Annotated[Path | None, typer.Option(help="SQLite file that holds all jobs.")] = None,
    lease_s: Annotated[
        float | None, typer.Option(help="How long a plan outlives the last word, seconds.")
    ] = None,
    baseline_iterations: Annotated[int | None, typer.Option(help="Iterations measured at stock.")] = None,
    profile_iterations: Annotated[int | None, typer.Option(help="Iterations measured at each clock.")] = None,
    solver_processes: Annotated[int | None, typer.Option(help="Frontiers solved at the same time.")] = None,
    shutdown_grace_s: Annotated[
        float | None, typer.Option(help="Time for open calls when stopping, seconds.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="console or json.")] = None,
) -> None:
    """Run the coordinator of many jobs. Every flag is also PERSEUS_COORDINATOR_… in the environment."""
    from perseus.service.errors import StartupError
    from perseus.service.server import serve
    from perseus.service.settings import CoordinatorSettings

    flags = {
        "listen": listen,
        "database": database,
        "lease_s": lease_s,
        "baseline_iterations": baseline_iterations,
        "profile_iterations": profile_iterations,
        "solver_processes": solver_processes,
        "shutdown_grace_s": shutdown_grace_s,
        "log_level": log_level,
        "log_format": log_format,
    }
    try:
        settings = configuration.load(CoordinatorSettings, config, flags)
    except configuration.ConfigurationError as error:
        fail(str(error))
    logs.configure(settings.log_level, settings.log_format)
    try:
        asyncio.run(serve(settings))
    except StartupError as error:
        fail(str(error), FAILURE)
