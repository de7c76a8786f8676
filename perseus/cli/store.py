"""`perseus store`: check, export and import the coordinator's database, while no coordinator runs on it."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from perseus import configuration
from perseus.cli.destination import Destination
from perseus.cli.progress import working
from perseus.cli.rows import Format, FormatOption, show_rows
from perseus.cli.terminal import BAD_INPUT, FAILURE, STORE_FAILED, console, fail, said
from perseus.printable import printable
from perseus.service.settings import CoordinatorSettings

app = typer.Typer(help="Check, export and import the coordinator's database.", no_args_is_help=True)

Config = Annotated[Path | None, typer.Option(help="TOML file with the coordinator's settings.")]
Database = Annotated[
    str | None,
    typer.Option(help=configuration.describe(CoordinatorSettings, "database"), show_default=False),
]


@app.command()
def check(config: Config = None, database: Database = None, form: FormatOption = Format.TABLE) -> None:
    """Read everything, and say what is wrong: exit code 1 if anything is. Nothing is changed."""
    check_store(_database(config, database), form)


@app.command(name="export")
def export_(
    file: Annotated[Path, typer.Argument(help="Where to: lines of JSON.")],
    config: Config = None,
    database: Database = None,
) -> None:
    """Write the whole database into a portable file."""
    from perseus.service.storage.archive import export_database

    source = _database(config, database)
    destination = Destination("FILE", file)
    destination.check(*(Path(f"{source}{end}") for end in ("", "-wal", "-shm") if "://" not in str(source)))
    if "://" not in str(source) and not Path(source).exists():
        fail(f"can not open the database {source}: there is no such file", FAILURE)
    counts: list[int] = []

    def write(stream: BinaryIO) -> None:
        text = io.TextIOWrapper(stream, encoding="utf-8", write_through=True)
        counts.append(export_database(source, text))
        text.detach()

    with _failing_clearly(), working("Exporting"):
        destination.write(write)
    if not destination.is_standard_output:
        console.print(f"exported {counts[0]} rows to {file}", highlight=False)


@app.command(name="import")
def import_(
    file: Annotated[Path, typer.Argument(help="What `export` wrote.")],
    config: Config = None,
    database: Database = None,
) -> None:
    """Fill an empty database from such a file; of either engine."""
    from perseus.service.storage.archive import ArchiveError, import_database

    with _failing_clearly():
        try:
            with file.open(encoding="utf-8") as stream, working("Importing"):
                count = import_database(_database(config, database), stream)
        except (ArchiveError, UnicodeDecodeError) as error:
            fail(f"{file}: {error}", BAD_INPUT)
    console.print(f"imported {count} rows from {file}", highlight=False)


def check_store(database: Path | str, form: Format = Format.TABLE) -> None:
    """Print what is wrong with a database, and exit with 1 if anything is."""
    from rich.text import Text

    from perseus.service.storage.checking import check_database

    if "://" not in str(database) and not Path(database).exists():
        fail(f"can not open the database {database}: there is no such file", FAILURE)
    with _failing_clearly(), working("Checking"):
        findings = check_database(database)
    lines = [printable(finding) for finding in findings]
    shown = Text("\n".join(lines) or "the store is whole")
    show_rows(form, [{"finding": line} for line in lines], ["finding"], lambda: shown)
    if findings:
        raise typer.Exit(FAILURE)


def _database(config: Path | None, database: str | None) -> Path | str:
    try:
        return configuration.load(CoordinatorSettings, config, {"database": database}).database
    except configuration.ConfigurationError as error:
        fail(str(error))


@contextmanager
def _failing_clearly() -> Iterator[None]:
    from perseus.service.domain.errors import StartupError, StoreFailedError

    try:
        yield
    except StartupError as error:
        fail(str(error), FAILURE)
    except StoreFailedError as error:
        fail(str(error), STORE_FAILED)
    except OSError as error:
        fail(said(error), FAILURE)
