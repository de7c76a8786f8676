"""`perseus certificates`: a small certificate authority for clusters that have none."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from perseus.cli.terminal import console, fail, os_error_text

app = typer.Typer(no_args_is_help=True)

Folder = Annotated[Path, typer.Option(help="Folder of the authority: share ca.pem, keep ca.key private.")]
_FOLDER = Path("perseus-ca")
Days = Annotated[int, typer.Option(min=1, max=36_500, help="Days until the certificate expires.")]
Output = Annotated[
    Path | None,
    typer.Option(
        help="Path to write to; .pem and .key are appended. (default the name, here)", show_default=False
    ),
]


@app.command()
def authority(
    folder: Folder = _FOLDER,
    name: Annotated[str, typer.Option(help="Name of the authority.")] = "Perseus CA",
    days: Days = 3650,
) -> None:
    """Make a new authority. Anyone with its ca.key can make certificates that your coordinator trusts."""
    from perseus.certificates import Authority

    with _mistakes():
        Authority.create(folder, name, timedelta(days=days))
    _print_paths(folder / "ca.pem", folder / "ca.key")


@app.command()
def server(
    names: Annotated[
        list[str],
        typer.Argument(help="Host names and addresses by which agents reach it.", show_default=False),
    ],
    folder: Folder = _FOLDER,
    output: Output = None,
    days: Days = 90,
) -> None:
    """Make or renew a coordinator's certificate. A running coordinator picks it up by itself."""
    _issue(names, folder, output, days, is_server=True)


@app.command()
def client(
    name: Annotated[str, typer.Argument(help="Its owner: a node, an operator.", show_default=False)],
    folder: Folder = _FOLDER,
    output: Output = None,
    days: Days = 90,
) -> None:
    """Make or renew an agent's or an operator's certificate. A running agent picks it up by itself."""
    _issue([name], folder, output, days, is_server=False)


def _issue(names: list[str], folder: Path, output: Path | None, days: int, *, is_server: bool) -> None:
    from perseus.certificates import Authority

    ends = datetime.now(UTC) + timedelta(days=days)
    with _mistakes():
        made = Authority(folder).issue(output or Path(names[0]), names, is_server=is_server, ends=ends)
    _print_paths(*made)


@contextmanager
def _mistakes() -> Iterator[None]:
    from perseus.certificates import CertificateError

    try:
        yield
    except CertificateError as error:
        fail(str(error))
    except OSError as error:
        fail(os_error_text(error))


def _print_paths(certificate: Path, key: Path) -> None:
    console.print(f"certificate {certificate}, key {key}", highlight=False)
