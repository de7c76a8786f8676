"""The gateway's durable state: accepted messages, and breaches whose end is not published yet.

It is one SQLite file. A write is on the disk when the call returns; only then is a message's receipt
acknowledged. A second gateway on the same file is refused.
"""

import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from perseus.grid.dsx_flex.breaches import Breach
from perseus.grid.dsx_flex.values import TargetSet

_APPLICATION_ID = 0x50644678
_SCHEMA = """
CREATE TABLE IF NOT EXISTS messages (
    number INTEGER PRIMARY KEY AUTOINCREMENT, event_id TEXT NOT NULL UNIQUE, content TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS breaches (breach_id TEXT PRIMARY KEY, content TEXT NOT NULL);
"""
_SETS: TypeAdapter[TargetSet] = TypeAdapter(TargetSet)
_BREACHES: TypeAdapter[Breach] = TypeAdapter(Breach)
_Stored = TypeVar("_Stored")


class JournalError(Exception):
    """The file can't be used; the text names it."""


class Journal:
    """The file at a path, created if there is none.

    Raises:
        JournalError: it can't be created, or belongs to another application or gateway. Every method may
            raise this.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise JournalError(f"{path}: can't be created: {error.strerror}") from None
        try:
            self._file = sqlite3.connect(path, timeout=0.0, isolation_level=None)
            self._open()
        except sqlite3.Error as error:
            raise JournalError(f"{path}: expected a file of this gateway alone, found: {error}") from None

    def close(self) -> None:
        """Close the file, so that others may open it."""
        self._file.close()

    def keep_targets(self, some: TargetSet) -> None:
        """Store an accepted message."""
        self._write(
            "INSERT INTO messages (event_id, content) VALUES (?, ?)", some.event_id, _text(_SETS, some)
        )

    def forget_targets(self, event_ids: Iterable[str]) -> None:
        """Delete messages."""
        for event_id in event_ids:
            self._write("DELETE FROM messages WHERE event_id = ?", event_id)

    def targets(self) -> list[TargetSet]:
        """Return all messages in order of arrival."""
        return self._read(_SETS, "SELECT content FROM messages ORDER BY number")

    def keep_breach(self, breach: Breach) -> None:
        """Store the state of a breach."""
        text = _text(_BREACHES, breach)
        self._write(
            "INSERT OR REPLACE INTO breaches (breach_id, content) VALUES (?, ?)", breach.breach_id, text
        )

    def forget_breach(self, breach_id: str) -> None:
        """Delete a breach whose resolution has been published."""
        self._write("DELETE FROM breaches WHERE breach_id = ?", breach_id)

    def breaches(self) -> list[Breach]:
        """Return all stored breaches."""
        return self._read(_BREACHES, "SELECT content FROM breaches ORDER BY breach_id")

    def _open(self) -> None:
        self._file.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._file.execute("PRAGMA journal_mode = WAL")
        self._file.execute("PRAGMA synchronous = FULL")
        (application,) = self._file.execute("PRAGMA application_id").fetchone()
        (tables,) = self._file.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application != _APPLICATION_ID and (application or tables):
            raise JournalError(f"{self._path}: expected a file of this gateway, found another application's")
        self._file.execute("BEGIN IMMEDIATE")
        self._file.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        self._file.execute("COMMIT")
        self._file.executescript(_SCHEMA)

    def _write(self, statement: str, *values: str) -> None:
        try:
            self._file.execute(statement, values)
        except sqlite3.Error as error:
            raise JournalError(f"{self._path}: can't be written: {error}") from None

    def _read(self, kind: TypeAdapter[_Stored], statement: str) -> list[_Stored]:
        try:
            rows = self._file.execute(statement).fetchall()
            return [kind.validate_python(json.loads(content)) for (content,) in rows]
        except (sqlite3.Error, ValidationError, ValueError) as error:
            raise JournalError(f"{self._path}: can't be read: {error}") from None


def _text(kind: TypeAdapter[Any], content: object) -> str:
    """Return JSON text; Python's JSON supports infinity, which represents an open end."""
    return json.dumps(kind.dump_python(content, mode="json"))
