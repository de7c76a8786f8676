"""A whole database in one portable file, for a backup or a move to another engine.

Lines of JSON. The first names the format: `{"format": "perseus-store", "schema": "v0005"}`. Then one line for
each row, `{"table": "runs", "row": {...}}`, columns by name, bytes in base64; tables and rows are in the
order of their keys. The last is `{"end": true, "row_count": 1234}`: a file without it was cut off.

The state is moved, not copied: the file keeps the epoch, the versions and the agents' commit markers. If the
old coordinator runs on after the export, agents will report lost state to the one that starts from the file.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from sqlalchemy import Connection, LargeBinary, func, insert, select

from perseus.service.domain.errors import StoreFailedError
from perseus.service.storage import schema
from perseus.service.storage.engines import connect, explain
from perseus.service.storage.membership import exclude_members
from perseus.service.storage.migrating import migrate

_FORMAT = "perseus-store"
_ROW_BATCH = 500


class ArchiveError(Exception):
    """A file is not an archive, or can't be imported into this database; nothing has changed."""


def export_database(database: Path | str, file: TextIO) -> int:
    """Write a database that nobody else uses into a file, migrated; return the number of rows.

    Raises:
        DatabaseUnavailableError: it can't be opened, or is in use.
        StoreFailedError: reading it failed.
    """
    opened = connect(database, is_read_only=False)
    try:
        with opened.connection.begin():
            migrate(opened.connection, opened.name)
            exclude_members(opened.connection, opened.name)
            return _export(opened.connection, file)
    except opened.errors as error:
        raise StoreFailedError(database=opened.name, cause=explain(error)) from None
    finally:
        opened.close()


def _export(connection: Connection, file: TextIO) -> int:
    _write_line(file, {"format": _FORMAT, "schema": schema.HEAD})
    count = 0
    for table in schema.metadata.sorted_tables:
        rows = connection.execute(select(table).order_by(*table.primary_key.columns))
        for row in rows.mappings():
            _write_line(file, {"table": table.name, "row": dict(row)})
            count += 1
    _write_line(file, {"end": True, "row_count": count})
    return count


def import_database(database: Path | str, file: TextIO) -> int:
    """Fill an empty database from a file; return the number of rows.

    Raises:
        ArchiveError: the file is not an archive, damaged or of another schema, or the database is not empty.
        DatabaseUnavailableError: it can't be opened or created, or is in use.
        StoreFailedError: writing it failed.
    """
    opened = connect(database)
    try:
        with opened.connection.begin():
            migrate(opened.connection, opened.name)
            exclude_members(opened.connection, opened.name)
            for table in schema.metadata.sorted_tables:
                if opened.connection.scalar(select(func.count()).select_from(table)):
                    raise ArchiveError(f"{opened.name}: expected an empty database, found {table.name}")
            return _import(opened.connection, file)
    except opened.errors as error:
        raise StoreFailedError(database=opened.name, cause=explain(error)) from None
    finally:
        opened.close()


def _import(connection: Connection, file: TextIO) -> int:
    lines = _lines(file)
    number, first = next(lines, (1, {}))
    if first.get("format") != _FORMAT:
        raise ArchiveError(f"line {number}: expected the first line of an exported store")
    if first.get("schema") != schema.HEAD:
        raise ArchiveError(
            f"line {number}: expected schema {schema.HEAD}, found {first.get('schema')}: "
            "export it with this release"
        )
    rows: list[dict[str, Any]] = []
    name, count = "", 0
    for number, line in lines:
        is_end = line.get("end") is True
        if name and (is_end or line.get("table") != name or len(rows) >= _ROW_BATCH):
            connection.execute(insert(schema.metadata.tables[name]), rows)
            count, rows = count + len(rows), []
        if is_end:
            if line.get("row_count") != count:
                raise ArchiveError(f"line {number}: expected {line.get('row_count')} rows, found {count}")
            return count
        name, row = line.get("table", ""), line.get("row")
        table = schema.metadata.tables.get(name)
        if table is None or not isinstance(row, dict) or row.keys() != set(table.c.keys()):
            raise ArchiveError(f"line {number}: expected a row of one of the tables, found something else")
        for column in table.c:
            if isinstance(column.type, LargeBinary) and not (column.nullable and row[column.name] is None):
                try:
                    row[column.name] = base64.b64decode(row[column.name], validate=True)
                except (TypeError, ValueError):
                    raise ArchiveError(f"line {number}: expected base64 in {column.name}") from None
        rows.append(row)
    raise ArchiveError("expected an end line, found the end of the file: it was cut off")


def _lines(file: TextIO) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, text in enumerate(file, 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ArchiveError(f"line {number}: expected JSON, found: {error}") from None
        if not isinstance(line, dict):
            raise ArchiveError(f"line {number}: expected an object, found {type(line).__name__}")
        yield number, line


def _write_line(file: TextIO, line: dict[str, Any]) -> None:
    file.write(json.dumps(line, allow_nan=False, default=_base64) + "\n")


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
