"""`perseus agent`: run the sidecar, restore the GPUs of a dead one, or test what this node's GPUs offer."""

import asyncio
import os
import sys
from typing import Annotated

import typer

from perseus import logs
from perseus.agent.sidecar.settings import AgentSettings
from perseus.cli.flags import configured
from perseus.cli.progress import working
from perseus.cli.rows import print_json
from perseus.cli.terminal import FAILURE, error_console, fail, print_whole
from perseus.printable import printable


@configured(AgentSettings)
def agent(
    settings: AgentSettings,
    restore: Annotated[
        bool, typer.Option("--restore", help="Restore the GPUs that a dead agent left locked, and exit.")
    ] = False,
    self_test: Annotated[
        bool,
        typer.Option("--self-test", help="Read what this node's GPUs offer, set nothing, and exit."),
    ] = False,
) -> None:
    """Run the agent of one node. Every flag is also PERSEUS_AGENT_… in the environment."""
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
    if lifeline is None:
        # This process becomes the supervisor, and the agent its child.
        command = [sys.executable, "-m", "perseus.cli", *sys.argv[1:]]
        observes = [supervisor.OBSERVES] if settings.observe else []
        os.execv(sys.executable, [sys.executable, "-m", supervisor.__name__, *observes, *command])

    from perseus.agent.gpu import GpuError
    from perseus.agent.sidecar.shell import run
    from perseus.metrics.exposition import MetricsUnavailableError
    from perseus.serving.errors import ServingError
    from perseus.tls.files import TlsError
    from perseus.tls.tokens import TokenFileError

    foreseen = (OSError, GpuError, TlsError, TokenFileError, MetricsUnavailableError, ServingError)
    with logs.exiting(dict.fromkeys(foreseen, FAILURE)):
        asyncio.run(run(settings, int(lifeline) if lifeline is not None else None))


def _restore(settings: AgentSettings) -> None:
    from perseus.agent.gpu import GpuError
    from perseus.agent.gpu.executor import GpuExecutor
    from perseus.agent.restore.records import TIMEOUT_S, RecordFolder
    from perseus.agent.restore.restorer import Restoration, Restorer
    from perseus.agent.sidecar.backends import backend

    async def restore() -> list[Restoration]:
        folder = RecordFolder(settings.restore_folder)
        restorer = Restorer(folder, backend(settings).open, GpuExecutor(), timeout_s=TIMEOUT_S)
        return await restorer.restore_once()

    try:
        with working("Restoring GPUs"):
            done = asyncio.run(restore())
    except GpuError as error:
        fail(str(error), FAILURE)
    for each in done:
        if each.error is None:
            error_console.print(f"GPU {printable(each.gpu_uuid)}: restored", highlight=False)
    if problems := [str(each.error) for each in done if each.error is not None]:
        fail("; ".join(problems), FAILURE)


def _self_test(settings: AgentSettings) -> None:
    """Print a table for people on standard error, and the same as JSON on standard output."""
    from rich.table import Table

    from perseus.agent.gpu import GpuError
    from perseus.agent.sidecar.backends import NvmlBackend
    from perseus.agent.sidecar.self_test import Finding, all_gpu_findings, gpu_findings, node_findings

    if settings.gpu_backend != "nvml":
        fail(f"--self-test: expected --gpu-backend nvml, found {settings.gpu_backend}")
    try:
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
    if not gpus:
        fail("GPUs: expected at least one, found none", FAILURE)
    if unusable := [
        printable(f"{gpu.uuid} can't be used: {gpu.problem}") for gpu in gpus if not gpu.is_usable
    ]:
        fail("; ".join(unusable), FAILURE)
