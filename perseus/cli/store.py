"""`perseus store`: check the coordinator's database, replay a quarantined job; export and import."""

import io
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from perseus import configuration
from perseus.cli.destination import Destination
from perseus.cli.progress import working
from perseus.cli.rows import Format, FormatOption, show_rows
from perseus.cli.terminal import BAD_INPUT, FAILURE, STORE_FAILED, console, fail, os_error_text
from perseus.printable import printable
from perseus.service.settings import CoordinatorSettings

if TYPE_CHECKING:
    from perseus.service.domain.model import FaultyPart
    from perseus.service.job.recording import Recording

app = typer.Typer(no_args_is_help=True)

Config = Annotated[Path | None, typer.Option(help="TOML file with the coordinator's settings.")]
Database = Annotated[
    str | None,
    typer.Option(help=configuration.describe(CoordinatorSettings, "database"), show_default=False),
]


@app.command()
def check(config: Config = None, database: Database = None, form: FormatOption = Format.TABLE) -> None:
    """Read the whole database and report what is wrong, without changes: exit code 1 if anything is."""
    check_store(_database(config, database), form)


@app.command(name="export")
def export_(
    file: Annotated[Path, typer.Argument(help="Output file: lines of JSON.")],
    config: Config = None,
    database: Database = None,
) -> None:
    """Write the whole database to a portable file."""
    from perseus.service.storage.archive import export_database

    source = _database(config, database)
    destination = Destination("FILE", file)
    destination.check(
        *(Path(f"{source}{end}") for end in ("", "-wal", "-shm", "-lock") if "://" not in str(source))
    )
    _check_there(source)
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
    slots: Annotated[
        int | None,
        typer.Option(help=configuration.describe(CoordinatorSettings, "slots"), show_default=False),
    ] = None,
) -> None:
    """Fill an empty database, of either engine, from such a file; its jobs may be spread over slots then."""
    from perseus.service.storage.archive import ArchiveError, import_database

    settings = _settings(config, database, slots=slots)
    with _failing_clearly():
        try:
            with file.open(encoding="utf-8") as stream, working("Importing"):
                count = import_database(settings.database, stream, settings.slots)
        except (ArchiveError, UnicodeDecodeError) as error:
            fail(f"{file}: {error}", BAD_INPUT)
    console.print(f"imported {count} rows from {file}", highlight=False)


@app.command()
def replay(
    job_id: Annotated[str, typer.Argument(help="The quarantined job.", metavar="JOB")],
    run: Annotated[
        int | None, typer.Option(help="Run of the job; the latest by default.", min=1, show_default=False)
    ] = None,
    config: Config = None,
    database: Database = None,
) -> None:
    """Replay a quarantined run from its recorded inputs; exit code 1 if the same fault does not occur."""
    from perseus.service.domain.snapshot import Fault
    from perseus.service.job.recording import Recording
    from perseus.service.storage.checking import recordings

    settings = _settings(config, database)
    _check_there(settings.database)
    with _failing_clearly():
        found = recordings(settings.database, job_id)
        if not found or (run and run not in found):
            which = f"run {run} of job {job_id!r}" if run else f"job {job_id!r}"
            kept = f"; its recorded runs are {', '.join(map(str, found))}" if found else ""
            fail(f"{which}: no fault is recorded{kept}", FAILURE)
        number = run or max(found)
        recording, more = Recording.load(found[number])
    fault = Fault(more["part"], more["error"])
    _print(f"run {number} of job {job_id!r}: {fault}")
    percent = settings.solver_hull_tolerance_percent
    error = _replayed(recording, fault.part, None if percent is None else percent / 100)
    if error is None:
        fail("the replay ended without a fault", FAILURE)
    for line in "".join(traceback.format_exception(error)).splitlines():
        _print(line)
    if (found_fault := Fault.of(fault.part, error)) != fault:
        fail(f"a different fault occurred: {found_fault.error}", FAILURE)
    _print("the same fault occurred again")


def _replayed(recording: "Recording", part: "FaultyPart", hull_tolerance: float | None) -> Exception | None:
    """Replay a run and print its events; return the exception at which the coordinator fails, if any."""
    from perseus.service.domain.commands import Announce, Refine, Solve
    from perseus.service.domain.model import FaultyPart
    from perseus.service.job import views
    from perseus.service.job.machine import replay as steps_of
    from perseus.service.solving.work import answer
    from perseus.v1 import event_pb2

    machine = asked = None
    try:
        steps = steps_of(recording, partial(answer, hull_tolerance))
        for number, (_, machine, commands) in enumerate(steps):  # noqa: B007
            for command in commands if isinstance(commands, list) else ():
                if isinstance(command, Announce):
                    kind = event_pb2.JobEventType.Name(command.event.type).removeprefix("JOB_EVENT_TYPE_")
                    _print(f"input {number:>6}  {kind:<24} {command.event.message}")
                elif isinstance(command, Solve | Refine):
                    asked = command
        if machine is not None and part is FaultyPart.VIEW:
            views.job(machine.run, is_full=True)
        elif asked is not None and part is FaultyPart.SOLVING:
            answer(hull_tolerance, asked)
    except Exception as error:
        return error
    return None


def _print(text: str) -> None:
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def check_store(database: Path | str, form: Format = Format.TABLE) -> None:
    """Print a database's problems, and exit with 1 if there are any."""
    from rich.text import Text

    from perseus.service.storage.checking import check_database

    _check_there(database)
    with _failing_clearly(), working("Checking"):
        findings = check_database(database)
    lines = [printable(finding) for finding in findings]
    shown = Text("\n".join(lines) or "the store is consistent")
    show_rows(form, [{"finding": line} for line in lines], ["finding"], lambda: shown)
    if findings:
        raise typer.Exit(FAILURE)


def _check_there(database: Path | str) -> None:
    if "://" not in str(database) and not Path(database).exists():
        fail(f"cannot open the database {database}: there is no such file", FAILURE)


def _database(config: Path | None, database: str | None) -> Path | str:
    return _settings(config, database).database


def _settings(config: Path | None, database: str | None, **flags: object) -> CoordinatorSettings:
    try:
        return configuration.load(CoordinatorSettings, config, {"database": database, **flags})
    except configuration.ConfigurationError as error:
        fail(str(error))


@contextmanager
def _failing_clearly() -> Iterator[None]:
    from perseus.service.domain.errors import ServiceError, StoreFailedError

    try:
        yield
    except StoreFailedError as error:
        fail(str(error), STORE_FAILED)
    except ServiceError as error:
        fail(str(error), FAILURE)
    except OSError as error:
        fail(os_error_text(error), FAILURE)
