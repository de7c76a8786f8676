"""`perseus grid`: gateways that turn a grid operator's messages into power budgets, and their keys."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from perseus import logs
from perseus.cli.flags import configured
from perseus.cli.terminal import FAILURE, fail, os_error_text
from perseus.grid.settings import DsxFlexSettings

app = typer.Typer(no_args_is_help=True)


@app.command("dsx-flex")
@configured(DsxFlexSettings)
def dsx_flex(settings: DsxFlexSettings) -> None:
    """Run a DSX Flex agent: receive load targets by MQTT, publish power states and breaches.

    Every flag is also PERSEUS_GRID_… in the environment.
    """
    from perseus.grid.agent import run
    from perseus.grid.journal import JournalError
    from perseus.grid.signing import KeyFileError
    from perseus.tls.address import is_local
    from perseus.tls.files import TlsError
    from perseus.tls.tokens import TokenFileError, find_token

    logs.configure(settings.log_level, settings.log_format)
    if settings.insecure:
        logs.log.warning("insecure: traffic to other machines may be plaintext")
    with logs.exiting(dict.fromkeys((JournalError, KeyFileError, TlsError, TokenFileError), FAILURE)):
        token = find_token(
            path=settings.token_file,
            token=settings.token.get_secret_value() if settings.token is not None else None,
            is_local=is_local(settings.coordinator),
            variable="PERSEUS_GRID_TOKEN",
        )
        asyncio.run(run(settings, token))


@app.command("new-key")
def new_key(
    path: Annotated[Path, typer.Argument(help="File for the private key.", show_default=False)],
    kid: Annotated[str, typer.Option(help="Identifier of the key in messages.", show_default=False)],
) -> None:
    """Make a signing key (ES256), and print the JWK set by which others verify its signatures."""
    from perseus.grid import signing

    private, public = signing.new_key(kid)
    try:
        signing.write_private(path, private)
    except OSError as error:
        fail(f"PATH: {os_error_text(error)}")
    typer.echo(public)
