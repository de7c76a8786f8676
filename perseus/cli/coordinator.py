"""`perseus coordinator`: run the service."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from perseus import configuration, logs
from perseus.cli.terminal import FAILURE, fail
from perseus.service.settings import CoordinatorSettings


def _flag(name: str) -> Any:
    return typer.Option(help=configuration.describe(CoordinatorSettings, name), show_default=False)


def coordinator(
    config: Annotated[Path | None, typer.Option(help="TOML file with the settings below.")] = None,
    listen: Annotated[str | None, _flag("listen")] = None,
    database: Annotated[Path | None, _flag("database")] = None,
    lease_s: Annotated[float | None, _flag("lease_s")] = None,
    baseline_iterations: Annotated[int | None, _flag("baseline_iterations")] = None,
    profile_iterations: Annotated[int | None, _flag("profile_iterations")] = None,
    profile_accuracy_percent: Annotated[float | None, _flag("profile_accuracy_percent")] = None,
    profile_clocks: Annotated[int | None, _flag("profile_clocks")] = None,
    profile_budget_iterations: Annotated[int | None, _flag("profile_budget_iterations")] = None,
    profile_budget_s: Annotated[float | None, _flag("profile_budget_s")] = None,
    profile_budget_extra_s: Annotated[float | None, _flag("profile_budget_extra_s")] = None,
    profile_budget_j: Annotated[float | None, _flag("profile_budget_j")] = None,
    guard_tolerance_percent: Annotated[float | None, _flag("guard_tolerance_percent")] = None,
    guard_iterations: Annotated[int | None, _flag("guard_iterations")] = None,
    solver_processes: Annotated[int | None, _flag("solver_processes")] = None,
    shutdown_grace_s: Annotated[float | None, _flag("shutdown_grace_s")] = None,
    late_limit_s: Annotated[float | None, _flag("late_limit_s")] = None,
    log_level: Annotated[str | None, _flag("log_level")] = None,
    log_format: Annotated[str | None, _flag("log_format")] = None,
) -> None:
    """Run the coordinator of many jobs. Every flag is also PERSEUS_COORDINATOR_… in the environment."""
    from perseus.service.domain.errors import ServiceError
    from perseus.service.server import serve

    flags = {
        "listen": listen,
        "database": database,
        "lease_s": lease_s,
        "baseline_iterations": baseline_iterations,
        "profile_iterations": profile_iterations,
        "profile_accuracy_percent": profile_accuracy_percent,
        "profile_clocks": profile_clocks,
        "profile_budget_iterations": profile_budget_iterations,
        "profile_budget_s": profile_budget_s,
        "profile_budget_extra_s": profile_budget_extra_s,
        "profile_budget_j": profile_budget_j,
        "guard_tolerance_percent": guard_tolerance_percent,
        "guard_iterations": guard_iterations,
        "solver_processes": solver_processes,
        "shutdown_grace_s": shutdown_grace_s,
        "late_limit_s": late_limit_s,
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
    except ServiceError as error:  # it can not start, or not go on
        fail(str(error), FAILURE)
