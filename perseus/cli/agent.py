"""`perseus agent`: run the sidecar, bring back what a dead one left, or see what this node's GPUs offer."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from perseus import configuration, logs
from perseus.agent.sidecar.settings import AgentSettings
from perseus.cli.progress import working
from perseus.cli.rows import print_json
from perseus.cli.terminal import FAILURE, error_console, fail, print_whole, said
from perseus.printable import printable


def _flag(name: str, *declarations: str) -> Any:
    text = escape(configuration.describe(AgentSettings, name))  # what is in brackets is no markup
    return typer.Option(*declarations, help=text, show_default=False)


def agent(
    config: Annotated[Path | None, typer.Option(help="TOML file with the settings below.")] = None,
    coordinator: Annotated[str | None, _flag("coordinator")] = None,
    tls_ca: Annotated[Path | None, _flag("tls_ca")] = None,
    tls_certificate: Annotated[Path | None, _flag("tls_certificate")] = None,
    tls_key: Annotated[Path | None, _flag("tls_key")] = None,
    insecure: Annotated[bool | None, _flag("insecure", "--insecure")] = None,
    token_file: Annotated[Path | None, _flag("token_file")] = None,
    socket: Annotated[Path | None, _flag("socket")] = None,
    socket_group: Annotated[str | None, _flag("socket_group")] = None,
    socket_mode: Annotated[str | None, _flag("socket_mode")] = None,
    grants: Annotated[Path | None, _flag("grants")] = None,
    gpu_backend: Annotated[str | None, _flag("gpu_backend")] = None,
    emulated_gpus: Annotated[Path | None, _flag("emulated_gpus")] = None,
    device_folder: Annotated[Path | None, _flag("device_folder")] = None,
    observe: Annotated[bool | None, _flag("observe", "--observe")] = None,
    restore_folder: Annotated[Path | None, _flag("restore_folder")] = None,
    restore_clocks: Annotated[str | None, _flag("restore_clocks")] = None,
    metrics_listen: Annotated[str | None, _flag("metrics_listen")] = None,
    metrics_token_file: Annotated[Path | None, _flag("metrics_token_file")] = None,
    metrics_tls_certificate: Annotated[Path | None, _flag("metrics_tls_certificate")] = None,
    metrics_tls_key: Annotated[Path | None, _flag("metrics_tls_key")] = None,
    job_mapping_folder: Annotated[Path | None, _flag("job_mapping_folder")] = None,
    log_level: Annotated[str | None, _flag("log_level")] = None,
    log_format: Annotated[str | None, _flag("log_format")] = None,
    restore: Annotated[
        bool, typer.Option("--restore", help="Bring back the GPUs that a dead agent left locked, and end.")
    ] = False,
    self_test: Annotated[
        bool,
        typer.Option("--self-test", help="Read what this node's GPUs offer, set nothing, and end."),
    ] = False,
) -> None:
    """Run the agent of one node. Every flag is also PERSEUS_AGENT_… in the environment."""
    flags = {
        "coordinator": coordinator,
        "tls_ca": tls_ca,
        "tls_certificate": tls_certificate,
        "tls_key": tls_key,
        "insecure": insecure,
        "token_file": token_file,
        "socket": socket,
        "socket_group": socket_group,
        "socket_mode": socket_mode,
        "grants": grants,
        "gpu_backend": gpu_backend,
        "emulated_gpus": emulated_gpus,
        "device_folder": device_folder,
        "observe": observe,
        "restore_folder": restore_folder,
        "restore_clocks": restore_clocks,
        "metrics_listen": metrics_listen,
        "metrics_token_file": metrics_token_file,
        "metrics_tls_certificate": metrics_tls_certificate,
        "metrics_tls_key": metrics_tls_key,
        "job_mapping_folder": job_mapping_folder,
        "log_level": log_level,
        "log_format": log_format,
    }
    try:
        settings = configuration.load(AgentSettings, config, flags)
    except configuration.ConfigurationError as error:
        fail(str(error))
    logs.configure(settings.log_level, settings.log_format)
    if restore:
        _restore(settings)
    elif self_test:
        _self_test(settings)
    else:
        _serve(settings)


def _serve(settings: AgentSettings) -> None:
    from perseus.agent.restore import supervisor

    lifeline = os.environ.get(supervisor.LIFELINE)
    if lifeline is None and not settings.observe:
        # This process becomes the supervisor, and the agent its child.
        command = [sys.executable, "-m", "perseus.cli", *sys.argv[1:]]
        os.execv(sys.executable, [sys.executable, "-m", supervisor.__name__, *command])

    from perseus.agent.gpu import GpuError
    from perseus.agent.sidecar.shell import run
    from perseus.metrics.exposition import MetricsUnavailableError
    from perseus.tls.files import TlsError
    from perseus.tls.tokens import TokenFileError

    try:
        asyncio.run(run(settings, int(lifeline) if lifeline is not None else None))
    except (OSError, GpuError, TlsError, TokenFileError, MetricsUnavailableError) as error:
        fail(said(error) if isinstance(error, OSError) else str(error), FAILURE)


def _restore(settings: AgentSettings) -> None:
    from perseus.agent.gpu import GpuError
    from perseus.agent.gpu.lanes import Lanes
    from perseus.agent.restore.records import PATIENCE_S, RecordFolder
    from perseus.agent.restore.restorer import Restoration, Restorer
    from perseus.agent.sidecar.backends import backend

    async def restore() -> list[Restoration]:
        folder = RecordFolder(settings.restore_folder)
        restorer = Restorer(folder, backend(settings).open, Lanes(), patience_s=PATIENCE_S)
        return await restorer.restore_once()

    try:
        with working("Restoring GPUs"):
            done = asyncio.run(restore())
    except GpuError as error:
        fail(str(error), FAILURE)
    for each in done:
        if each.error is None:
            error_console.print(f"GPU {printable(each.gpu_uuid)}: restored", highlight=False)
    if complaints := [str(each.error) for each in done if each.error is not None]:
        fail("; ".join(complaints), FAILURE)


def _self_test(settings: AgentSettings) -> None:
    """A table for people on standard error, the same as JSON on standard output."""
    import pynvml
    from rich.table import Table

    from perseus.agent.gpu import GpuError
    from perseus.agent.gpu.nvml import calling
    from perseus.agent.sidecar.backends import NvmlBackend
    from perseus.agent.sidecar.self_test import Finding, all_gpu_findings, gpu_findings, node_findings

    if settings.gpu_backend != "nvml":
        fail(f"--self-test: expected --gpu-backend nvml, found {settings.gpu_backend}")
    try:
        with calling("nvmlInit", "GPUs", pynvml):
            pynvml.nvmlInit()
        node = node_findings()
        with working("Asking GPUs"):
            gpus = asyncio.run(all_gpu_findings(NvmlBackend().listed(), gpu_findings))
    except GpuError as error:
        fail(str(error), FAILURE)

    def rows(title: str, findings: tuple[Finding, ...]) -> None:
        table = Table("", "found", "problem", title=title, title_justify="left")
        for each in findings:
            value = "" if each.value is None else printable(str(each.value))
            table.add_row(each.name, value, printable(each.problem))
        print_whole(table, to=error_console)

    def values(findings: tuple[Finding, ...]) -> dict[str, object]:
        return {
            each.name: {"value": each.value} | ({"problem": each.problem} if each.problem else {})
            for each in findings
        }

    rows("node", node)
    for gpu in gpus:
        rows(printable(gpu.uuid), gpu.findings)
    report = {"node": values(node), "gpus": {gpu.uuid: values(gpu.findings) for gpu in gpus}}
    print_json(report)
    if not gpus or not all(gpu.is_usable for gpu in gpus):
        raise typer.Exit(FAILURE)
