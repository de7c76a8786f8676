"""`perseus doctor`: find what is wrong with a set-up, and say how to fix it."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perseus import configuration
from perseus.cli.connection import Connection, connecting
from perseus.cli.progress import working
from perseus.cli.rows import Format, FormatOption, show_rows
from perseus.cli.terminal import FAILURE, fail
from perseus.printable import printable

if TYPE_CHECKING:
    from rich.table import Table

    from perseus.doctor.checks import Check


@connecting
def doctor(
    connection: Connection,
    node: Annotated[
        bool,
        typer.Option(
            "--node",
            help="Check this node and its agent's way to the coordinator, by the agent's settings "
            "(PERSEUS_AGENT_… and --config).",
        ),
    ] = False,
    config: Annotated[
        Path | None, typer.Option(help="The agent's TOML file; goes with --node.", show_default=False)
    ] = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Find what is wrong on the way to a coordinator, or with a node, and say how to fix it.

    Changes nothing. Exit code 0 if all is well, 1 if anything is bad.
    """
    from perseus.doctor.checks import Verdict

    if config is not None and not node:
        fail("--config: expected --node beside it, found none")
    with working("Looking"):
        checks = _node_checks(config) if node else _connection_checks(connection)
    rows = [
        {
            "subject": printable(check.subject),
            "verdict": check.verdict.value,
            "found": printable(check.found),
            "advice": check.advice,
        }
        for check in checks
    ]
    show_rows(form, rows, ("subject", "verdict", "found", "advice"), lambda: _table(checks))
    if any(check.verdict is Verdict.BAD for check in checks):
        raise typer.Exit(FAILURE)


def _connection_checks(connection: Connection) -> "list[Check]":
    """Check with the caller's credential; without a usable one, check as much as possible."""
    from perseus.doctor.coordinator import coordinator_checks, unusable_certificate, unusable_credential
    from perseus.tls.files import TlsError
    from perseus.tls.tokens import TokenFileError

    try:
        try:
            return [*coordinator_checks(connection.checked_channels())]
        except TokenFileError as error:
            credential = unusable_credential(error)
            found = coordinator_checks(connection.checked_channels(has_token=False))
            return [*(check for check in found if check.subject != credential.subject), credential]
    except TlsError as error:
        return [unusable_certificate(error)]


def _node_checks(config: Path | None) -> "list[Check]":
    from perseus.agent.sidecar.settings import AgentSettings
    from perseus.agent.sidecar.uplink import channels_of
    from perseus.doctor.checks import Check, Verdict
    from perseus.doctor.coordinator import coordinator_checks
    from perseus.doctor.node import node_checks
    from perseus.tls.files import TlsError
    from perseus.tls.tokens import TokenFileError

    try:
        settings = configuration.load(AgentSettings, config, {})
    except configuration.ConfigurationError as error:
        fail(str(error))
    checks = list(node_checks(settings))
    try:
        channels = channels_of(settings)
    except (TlsError, TokenFileError) as error:
        subject = "certificate" if isinstance(error, TlsError) else "credential"
        advice = "put it at the path in the agent's settings, readable by the agent's user only"
        return [*checks, Check(subject, Verdict.BAD, str(error), advice)]
    return [*checks, *coordinator_checks(channels, ("agent", "operator"))]


def _table(checks: "Iterable[Check]") -> "Table":
    from rich.table import Table
    from rich.text import Text

    from perseus.doctor.checks import Verdict

    marks = {
        Verdict.GOOD: Text("✔", style="green"),
        Verdict.WARNING: Text("!", style="yellow"),
        Verdict.BAD: Text("✘", style="red"),
        Verdict.UNKNOWN: Text("?", style="dim"),
    }
    table = Table("", "check", "found", "what to do", box=None, padding=(0, 1))
    for check in checks:
        row = (Text(printable(text)) for text in (check.subject, check.found, check.advice))
        table.add_row(marks[check.verdict], *row)
    return table
