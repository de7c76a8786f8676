"""The engines, SQLite in one file and PostgreSQL by URL: how they are opened and locked, and how they fail.

Both give one connection that writes; a second coordinator on the same database must not serve the same jobs.
Commits wait until they are on the disk. Beside it there may be connections that read: each of their
transactions sees one state, and readers and the writer don't wait for each other.

SQLite has a write-ahead log. A lock on a file beside the database keeps a second coordinator out: the kernel
releases it with the process, however that ends, and nobody deletes the file, as another process may be about
to lock it. If files were removed or replaced under a running coordinator, it would not notice, and would
write to a file without a name; so every commit compares the open files with those under their names.

On PostgreSQL several coordinators share the database, and each transaction checks that it may write
(`membership`). Every connection sets what it depends on, whatever the defaults of server, database and role,
and one that is lost is opened again by the next transaction: what was on its way is then unknown.
"""

import fcntl
import math
import os
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from perseus.service.domain.errors import DatabaseUnavailableError
from perseus.service.storage.schema import schema_of, tables_of_others

LOCKED = "it is locked: is another coordinator running on it?"

_CONNECT_LIMIT_S = 10.0

_SILENCE_LIMIT_S = 5
"""A server that vanished without a word is noticed after about this time, and so is a client."""

_STATEMENT_LIMIT_S = 60.0
_LOCK_LIMIT_S = 2.0
_IDLE_TRANSACTION_LIMIT_S = 60.0
"""Unless a connection sets others: how long a statement may take, how long it may wait for a lock, and how
long a transaction may be idle."""

LONG_LOG_BYTES = 64 * 2**20
"""While the log is longer, reads take turns with commits. SQLite checkpoints it every 4 MB, but only up to
the oldest reader's state: readers that overlap without a gap would let it grow without bound."""

_SQLITE_SIZE = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
_POSTGRESQL_SIZE = "SELECT pg_database_size(current_database())"

_POSTGRESQL = ("postgresql", "postgres", "postgresql+psycopg")

# By the beginning of SQLite's error name.
_SQLITE_CAUSES = (
    ("SQLITE_FULL", "the disk is full"),
    ("SQLITE_IOERR_SHMSIZE", "the disk is full"),
    ("SQLITE_READONLY", "it can't be written: the file or its file system is read-only"),
    ("SQLITE_CORRUPT", "its file is corrupt: restore a copy (`perseus store check` says more)"),
    ("SQLITE_NOTADB", "it is not a SQLite database"),
    ("SQLITE_BUSY", LOCKED),
    ("SQLITE_CANTOPEN", "its file can't be opened: does the folder exist, and is it writable?"),
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
    "55P03": LOCKED,
}

# Failures that pass: a conflict of transactions, a lock that is not free, a cancelled statement, a lost
# connection, and a server that does not take one yet.
_PASSING = ("40001", "40P01", "55P03", "57", "08", "25P03", "53300")


@dataclass(frozen=True, slots=True)
class Opened:
    """An open database.

    Attributes:
        connection: its connection, to be used from one thread at a time.
        name: the database's name for people, without a password.
        missing: returns what has happened to its files since they were opened, None if nothing.
        has_long_log: returns whether its log is so long that reads must take turns with commits.
        errors: the exceptions that it raises when it fails.
        size_query: the SQL query for its size in bytes.
        close: closes it.
        abort: lets whoever waits for its answer fail, from any thread, and repeat nothing.
        may_repeat: returns whether a transaction that failed with an error may succeed if it is repeated.
    """

    connection: Connection
    name: str
    missing: Callable[[], str | None]
    has_long_log: Callable[[], bool]
    errors: tuple[type[Exception], ...]
    size_query: str
    close: Callable[[], None]
    abort: Callable[[], None]
    may_repeat: Callable[[Exception], bool]


def is_url(database: Path | str) -> bool:
    """Return whether a database is given by URL, and not by the path of a file."""
    return "://" in str(database)


def database_name(database: Path | str) -> str:
    """Return a database's name for people, without a password."""
    if not is_url(database):
        return str(database)
    try:
        return make_url(str(database)).render_as_string(hide_password=True)
    except (ArgumentError, ValueError):
        return "(not a URL)"


def connect(
    database: Path | str, *, slot: int = 0, is_read_only: bool = False, session: str = "", **limits_s: float
) -> Opened:
    """Open a database; lock a SQLite file unless it is opened read-only.

    Args:
        database: the path of a SQLite file, created if it doesn't exist, or postgresql://….
        slot: the slot of jobs that statements are about, on PostgreSQL.
        is_read_only: only read, beside the coordinator that holds the lock; write and create nothing.
        session: the name of its session, on PostgreSQL.
        limits_s: on PostgreSQL, the limits of `postgresql_engine`.

    Raises:
        DatabaseUnavailableError: it is in use, can't be reached or created, or has an unknown engine.
    """
    name = database_name(database)
    try:
        if not is_url(database):
            if os.path.exists(database) and not os.access(database, os.W_OK):
                cause = "it can't be written: the file or its file system is read-only"
                raise DatabaseUnavailableError(database=name, cause=cause)
            return _connect_sqlite(Path(database), is_read_only)
        return _connect_postgresql(
            database, name, slot=slot, is_read_only=is_read_only, session=session, **limits_s
        )
    except (SQLAlchemyError, sqlite3.Error, OSError) as error:
        raise DatabaseUnavailableError(database=name, cause=explain(error)) from None


def explain(error: Exception) -> str:
    """Return the cause of a database's failure, in one line."""
    origin = _origin(error)
    cause_text = " ".join(str(origin).split())
    if (code := getattr(origin, "sqlite_errorname", None)) is not None:
        cause = next((text for prefix, text in _SQLITE_CAUSES if code.startswith(prefix)), None)
        return f"{cause} ({cause_text})" if cause else f"{cause_text} ({code})"
    if hasattr(origin, "sqlstate"):
        state = origin.sqlstate
        if state is None:  # it comes from the driver, not from the server
            return f"the server can't be reached ({cause_text})"
        cause = _POSTGRESQL_CAUSES.get(state) or _POSTGRESQL_CAUSES.get(state[:2])
        return f"{cause} ({cause_text})" if cause else f"{cause_text} (SQLSTATE {state})"
    return cause_text or type(error).__name__


def _origin(error: Exception) -> Any:
    """Return the driver's own error."""
    return error.orig if isinstance(error, DBAPIError) else error


# ---------------------------------------------------------------------- SQLite


def _connect_sqlite(path: Path, is_read_only: bool) -> Opened:
    files = _Files(path)
    with ExitStack() as stack:
        # Transactions begin explicitly, below. A read-only connection can't recover a log.
        raw = sqlite3.connect(
            f"{files.real.as_uri()}?mode={'rw' if is_read_only else 'rwc'}",
            uri=True,
            timeout=1.0,
            isolation_level=None,
            check_same_thread=False,
        )
        stack.callback(raw.close)
        _refuse_others(path, raw)  # before anything in the file is changed
        if is_read_only:
            raw.execute("PRAGMA query_only = ON")
        else:
            _lock(path, files.lock, stack)
            raw.execute("PRAGMA journal_mode = WAL")
            # The log is flushed at every commit: acknowledged data must survive a power cut.
            raw.execute("PRAGMA synchronous = FULL")
            raw.execute(f"PRAGMA journal_size_limit = {LONG_LOG_BYTES}")
            raw.execute("BEGIN IMMEDIATE")
            raw.execute("COMMIT")
            files.watch()
        engine = create_engine("sqlite://", creator=lambda: raw, poolclass=NullPool)
        begin = "BEGIN" if is_read_only else "BEGIN IMMEDIATE"
        event.listen(engine, "begin", lambda connection: connection.connection.cursor().execute(begin))
        return Opened(
            stack.enter_context(engine.connect()),
            str(path),
            files.missing,
            files.has_long_log,
            driver_errors(engine),
            _SQLITE_SIZE,
            stack.pop_all().close,
            raw.interrupt,
            lambda _: False,
        )


def _lock(path: Path, file: Path, stack: ExitStack) -> None:
    """Lock the file beside a database until the stack is closed."""
    try:
        lock = os.open(file, os.O_RDONLY | os.O_CREAT, 0o644)
    except OSError as error:
        cause = f"its lock file {file} can't be opened: {error.strerror}"
        raise DatabaseUnavailableError(database=path, cause=cause) from None
    stack.callback(os.close, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DatabaseUnavailableError(database=path, cause=LOCKED) from None


def _refuse_others(path: Path, connection: sqlite3.Connection) -> None:
    """Refuse a file of another application."""
    names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    if tables := tables_of_others(name for name in names if not name.startswith("sqlite_")):
        cause = f"expected an empty database or one of Perseus, found tables {', '.join(tables)}"
        raise DatabaseUnavailableError(database=path, cause=cause)


class _Files:
    """A SQLite database's files: those beside it are named after the file that symbolic links lead to.

    Attributes:
        real: that file.
        lock: the file to lock.
    """

    def __init__(self, path: Path) -> None:
        self.real = Path(os.path.realpath(path))  # unlike resolve(), it leaves loops to SQLite's error
        self.lock = Path(f"{self.real}-lock")
        self._log = Path(f"{self.real}-wal")
        self._watched = {
            path: "file",
            self._log: "write-ahead log",
            Path(f"{self.real}-shm"): "write-ahead log's index",
            self.lock: "lock file",
        }
        self._ids: dict[Path, tuple[int, int] | None] = {}

    def watch(self) -> None:
        """Remember which files these are, for `missing`."""
        self._ids = {file: _file_id(file) for file in self._watched}

    def missing(self) -> str | None:
        """Return what was removed or replaced, None if nothing was."""
        for file, found in self._ids.items():
            if _file_id(file) != found:
                return f"its {self._watched[file]} {file} was removed or replaced"
        return None

    def has_long_log(self) -> bool:
        """Return whether the log is long."""
        found = _stat(self._log)
        return found is not None and found.st_size > LONG_LOG_BYTES


def _file_id(file: Path) -> tuple[int, int] | None:
    found = _stat(file)
    return None if found is None else (found.st_dev, found.st_ino)


def _stat(file: Path) -> os.stat_result | None:
    try:
        return os.stat(file)
    except FileNotFoundError:
        return None


# ---------------------------------------------------------------------- PostgreSQL


def postgresql_engine(
    database: Path | str,
    *,
    slot: int = 0,
    is_read_only: bool = False,
    session: str = "",
    statement_limit_s: float = _STATEMENT_LIMIT_S,
    lock_limit_s: float = _LOCK_LIMIT_S,
    idle_limit_s: float = _IDLE_TRANSACTION_LIMIT_S,
    connect_limit_s: float = _CONNECT_LIMIT_S,
    **options: Any,
) -> tuple[Engine, Callable[[], None]]:
    """Return an engine for a PostgreSQL server, whose connections inherit no default that matters, and a
    function that lets whoever waits for the latest connection's answer fail, from any thread.

    Args:
        database: postgresql://….
        slot: the slot of jobs that statements are about.
        is_read_only: only read; each transaction sees one state.
        session: the name of its sessions.
        statement_limit_s: after so long a statement fails; 0 for never.
        lock_limit_s: after so long a statement that waits for a lock fails; 0 for never.
        idle_limit_s: after so long the server ends a session that leaves a transaction idle.
        connect_limit_s: after so long a connection that isn't there fails; at least 2.
        options: SQLAlchemy's.

    Raises:
        DatabaseUnavailableError: the database is not given as postgresql://….
    """
    name = database_name(database)
    try:
        url = make_url(str(database))
    except (ArgumentError, ValueError):  # its text may quote a password
        cause = "expected postgresql://USER@HOST/NAME"
        raise DatabaseUnavailableError(database=name, cause=cause) from None
    if url.drivername not in _POSTGRESQL:
        cause = f"expected a path or postgresql://…, found {url.drivername}://…"
        raise DatabaseUnavailableError(database=name, cause=cause)
    engine = create_engine(
        url.set(drivername="postgresql+psycopg"),
        connect_args={
            "connect_timeout": math.ceil(connect_limit_s),
            "keepalives_idle": _SILENCE_LIMIT_S,
            "keepalives_interval": 1,
            "keepalives_count": 3,
            "tcp_user_timeout": _SILENCE_LIMIT_S * 1000,
            "client_encoding": "utf8",
            **({"application_name": session} if session else {}),
        },
        **options,
    )
    settings = {
        "default_transaction_isolation": "repeatable read" if is_read_only else "read committed",
        "default_transaction_read_only": "on" if is_read_only else "off",
        "default_transaction_deferrable": "off",
        "synchronous_commit": "on",  # acknowledged data must survive the server's crash
        "statement_timeout": f"{statement_limit_s * 1000:.0f}",
        "lock_timeout": f"{lock_limit_s * 1000:.0f}",
        "idle_in_transaction_session_timeout": f"{idle_limit_s * 1000:.0f}",
        "idle_session_timeout": "0",
        "transaction_timeout": "0",
        "tcp_keepalives_idle": f"{_SILENCE_LIMIT_S}",
        "tcp_keepalives_interval": "1",
        "tcp_keepalives_count": "3",
        "tcp_user_timeout": f"{_SILENCE_LIMIT_S * 1000}",
        "extra_float_digits": "1",  # figures are read as they were written
    }
    latest: list[Any] = []

    @event.listens_for(engine, "connect")
    def begin_session(connection: Any, _: object) -> None:
        latest[:] = [connection]
        _set(connection, settings, slot)

    return engine, lambda: _abort(latest)


def _set(connection: Any, settings: Mapping[str, str], slot: int) -> None:
    """Let a new session have these settings, as far as its server knows them, and find a slot's tables."""
    connection.execute(
        "SELECT set_config(name, wanted, false) FROM unnest(%s::text[], %s::text[]) AS new (name, wanted) "
        "JOIN pg_settings USING (name)",
        (list(settings), list(settings.values())),
    )
    if slot:
        connection.execute(_ENTER, {"own": f"{schema_of(slot)}, ", "is_local": False})
    connection.commit()


_ENTER = """
SELECT set_config('search_path', %(own)s || reset_val, %(is_local)s)
FROM pg_settings WHERE name = 'search_path'"""


def enter(connection: Connection, slot: int) -> None:
    """Let the open transaction of a connection to PostgreSQL find the tables of a slot."""
    own = f"{schema_of(slot)}, " if slot else ""
    connection.exec_driver_sql(_ENTER, {"own": own, "is_local": True})


def check_encoding(connection: Connection, name: str) -> None:
    """Check that any text can be stored.

    Raises:
        DatabaseUnavailableError: it can't.
    """
    if connection.dialect.name != "postgresql":
        return
    if (found := connection.exec_driver_sql("SHOW server_encoding").scalar()) != "UTF8":
        cause = f"expected encoding UTF8, found {found}: create it with ENCODING 'UTF8' TEMPLATE template0"
        raise DatabaseUnavailableError(database=name, cause=cause)


def _abort(connections: Iterable[Any]) -> None:
    for connection in connections:
        with suppress(Exception), socket.socket(fileno=os.dup(connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)  # fails if it is closed, or being closed


def _connect_postgresql(database: Path | str, name: str, **options: Any) -> Opened:
    with ExitStack() as stack:
        # Positional parameters, as in SQLite.
        engine, abort_latest = postgresql_engine(
            database, poolclass=NullPool, pool_reset_on_return=None, paramstyle="format", **options
        )
        lost = OSError, engine.dialect.loaded_dbapi.OperationalError
        is_aborted = threading.Event()

        def abort() -> None:
            is_aborted.set()
            abort_latest()

        def may_repeat(error: Exception) -> bool:
            origin = _origin(error)
            state = getattr(origin, "sqlstate", None)
            is_passing = isinstance(origin, lost) if state is None else state.startswith(_PASSING)
            return is_passing and not is_aborted.is_set()

        return Opened(
            stack.enter_context(engine.connect()),
            name,
            lambda: None,
            lambda: False,
            driver_errors(engine),
            _POSTGRESQL_SIZE,
            stack.pop_all().close,
            abort,
            may_repeat,
        )


def driver_errors(engine: Engine) -> tuple[type[Exception], ...]:
    """Return the exceptions that an engine raises when the database fails."""
    # Every commit passes its statements directly to the driver.
    driver = engine.dialect.loaded_dbapi.Error
    assert isinstance(driver, type)
    return SQLAlchemyError, OSError, driver
