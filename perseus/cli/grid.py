"""`perseus grid`: doors through which a grid's messages become power budgets, and keys for them."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from perseus import configuration, logs
from perseus.cli.terminal import FAILURE, fail, said, warn
from perseus.grid.settings import DsxFlexSettings

app = typer.Typer(help="Let the grid set power budgets.", no_args_is_help=True)


def _flag(name: str, *declarations: str) -> Any:
    text = configuration.describe(DsxFlexSettings, name)
    return typer.Option(*declarations, help=text, show_default=False)


@app.command("dsx-flex")
def dsx_flex(
    config: Annotated[Path | None, typer.Option(help="TOML file with the settings below.")] = None,
    identifier: Annotated[str | None, _flag("identifier")] = None,
    broker: Annotated[str | None, _flag("broker")] = None,
    broker_tls_ca: Annotated[Path | None, _flag("broker_tls_ca")] = None,
    broker_tls_certificate: Annotated[Path | None, _flag("broker_tls_certificate")] = None,
    broker_tls_key: Annotated[Path | None, _flag("broker_tls_key")] = None,
    broker_token_file: Annotated[Path | None, _flag("broker_token_file")] = None,
    keys: Annotated[Path | None, _flag("keys")] = None,
    signing_key: Annotated[Path | None, _flag("signing_key")] = None,
    coordinator: Annotated[str | None, _flag("coordinator")] = None,
    tls_ca: Annotated[Path | None, _flag("tls_ca")] = None,
    tls_certificate: Annotated[Path | None, _flag("tls_certificate")] = None,
    tls_key: Annotated[Path | None, _flag("tls_key")] = None,
    token_file: Annotated[Path | None, _flag("token_file")] = None,
    insecure: Annotated[bool | None, _flag("insecure", "--insecure")] = None,
    state: Annotated[Path | None, _flag("state")] = None,
    heartbeat_s: Annotated[float | None, _flag("heartbeat_s")] = None,
    log_level: Annotated[str | None, _flag("log_level")] = None,
    log_format: Annotated[str | None, _flag("log_format")] = None,
) -> None:
    """Run an agent of DSX Flex: load targets by MQTT in, power states and breaches out.

    Every flag is also PERSEUS_GRID_… in the environment.
    """
    flags = {
        "identifier": identifier,
        "broker": broker,
        "broker_tls_ca": broker_tls_ca,
        "broker_tls_certificate": broker_tls_certificate,
        "broker_tls_key": broker_tls_key,
        "broker_token_file": broker_token_file,
        "keys": keys,
        "signing_key": signing_key,
        "coordinator": coordinator,
        "tls_ca": tls_ca,
        "tls_certificate": tls_certificate,
        "tls_key": tls_key,
        "token_file": token_file,
        "insecure": insecure,
        "state": state,
        "heartbeat_s": heartbeat_s,
        "log_level": log_level,
        "log_format": log_format,
    }
    try:
        settings = configuration.load(DsxFlexSettings, config, flags)
    except configuration.ConfigurationError as error:
        fail(str(error))

    from perseus.grid.agent import run
    from perseus.grid.journal import JournalError
    from perseus.grid.signing import KeyFileError
    from perseus.tls.address import is_local
    from perseus.tls.files import TlsError
    from perseus.tls.tokens import TokenFileError, find_token

    logs.configure(settings.log_level, settings.log_format)
    if settings.insecure:
        warn("--insecure: what other machines are told may be plaintext")
    try:
        token = find_token(
            path=settings.token_file,
            token=settings.token.get_secret_value() if settings.token is not None else None,
            is_local=is_local(settings.coordinator),
        )
        asyncio.run(run(settings, token))
    except (JournalError, KeyFileError, TlsError, TokenFileError) as error:
        fail(str(error), FAILURE)


@app.command("new-key")
def new_key(
    path: Annotated[Path, typer.Argument(help="File for the private key.", show_default=False)],
    kid: Annotated[str, typer.Option(help="What messages call the key.", show_default=False)],
) -> None:
    """Make a key to sign with (ES256), and print the JWK set that others verify it by."""
    from perseus.grid import signing

    private, public = signing.new_key(kid)
    try:
        signing.write_private(path, private)
    except OSError as error:
        fail(f"PATH: {said(error)}")
    typer.echo(public)
