"""A whole database in one portable file, for a backup or a move to another engine.

Lines of JSON. The first names the format: `{"format": "perseus-store", "schema": "v0008", "slot_count": 1}`.
Then one line for each row, `{"slot": 0, "table": "runs", "row": {...}}`, columns by name, bytes in base64;
tables and rows are in the order of their keys. The last is `{"end": true, "row_count": 1234}`: a file without
it was cut off.

The jobs of one slot can be spread over several by an import. What belongs to no job is then in all of them,
so that the epoch and everything else that agents depend on stays what it was.

The state is moved, not copied: the file keeps the epoch, the versions and the agents' commit markers. If the
old coordinator runs on after the export, agents will report lost state to the one that starts from the file.
"""

import base64
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from sqlalchemy import Connection, LargeBinary, func, insert, select
from sqlalchemy.exc import DataError, IntegrityError, InterfaceError, ProgrammingError

from perseus.job_id import slot_of
from perseus.service.domain.errors import StoreFailedError
from perseus.service.storage import schema
from perseus.service.storage.engines import Opened, check_encoding, connect, enter, explain
from perseus.service.storage.membership import exclude_members
from perseus.service.storage.migrating import migrate, slot_count

_FORMAT = "perseus-store"
_ROW_BATCH = 500
MAX_LINE_LENGTH = 128 * 2**20
"""In characters: a line beyond it is refused before all of it is read."""
_UNFIT_VALUES = (ValueError, OverflowError, DataError, IntegrityError, InterfaceError, ProgrammingError)


class ArchiveError(Exception):
    """A file is not an archive, or can't be imported into this database; nothing has changed."""


def export_database(database: Path | str, file: TextIO) -> int:
    """Write a database that nobody else uses into a file, migrated; return the number of rows.

    Raises:
        DatabaseUnavailableError: it can't be opened, or is in use.
        StoreFailedError: reading it failed.
    """
    opened = connect(database, statement_limit_s=0)
    try:
        with opened.connection.begin():
            migrate(opened.connection, opened.name)
            exclude_members(opened.connection, opened.name)
            return _export(opened, file)
    except opened.errors as error:
        raise StoreFailedError(database=opened.name, cause=explain(error)) from None
    finally:
        opened.close()


def _export(opened: Opened, file: TextIO) -> int:
    connection, slots = opened.connection, slot_count(opened.connection)
    _write_line(file, {"format": _FORMAT, "schema": schema.HEAD, "slot_count": slots})
    count = 0
    for slot in range(slots):
        migrate(connection, opened.name, slot)
        for table in schema.tables_of(slot):
            rows = connection.execute(select(table).order_by(*table.primary_key.columns))
            for row in rows.mappings():
                _write_line(file, {"slot": slot, "table": table.name, "row": dict(row)})
                count += 1
    _write_line(file, {"end": True, "row_count": count})
    return count


def import_database(database: Path | str, file: TextIO, slots: int = 1) -> int:
    """Fill an empty database from a file, with the jobs in so many slots; return the number of rows.

    Raises:
        ArchiveError: the file is not an archive, damaged, or of another schema or number of slots, or the
            database is not empty.
        DatabaseUnavailableError: it can't be opened or created, or is in use.
        StoreFailedError: writing it failed.
    """
    lines = _lines(file)
    found = _slots_of(*next(lines, (1, {})))
    if found not in (1, slots):
        raise ArchiveError(f"slots: expected {found}, as in the file, found {slots}")
    opened = connect(database, statement_limit_s=0)
    try:
        with opened.connection.begin():
            check_encoding(opened.connection, opened.name)
            for slot in range(slots):
                migrate(opened.connection, opened.name, slot)
                if slot == 0:
                    exclude_members(opened.connection, opened.name)
                for table in schema.tables_of(slot):
                    if opened.connection.scalar(select(func.count()).select_from(table)):
                        raise ArchiveError(
                            f"{opened.name}: expected an empty database, found rows in its table {table.name}"
                        )
            count = _import(opened.connection, lines, slots, is_spreading=found != slots)
            if slots > 1:
                _add_slots(opened.connection, slots)
            return count
    except opened.errors as error:
        raise StoreFailedError(database=opened.name, cause=explain(error)) from None
    finally:
        opened.close()


def _slots_of(number: int, first: dict[str, Any]) -> int:
    """Return the number of slots in a file that begins with this line."""
    if first.get("format") != _FORMAT:
        raise ArchiveError(f"line {number}: expected the first line of an exported store")
    if first.get("schema") != schema.HEAD:
        raise ArchiveError(
            f"line {number}: expected schema {schema.HEAD}, found {first.get('schema')}: "
            "export it with this release"
        )
    slots = first.get("slot_count")
    if not isinstance(slots, int):
        raise ArchiveError(f"line {number}: expected a number of slots, found {slots!r}")
    return slots


def _import(
    connection: Connection, lines: Iterator[tuple[int, dict[str, Any]]], slots: int, *, is_spreading: bool
) -> int:
    rows: dict[tuple[int, str], list[dict[str, Any]]] = {}

    def insert_rows(slot: int, name: str) -> None:
        if slots > 1:
            enter(connection, slot)
        try:
            connection.execute(insert(schema.metadata.tables[name]), rows.pop((slot, name)))
        except _UNFIT_VALUES as error:
            raise ArchiveError(
                f"up to line {number}: expected rows of table {name}, found: {explain(error)}"
            ) from None

    for count, (number, line) in enumerate(lines):
        if line.get("end") is True:
            if line.get("row_count") != count:
                raise ArchiveError(f"line {number}: expected {line.get('row_count')} rows, found {count}")
            for key in list(rows):
                insert_rows(*key)
            return count
        name, row, slot = str(line.get("table")), line.get("row"), line.get("slot", -1)
        table = schema.metadata.tables.get(name)
        if (
            table is None
            or not isinstance(row, dict)
            or row.keys() != set(table.c.keys())
            or slot not in range(slots)
        ):
            raise ArchiveError(f"line {number}: expected a row of one of the tables, found something else")
        for column in table.c:
            if isinstance(column.type, LargeBinary) and not (column.nullable and row[column.name] is None):
                try:
                    row[column.name] = base64.b64decode(row[column.name], validate=True)
                except (TypeError, ValueError):
                    raise ArchiveError(f"line {number}: expected base64 in {column.name}") from None
        targets: Sequence[int] = (slot,)
        if is_spreading and table not in schema.OF_FLEET:
            targets = (slot_of(str(row["job_id"]), slots),) if "job_id" in row else range(slots)
        for target in targets:
            rows.setdefault((target, name), []).append(row)
            if len(rows[target, name]) >= _ROW_BATCH:
                insert_rows(target, name)
    raise ArchiveError("expected an end line, found the end of the file: it was cut off")


def _add_slots(connection: Connection, slots: int) -> None:
    """Add the slots that the file did not have; lease epochs go on from its own, which agents remember."""
    table = schema.slots
    known = {row.number: row.lease_epoch for row in connection.execute(select(table))}
    missing = [
        {"number": number, "holder": "", "lease_epoch": max(known.values(), default=0)}
        for number in range(slots)
        if number not in known
    ]
    if missing:
        connection.execute(insert(table), missing)


def _lines(file: TextIO) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, text in enumerate(iter(lambda: file.readline(MAX_LINE_LENGTH + 1), ""), 1):
        if len(text) > MAX_LINE_LENGTH:
            raise ArchiveError(f"line {number}: expected at most {MAX_LINE_LENGTH} characters, found more")
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArchiveError(f"line {number}: expected JSON, found: {error}") from None
        if not isinstance(line, dict):
            raise ArchiveError(f"line {number}: expected an object, found {type(line).__name__}")
        yield number, line


def _write_line(file: TextIO, line: dict[str, Any]) -> None:
    file.write(json.dumps(line, allow_nan=False, default=_base64) + "\n")


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
