"""`perseus coordinator`: run the service."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from perseus import configuration, logs
from perseus.cli import store
from perseus.cli.terminal import FAILURE, STORE_FAILED, fail
from perseus.service.settings import CoordinatorSettings


def _flag(name: str, *declarations: str) -> Any:
    text = escape(configuration.describe(CoordinatorSettings, name))  # what is in brackets is no markup
    return typer.Option(*declarations, help=text, show_default=False)


def coordinator(
    config: Annotated[Path | None, typer.Option(help="TOML file with the settings below.")] = None,
    listen: Annotated[str | None, _flag("listen")] = None,
    http: Annotated[str | None, _flag("http")] = None,
    http_hosts: Annotated[str | None, _flag("http_hosts")] = None,
    metrics_ranks: Annotated[bool | None, _flag("metrics_ranks", "--metrics-ranks")] = None,
    tls_certificate: Annotated[Path | None, _flag("tls_certificate")] = None,
    tls_key: Annotated[Path | None, _flag("tls_key")] = None,
    tls_client_ca: Annotated[Path | None, _flag("tls_client_ca")] = None,
    insecure: Annotated[bool | None, _flag("insecure", "--insecure")] = None,
    operator_token_file: Annotated[Path | None, _flag("operator_token_file")] = None,
    database: Annotated[str | None, _flag("database")] = None,
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
    solver_limit_s: Annotated[float | None, _flag("solver_limit_s")] = None,
    solver_hull_tolerance_percent: Annotated[float | None, _flag("solver_hull_tolerance_percent")] = None,
    request_processes: Annotated[int | None, _flag("request_processes")] = None,
    request_limit_s: Annotated[float | None, _flag("request_limit_s")] = None,
    limit_streams: Annotated[int | None, _flag("limit_streams")] = None,
    limit_messages_per_s: Annotated[float | None, _flag("limit_messages_per_s")] = None,
    limit_stream_messages_per_s: Annotated[float | None, _flag("limit_stream_messages_per_s")] = None,
    limit_jobs: Annotated[int | None, _flag("limit_jobs")] = None,
    limit_ranks: Annotated[int | None, _flag("limit_ranks")] = None,
    limit_computations: Annotated[int | None, _flag("limit_computations")] = None,
    limit_solves: Annotated[int | None, _flag("limit_solves")] = None,
    limit_solve_computations: Annotated[int | None, _flag("limit_solve_computations")] = None,
    limit_batch_rows: Annotated[int | None, _flag("limit_batch_rows")] = None,
    limit_message_bytes: Annotated[int | None, _flag("limit_message_bytes")] = None,
    keep_events_days: Annotated[float | None, _flag("keep_events_days")] = None,
    keep_event_count: Annotated[int | None, _flag("keep_event_count")] = None,
    keep_finished_days: Annotated[float | None, _flag("keep_finished_days")] = None,
    keep_finished_count: Annotated[int | None, _flag("keep_finished_count")] = None,
    keep_telemetry_days: Annotated[float | None, _flag("keep_telemetry_days")] = None,
    keep_telemetry_count: Annotated[int | None, _flag("keep_telemetry_count")] = None,
    keep_ledger_days: Annotated[float | None, _flag("keep_ledger_days")] = None,
    keep_budgets_days: Annotated[float | None, _flag("keep_budgets_days")] = None,
    keep_budget_count: Annotated[int | None, _flag("keep_budget_count")] = None,
    limit_budgets: Annotated[int | None, _flag("limit_budgets")] = None,
    price_per_kwh: Annotated[float | None, _flag("price_per_kwh")] = None,
    intensity_g_per_kwh: Annotated[float | None, _flag("intensity_g_per_kwh")] = None,
    shutdown_grace_s: Annotated[float | None, _flag("shutdown_grace_s")] = None,
    late_limit_s: Annotated[float | None, _flag("late_limit_s")] = None,
    log_level: Annotated[str | None, _flag("log_level")] = None,
    log_format: Annotated[str | None, _flag("log_format")] = None,
    check_store: Annotated[
        bool, typer.Option("--check-store", help="Check the database, as `perseus store check`, and exit.")
    ] = False,
) -> None:
    """Run the coordinator of many jobs. Every flag is also PERSEUS_COORDINATOR_… in the environment."""
    from perseus.service.domain.errors import StartupError, StoreFailedError
    from perseus.service.server import serve

    flags = {
        "listen": listen,
        "http": http,
        "http_hosts": http_hosts,
        "metrics_ranks": metrics_ranks,
        "tls_certificate": tls_certificate,
        "tls_key": tls_key,
        "tls_client_ca": tls_client_ca,
        "insecure": insecure,
        "operator_token_file": operator_token_file,
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
        "solver_limit_s": solver_limit_s,
        "solver_hull_tolerance_percent": solver_hull_tolerance_percent,
        "request_processes": request_processes,
        "request_limit_s": request_limit_s,
        "limit_streams": limit_streams,
        "limit_messages_per_s": limit_messages_per_s,
        "limit_stream_messages_per_s": limit_stream_messages_per_s,
        "limit_jobs": limit_jobs,
        "limit_ranks": limit_ranks,
        "limit_computations": limit_computations,
        "limit_solves": limit_solves,
        "limit_solve_computations": limit_solve_computations,
        "limit_batch_rows": limit_batch_rows,
        "limit_message_bytes": limit_message_bytes,
        "keep_events_days": keep_events_days,
        "keep_event_count": keep_event_count,
        "keep_finished_days": keep_finished_days,
        "keep_finished_count": keep_finished_count,
        "keep_telemetry_days": keep_telemetry_days,
        "keep_telemetry_count": keep_telemetry_count,
        "keep_ledger_days": keep_ledger_days,
        "keep_budgets_days": keep_budgets_days,
        "keep_budget_count": keep_budget_count,
        "limit_budgets": limit_budgets,
        "price_per_kwh": price_per_kwh,
        "intensity_g_per_kwh": intensity_g_per_kwh,
        "shutdown_grace_s": shutdown_grace_s,
        "late_limit_s": late_limit_s,
        "log_level": log_level,
        "log_format": log_format,
    }
    try:
        settings = configuration.load(CoordinatorSettings, config, flags)
    except configuration.ConfigurationError as error:
        fail(str(error))
    if check_store:
        store.check_store(settings.database)
        return
    logs.configure(settings.log_level, settings.log_format)
    try:
        asyncio.run(serve(settings))
    except StartupError as error:
        fail(str(error), FAILURE)
    except StoreFailedError as error:
        fail(str(error), STORE_FAILED)
