"""The engines: SQLite in one file, and PostgreSQL by URL. How they are opened, held alone, and how they fail.

Both give one connection, used from one thread, which nobody else can have meanwhile: a second coordinator on
the same database must not serve the same jobs. Commits wait until they are on the disk.

SQLite has a write-ahead log and is locked while it is open. That its file is removed or replaced under a
running coordinator would go unnoticed, everything would be written to a file without a name; so both files
are compared with what is under their names at every commit.

PostgreSQL is held by an advisory lock of the session: it is gone with the connection, and then the
coordinator stops at its next commit. It never connects again by itself, since another may have taken over.
"""

import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from perseus.service.domain.errors import DatabaseUnavailableError
from perseus.service.storage.schema import tables_of_others

_LOCK = 0x7065727365757301
"""The advisory lock's key: "perseus" and 1, of nobody else we hope."""

_CONNECT_TIMEOUT_S = 10

_LOCK_PATIENCE_S = 2.0
"""The server takes a moment to notice that whoever held the lock is gone, killed and started again, say."""

_LOCK_LOOK_S = 0.1

_SQLITE_SIZE = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
_POSTGRESQL_SIZE = "SELECT pg_database_size(current_database())"

_POSTGRESQL = ("postgresql", "postgres", "postgresql+psycopg")

# By the beginning of SQLite's error name.
_SQLITE_CAUSES = (
    ("SQLITE_FULL", "the disk is full"),
    ("SQLITE_READONLY", "it can't be written: the file or its file system is read-only"),
    ("SQLITE_CORRUPT", "its file is corrupt: restore a copy (`perseus store check` says more)"),
    ("SQLITE_NOTADB", "it is no SQLite database"),
    ("SQLITE_BUSY", "it is locked: is another coordinator running on it?"),
    ("SQLITE_CANTOPEN", "its file can't be opened: is the folder there, and may it be written?"),
)

# By PostgreSQL's SQLSTATE, or its class.
_POSTGRESQL_CAUSES = {
    "53100": "the server's disk is full",
    "53": "the server lacks resources",
    "25006": "it can't be written: the server is read-only",
    "XX001": "the server's data is corrupt",
    "XX002": "an index of the server is corrupt",
    "57": "the server has ended the connection",
    "08": "the connection to the server is lost",
    "28": "the server refuses the user",
    "3D": "the server has no such database",
    "42501": "the user lacks a permission",
}


@dataclass(frozen=True, slots=True)
class Opened:
    """An open database, held alone.

    Attributes:
        connection: the one to it.
        name: the database for people, without a password.
        missing: says what has become of its files since they were opened, None if nothing.
        errors: what it raises where it fails.
        size_query: asks for its size in bytes.
    """

    connection: Connection
    name: str
    missing: Callable[[], str | None]
    errors: tuple[type[Exception], ...]
    size_query: str

    def close(self) -> None:
        """Close it."""
        self.connection.close()
        self.connection.engine.dispose()


def is_url(database: Path | str) -> bool:
    """Tell whether a database is given by URL, and not by the path of a file."""
    return "://" in str(database)


def database_name(database: Path | str) -> str:
    """Return a database for people: without a password."""
    if not is_url(database):
        return str(database)
    try:
        return make_url(str(database)).render_as_string(hide_password=True)
    except (ArgumentError, ValueError):
        return "(not a URL)"


def connect(database: Path | str, *, is_read_only: bool = False) -> Opened:
    """Open a database, and hold it.

    Args:
        database: the path of a SQLite file, made if it isn't there, or postgresql://….
        is_read_only: write nothing, and make no file.

    Raises:
        DatabaseUnavailableError: it is in use, can't be reached or made, or is of no engine known here.
    """
    name = database_name(database)
    try:
        if not is_url(database):
            if os.path.exists(database) and not os.access(database, os.W_OK):
                cause = "it can't be written: the file or its file system is read-only"
                raise DatabaseUnavailableError(database=name, cause=cause)
            return _connect_sqlite(Path(database), is_read_only)
        try:
            url = make_url(str(database))
        except (ArgumentError, ValueError):  # its text may quote a password
            cause = "expected postgresql://USER@HOST/NAME"
            raise DatabaseUnavailableError(database=name, cause=cause) from None
        if url.drivername not in _POSTGRESQL:
            cause = f"expected a path or postgresql://…, found {url.drivername}://…"
            raise DatabaseUnavailableError(database=name, cause=cause)
        return _connect_postgresql(url, name, is_read_only)
    except (SQLAlchemyError, sqlite3.Error, OSError) as error:
        raise DatabaseUnavailableError(database=name, cause=explain(error)) from None


def explain(error: Exception) -> str:
    """Return what a database failed at, in one line."""
    origin: Any = error.orig if isinstance(error, DBAPIError) else error
    said = " ".join(str(origin).split())
    if (code := getattr(origin, "sqlite_errorname", None)) is not None:
        cause = next((text for prefix, text in _SQLITE_CAUSES if code.startswith(prefix)), None)
        return f"{cause} ({said})" if cause else f"{said} ({code})"
    if hasattr(origin, "sqlstate"):
        state = origin.sqlstate
        if state is None:  # it comes from the driver, not from the server
            return f"the server can't be reached ({said})"
        cause = _POSTGRESQL_CAUSES.get(state) or _POSTGRESQL_CAUSES.get(state[:2])
        return f"{cause} ({said})" if cause else f"{said} (SQLSTATE {state})"
    return said or type(error).__name__


# ---------------------------------------------------------------------- SQLite


def _connect_sqlite(path: Path, is_read_only: bool) -> Opened:
    def create() -> sqlite3.Connection:
        # Transactions are begun by hand, below.
        if is_read_only:
            uri = f"{path.resolve().as_uri()}?mode=rw"  # read-only ones can't recover a log
            connection = sqlite3.connect(uri, uri=True, timeout=1.0, isolation_level=None)
        else:
            connection = sqlite3.connect(path, timeout=1.0, isolation_level=None)
        try:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            _refuse_others(path, connection)  # before anything of the file is changed
            connection.execute("PRAGMA journal_mode = WAL")
            # The log is flushed at every commit: what was acknowledged must survive a power cut.
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        return connection

    engine = create_engine("sqlite://", creator=create, poolclass=NullPool)
    event.listen(
        engine, "begin", lambda connection: connection.connection.cursor().execute("BEGIN IMMEDIATE")
    )
    connection = engine.connect()
    return Opened(connection, str(path), _WatchedFiles(path).missing, _errors(engine), _SQLITE_SIZE)


def _refuse_others(path: Path, connection: sqlite3.Connection) -> None:
    """Leave another application's file alone."""
    names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    if tables := tables_of_others(name for name in names if not name.startswith("sqlite_")):
        cause = f"expected an empty database or one of Perseus, found tables {', '.join(tables)}"
        raise DatabaseUnavailableError(database=path, cause=cause)


class _WatchedFiles:
    """A SQLite database's files, by their inodes; the log's from when it is seen first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._log = Path(f"{path}-wal")
        self._file_id = _file_id(path)
        self._log_id: tuple[int, int] | None = None

    def missing(self) -> str | None:
        """Say what was removed or replaced, if anything was."""
        if _file_id(self._path) != self._file_id:
            return f"its file {self._path} was removed or replaced"
        found = _file_id(self._log)
        if self._log_id is None:
            self._log_id = found
        elif found != self._log_id:
            return f"its write-ahead log {self._log} was removed or replaced"
        return None


def _file_id(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


# ---------------------------------------------------------------------- PostgreSQL


def _connect_postgresql(url: URL, name: str, is_read_only: bool) -> Opened:
    engine = create_engine(
        url.set(drivername="postgresql+psycopg"),
        poolclass=NullPool,
        paramstyle="format",  # positional, as in SQLite
        connect_args={"connect_timeout": _CONNECT_TIMEOUT_S},
    )
    connection = engine.connect()
    try:
        # Whatever the server's default: what was acknowledged must survive its crash.
        connection.exec_driver_sql("SET synchronous_commit = on")
        if is_read_only:
            connection.exec_driver_sql("SET default_transaction_read_only = on")
        patience_ends_s = time.monotonic() + _LOCK_PATIENCE_S
        while not (is_ours := _try_lock(connection)) and time.monotonic() < patience_ends_s:
            time.sleep(_LOCK_LOOK_S)
        connection.commit()
    except BaseException:
        _abandon(connection, engine)
        raise
    if not is_ours:
        _abandon(connection, engine)
        cause = "it is locked: is another coordinator running on it?"
        raise DatabaseUnavailableError(database=name, cause=cause)
    return Opened(connection, name, lambda: None, _errors(engine), _POSTGRESQL_SIZE)


def _try_lock(connection: Connection) -> bool:
    return bool(connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({_LOCK})").scalar())


def _errors(engine: Engine) -> tuple[type[Exception], ...]:
    # The statements of every commit go to the driver itself.
    driver = engine.dialect.loaded_dbapi.Error
    assert isinstance(driver, type)
    return SQLAlchemyError, OSError, driver


def _abandon(connection: Connection, engine: Engine) -> None:
    connection.close()
    engine.dispose()
