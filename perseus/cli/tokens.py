"""`perseus tokens`: make, list and revoke the tokens of a running coordinator."""

import os
import re
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perseus.cli.connection import Connection, connected, connecting, escaping
from perseus.cli.destination import Destination
from perseus.cli.fleet import Fleet
from perseus.cli.listing import TIMEOUT_S
from perseus.cli.rows import Format, FormatOption, row_of, show_message, show_messages, show_row
from perseus.cli.terminal import FAILURE, error_console, fail

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp
    from rich.table import Table

    from perseus.v1.token_service_pb2 import Token

_SCOPES = ("agent", "operator", "reader", "grid")
_LASTING = re.compile(r"(?P<count>[1-9][0-9]{0,5})(?P<unit>[mhd])")
_UNITS_S = {"m": 60, "h": 3600, "d": 86_400}

app = typer.Typer(no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The token's name.", show_default=False)]


@app.command()
@connecting
def create(
    connection: Connection,
    name: Name,
    scope: Annotated[str, typer.Option(help=f"Scope of its permissions: {', '.join(_SCOPES)}.")],
    jobs: Annotated[
        list[str] | None,
        typer.Option(
            help="For an agent: a job, or a pattern such as 'llama-*'; repeatable.",
            show_default=False,
        ),
    ] = None,
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            help="For an agent: a host that it may run on, or a pattern such as 'node-1*'; repeatable. "
            "By default any host, but then power readings count only for GPUs that run its ranks.",
            show_default=False,
        ),
    ] = None,
    lasting: Annotated[
        str | None, typer.Option(help="Validity, such as 90d, 12h or 30m; by default forever.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="File for the token, with mode 0600; default standard output.")
    ] = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Make a token. It is shown only this once."""
    from google.protobuf.timestamp_pb2 import Timestamp

    from perseus.v1 import token_service_pb2, token_service_pb2_grpc

    if scope not in _SCOPES:
        fail(f"--scope: expected {', '.join(_SCOPES)}, found {scope!r}")
    if scope == "agent" and not jobs:
        fail("--jobs: expected a job, or a pattern such as '*', for --scope agent, found none")
    expire_time = None
    if lasting is not None:
        found = _LASTING.fullmatch(lasting)
        if found is None:
            fail(f"--lasting: expected a time such as 90d, 12h or 30m, found {lasting!r}")
        expire_time = Timestamp(seconds=int(time.time()) + int(found["count"]) * _UNITS_S[found["unit"]])
    if output is not None:
        Destination("--output", output).check()
        if os.path.lexists(output):
            fail(f"--output: expected a path for a new file, found {output}, which exists")
    request = token_service_pb2.CreateTokenRequest(
        name=name,
        scope=token_service_pb2.Scope.Value(f"SCOPE_{scope.upper()}"),
        job_patterns=jobs or (),
        host_patterns=hosts or (),
        expire_time=expire_time,
    )
    with connected(connection) as channel:
        made = token_service_pb2_grpc.TokenServiceStub(channel).CreateToken(request, timeout=TIMEOUT_S)
    if output is None:
        # Not as a table: a pipe must receive the token and nothing else.
        show_row(form, {**row_of(made.token), "secret": made.secret}, lambda: [made.secret])
        return
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(f"{made.secret}\n")
        except BaseException:
            output.unlink()
            raise
    except OSError as error:
        fail(f"{output}: can't be written: {error.strerror}; revoke {name} and make another token", FAILURE)
    error_console.print(f"token {made.token.name} is in {output}", highlight=False)
    if form is not Format.TABLE:
        show_row(form, {**row_of(made.token), "secret": None}, list)


@app.command("list")
@connecting
def list_tokens(connection: Connection, form: FormatOption = Format.TABLE) -> None:
    """List all tokens, including revoked and expired ones."""
    from perseus.v1 import token_service_pb2, token_service_pb2_grpc

    with escaping(connection) as channel, Fleet(channel) as fleet:
        stub = token_service_pb2_grpc.TokenServiceStub(fleet.keeper())
        tokens = stub.ListTokens(token_service_pb2.ListTokensRequest(), timeout=TIMEOUT_S).tokens
    show_messages(form, tokens, token_service_pb2.Token.DESCRIPTOR, lambda: _table(tokens))


def _table(tokens: Iterable["Token"]) -> "Table":
    from rich.table import Table

    from perseus.v1 import token_service_pb2

    table = Table("name", "scope", "jobs", "hosts", "made", "expires", "revoked")
    for token in tokens:
        table.add_row(
            token.name,
            token_service_pb2.Scope.Name(token.scope).removeprefix("SCOPE_").lower(),
            " ".join(token.job_patterns),
            " ".join(token.host_patterns),
            _shown(token.create_time),
            _shown(token.expire_time) if token.HasField("expire_time") else "never",
            _shown(token.revoke_time) if token.HasField("revoke_time") else "",
        )
    return table


@app.command()
@connecting
def revoke(connection: Connection, name: Name, form: FormatOption = Format.TABLE) -> None:
    """Revoke a token for good, and close the streams that use it."""
    from rich.text import Text

    from perseus.v1 import token_service_pb2, token_service_pb2_grpc

    with connected(connection) as channel:
        stub = token_service_pb2_grpc.TokenServiceStub(channel)
        token = stub.RevokeToken(token_service_pb2.RevokeTokenRequest(name=name), timeout=TIMEOUT_S).token
    show_message(form, token, lambda: [Text(f"{token.name} was revoked at {_shown(token.revoke_time)}")])


def _shown(moment: "Timestamp") -> str:
    return f"{datetime.fromtimestamp(moment.seconds, UTC):%Y-%m-%d %H:%M} UTC"
