"""The rows of coordinators that share a PostgreSQL database: members with leases, and slots with epochs.

A renewal and a takeover change different rows. Were an expired lease judged by reading it, a renewal that is
about to commit could extend it at the same time, and both would succeed. So expired members are *deleted*,
which waits for no one and skips rows that are being renewed; a slot whose holder has no row is free, and as
no identifier is ever used twice, it stays so. Times are of the server's clock alone (`clock_timestamp()`:
`now()` would be the transaction's start).

Every transaction that writes what belongs to a slot begins with `check_fence`, which locks the slot's row FOR
SHARE until the commit: taking the slot waits for it, so that a new holder sees everything that the old one
has committed, and the old one can commit nothing afterwards. A member that freezes in a transaction would
hold that lock until it wakes: `idle_in_transaction_session_timeout` does not notice a client that stops
within a pipeline of statements. So whoever takes over from a member that is gone ends its session first,
which it finds by its name.
"""

import time
import uuid
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, text

from perseus.clock_skew import clock_ahead_s
from perseus.service.domain.errors import DatabaseUnavailableError, StoreFailedError
from perseus.service.domain.members import Member, Slot
from perseus.service.storage.engines import (
    LOCKED,
    check_encoding,
    database_name,
    driver_errors,
    explain,
    postgresql_engine,
)
from perseus.service.storage.migrating import (
    commit_number,
    create_state,
    data_missing,
    migrate,
    slot_count,
)

MIGRATION_LOCK = 0x7065727365757301
"""An advisory lock for the length of a migration. Coordinators before schema v0005 held it as long as they
ran: while one does, no member joins, as it would write unfenced."""

MIGRATION_LOCK_LIMIT_MS = 10_000

_JOIN = """
INSERT INTO members (member_id, address, place, expire_time_s, page_url)
VALUES (:me, :address, :place, extract(epoch FROM clock_timestamp()) + :lease_s, :page_url)"""

_RENEW = """
UPDATE members SET expire_time_s = extract(epoch FROM clock_timestamp()) + :lease_s
WHERE member_id = :me AND expire_time_s > extract(epoch FROM clock_timestamp())
RETURNING extract(epoch FROM clock_timestamp())"""

_EVICT = """
DELETE FROM members WHERE member_id IN (
    SELECT member_id FROM members WHERE expire_time_s <= extract(epoch FROM clock_timestamp())
    FOR UPDATE SKIP LOCKED
)"""

_END_SESSION = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = (
    SELECT 'perseus ' || holder FROM slots
    WHERE number = :number AND NOT EXISTS (SELECT 1 FROM members WHERE member_id = slots.holder)
)"""

_TAKE = """
UPDATE slots SET holder = :me, lease_epoch = lease_epoch + 1
WHERE number = :number AND lease_epoch = :lease_epoch
    AND (holder = :me OR NOT EXISTS (SELECT 1 FROM members WHERE member_id = slots.holder))
    AND EXISTS (
        SELECT 1 FROM members
        WHERE member_id = :me AND expire_time_s > extract(epoch FROM clock_timestamp())
    )
RETURNING lease_epoch"""


class MemberRows:
    """One member's rows, on a connection of its own.

    Every call blocks, and raises StoreFailedError if the database fails: the outcome is then unknown. The
    next call opens the connection again.

    Attributes:
        member_id: its identifier, for this start of the coordinator alone.
        database_ahead_s: how far the server's clock was ahead of this host's at the latest renewal.
    """

    def __init__(self, database: Path | str, lease_s: float, slots: int = 1) -> None:
        """Connect to a database whose jobs are in so many slots, and migrate it if it has an older schema.

        Raises:
            DatabaseUnavailableError: it can't be reached, is not ours or newer, has another encoding or
                number of slots, lacks the data of one, or a coordinator of an older release runs on it.
        """
        self.member_id = uuid.uuid4().hex
        self.database_ahead_s = 0.0
        self._lease_s = lease_s
        self._name = database_name(database)
        self._engine, self._abort = postgresql_engine(
            database, pool_size=1, max_overflow=0, statement_limit_s=lease_s / 6, lock_limit_s=0
        )
        self._errors = driver_errors(self._engine)
        try:
            with self._engine.begin() as connection:
                check_encoding(connection, self._name)
                connection.execute(text("SET LOCAL statement_timeout = 0"))
                connection.execute(text(f"SET LOCAL lock_timeout = {MIGRATION_LOCK_LIMIT_MS}"))
                connection.execute(text(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})"))
                for number, lease_epoch in _slots_of(connection, self._name, slots):
                    migrate(connection, self._name, number)
                    if commit_number(connection) is None:
                        if lease_epoch:
                            raise data_missing(self._name, number)
                        create_state(connection)
        except self._errors as error:
            self.close()
            raise DatabaseUnavailableError(database=self._name, cause=explain(error)) from None
        except DatabaseUnavailableError:
            self.close()
            raise

    def join(self, address: str, place: str, page_url: str = "") -> None:
        """Become a member, who is reached at `address`, and its page at `page_url`.

        `place` identifies where it listens, if nobody else can listen there meanwhile: a member that did is
        gone, and needs no time to expire.
        """
        self._run("DELETE FROM members WHERE place = :place AND place <> ''", place=place)
        self._run(_JOIN, address=address, place=place, page_url=page_url)

    def renew(self) -> tuple[list[Member], list[Slot]] | None:
        """Renew the lease, delete expired members, and return all members and slots; None if it had
        expired."""
        sent_s = time.time()
        if not (renewed := self._run(_RENEW)):
            return None
        self.database_ahead_s = clock_ahead_s(sent_s, float(renewed[0][0]), time.time())
        self._run(_EVICT)
        members = self._run("SELECT member_id, address, page_url FROM members ORDER BY member_id")
        slots = self._run("SELECT number, holder, lease_epoch FROM slots ORDER BY number")
        return [Member(*row) for row in members], [Slot(*row) for row in slots]

    def take(self, number: int, lease_epoch: int) -> int | None:
        """Take a slot that is free or ours, if its lease epoch is still this; return its new one."""
        self._run(_END_SESSION, number=number)
        found = self._run(_TAKE, number=number, lease_epoch=lease_epoch)
        return int(found[0][0]) if found else None

    def depart(self) -> None:
        """Be a member no longer; a slot that it holds is then free."""
        self._run("DELETE FROM members WHERE member_id = :me")

    def close(self) -> None:
        """Close the connection, even if a call waits for its answer."""
        if self._engine.pool.checkedout():  # type: ignore[attr-defined] # a QueuePool
            self._abort()
        self._engine.dispose()

    def _run(self, statement: str, **values: Any) -> list[Any]:
        """Run one statement in a transaction of its own; return its rows."""
        values |= {"me": self.member_id, "lease_s": self._lease_s}
        try:
            with self._engine.connect() as connection:
                connection.execution_options(isolation_level="AUTOCOMMIT")
                result = connection.execute(text(statement), values)
                return list(result) if result.returns_rows else []
        except self._errors as error:
            raise StoreFailedError(database=self._name, cause=explain(error)) from None


def _slots_of(connection: Connection, name: str, slots: int) -> list[tuple[int, int]]:
    """Return a database's slots, each with its lease epoch, 0 before it was ever served; an empty one gets
    so many.

    Raises:
        DatabaseUnavailableError: it has another number.
    """
    is_new = migrate(connection, name)
    if connection.execute(text("SELECT 1 FROM slots")).first() is None:
        numbers = [{"number": number} for number in range(slots if is_new else 1)]
        connection.execute(text("INSERT INTO slots VALUES (:number, '', 0)"), numbers)
    if (found := slot_count(connection)) != slots:
        cause = f"slots: expected {found}, as its jobs are spread since its first start, found {slots}"
        raise DatabaseUnavailableError(database=name, cause=cause)
    rows = connection.execute(text("SELECT number, lease_epoch FROM slots ORDER BY number"))
    return [(row.number, row.lease_epoch) for row in rows]


def session_of(member_id: str) -> str:
    """Return the name of sessions that write for a member: whoever takes over from it ends them."""
    return f"perseus {member_id}"


def check_fence(connection: Connection, fence: Slot, name: str) -> None:
    """Check in the open transaction that a slot is still held as `fence` says, and keep it so until its end.

    Raises:
        StoreFailedError: another member has taken it.
    """
    query = "SELECT 1 FROM slots WHERE number = %s AND holder = %s AND lease_epoch = %s FOR SHARE"
    if connection.exec_driver_sql(query, tuple(fence)).first() is None:
        cause = f"another coordinator has taken over (after lease epoch {fence.lease_epoch})"
        raise StoreFailedError(database=name, cause=cause)


def exclude_members(connection: Connection, name: str) -> None:
    """Keep members out of the database for the rest of the open transaction. On SQLite its lock does that.

    Raises:
        DatabaseUnavailableError: there are some.
    """
    if connection.dialect.name != "postgresql":
        return
    connection.execute(text("LOCK TABLE members IN EXCLUSIVE MODE"))
    connection.execute(text(_EVICT))
    if connection.execute(text("SELECT 1 FROM members")).first() is not None:
        raise DatabaseUnavailableError(database=name, cause=LOCKED)
