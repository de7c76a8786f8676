"""Connections to a real PostgreSQL: the server's defaults, conflicts, connections that are cut, standbys."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url

from perseus.service.domain.errors import (
    DatabaseUnavailableError,
    DatabaseUnreadableError,
    StoreFailedError,
)
from perseus.service.domain.ledger import HourFilter
from perseus.service.domain.model import HoldClocks, PipelineOffer
from perseus.service.domain.records import OfferRecord
from perseus.service.storage import schema, sql_store
from perseus.service.storage.archive import import_database
from perseus.service.storage.engines import connect
from perseus.service.storage.membership import MemberRows, session_of
from perseus.service.storage.sql_store import SqlStore, open_connections
from perseus.service.storage.store import JobEntry, NewRun, TelemetrySequence
from tests.service.service_fakes import make_spec
from tests.service.storage.postgresql import Server
from tests.service.storage.stores import LEASE_S, event, execute, held_slots, opened, stored_run

DEFAULTS = {
    "default_transaction_isolation": "serializable",
    "default_transaction_read_only": "on",
    "statement_timeout": "11min",
    "lock_timeout": "12min",
    "idle_in_transaction_session_timeout": "13min",
    "idle_session_timeout": "14min",
    "client_encoding": "LATIN1",
    "extra_float_digits": "-10",
    "synchronous_commit": "off",
}


async def test_defaults_of_server_database_and_role_are_not_inherited(url: str) -> None:
    name = make_url(url).database
    execute(url, *(f"ALTER DATABASE {name} SET {key} = '{value}'" for key, value in DEFAULTS.items()))
    for is_read_only in (False, True):
        session = connect(url, is_read_only=is_read_only)
        connection = session.connection
        found = {key: connection.scalar(text(f"SHOW {key}")) for key in DEFAULTS}
        isolation, read_only = ("repeatable read", "on") if is_read_only else ("read committed", "off")
        assert found.pop("default_transaction_read_only") == read_only
        assert not found.items() & DEFAULTS.items()
        assert connection.scalar(text("SHOW transaction_isolation")) == isolation
        assert connection.scalar(text("SHOW transaction_read_only")) == read_only
        assert connection.scalar(text("SELECT 'ɸ' || (0.1::float8 + 0.2::float8)")) == f"ɸ{0.1 + 0.2}"
        session.close()
    member = await asyncio.to_thread(MemberRows, url, LEASE_S)
    async with opened(url) as store:
        await asyncio.to_thread(member.join, "ɸ:1", "")
        await store.write([TelemetrySequence("agent", 7, "ɸ")])
        assert await store.telemetry_principal("agent") == "ɸ"
    member.close()


def test_limits_of_statements_locks_and_idle_transactions_are_each_connections(url: str) -> None:
    connections = open_connections(url, holder="member", lock_limit_s=0.25, statement_limit_s=0.5)
    settings = "lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout"
    assert [
        tuple(each.connection.scalar(text(f"SHOW {name}")) for name in settings) for each in connections
    ] == [
        ("250ms", "0", "1min"),
        ("250ms", "500ms", "1min"),
        ("250ms", "500ms", "1min"),
        ("250ms", "500ms", "3s"),  # others wait for a claim that is cut off
    ]
    for each in connections:
        each.close()


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_a_database_in_which_not_every_text_can_be_stored_is_refused(
    postgresql_server: Server, encoding: str
) -> None:
    url = postgresql_server.new_database(encoding)
    expected = f"expected encoding UTF8, found {encoding}: create it with ENCODING 'UTF8' TEMPLATE template0$"
    with pytest.raises(DatabaseUnavailableError, match=expected) as caught:
        MemberRows(url, LEASE_S)
    assert "\n" not in str(caught.value)
    with pytest.raises(DatabaseUnavailableError, match=expected):
        import_database(
            url, StringIO(f'{{"format": "perseus-store", "schema": "{schema.HEAD}", "slot_count": 1}}\n')
        )


# ---------------------------------------------------------------------- connections that fail


class Served:
    """A slot that is served, and what its database does to it."""

    def __init__(self, url: str, member: MemberRows, store: SqlStore) -> None:
        self.url = url
        self.member = member
        self.store = store
        self.watching = asyncio.create_task(store.watch())

    def end_sessions(self, *, of_writer: bool) -> None:
        """End the sessions of the store's writer, or of all others of the store."""
        condition = "application_name = %s" if of_writer else "application_name NOT IN (%s, 'membership')"
        with psycopg.connect(self.url, autocommit=True) as connection:
            ended = connection.execute(
                f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                f"WHERE datname = current_database() AND pid <> pg_backend_pid() AND {condition}".encode(),
                (session_of(self.member.member_id),),
            ).fetchall()
        assert ended, "expected a session to end"

    async def count_events(self) -> int:
        return len(await self.store.events("job", 1, 0, 1000))


@pytest.fixture
async def served(url: str) -> AsyncIterator[Served]:
    async with held_slots(url, 1) as slots:
        await slots.stores[0].write([NewRun(make_spec(), 1, 1.0)])
        made = Served(url, slots.members[0], slots.stores[0])
        yield made
        made.watching.cancel()
        await asyncio.gather(made.watching, return_exceptions=True)


def offer(clock_mhz: int) -> PipelineOffer:
    return PipelineOffer((1,), 20, HoldClocks((clock_mhz,)))


def offered(clock_mhz: int) -> JobEntry:
    return JobEntry("job", 1, OfferRecord(0, offer(clock_mhz)))


async def test_a_reader_whose_session_is_ended_reads_on(served: Served) -> None:
    served.end_sessions(of_writer=False)
    assert await served.count_events() == 0
    await served.store.write([event(1)])
    assert await served.count_events() == 1
    assert not served.watching.done()


async def test_a_read_that_fails_is_answered_and_ends_nothing(served: Served) -> None:
    store = served.store
    for read in (store._read, store._read_ledger):
        with pytest.raises(DatabaseUnreadableError) as caught:
            await read(lambda connection: connection.execute(text("SELECT 1 / 0")))
        assert caught.value.code == "UNAVAILABLE"
    await store.write([event(1)])
    assert await served.count_events() == 1
    assert await store.ledger(HourFilter()) == []
    assert not served.watching.done()


@pytest.mark.slow("a database's server stops and starts again")
async def test_a_coordinator_outlives_a_restart_of_the_server(
    served: Served, postgresql_server: Server
) -> None:
    await served.store.write([event(1)])
    await asyncio.to_thread(postgresql_server.stop, "fast")
    try:
        with pytest.raises(DatabaseUnreadableError):
            await served.count_events()
        writing = asyncio.create_task(served.store.write([event(2)]))
        await asyncio.wait({writing}, timeout=1.0)
    finally:
        await asyncio.to_thread(postgresql_server.start_again)
    await writing
    assert await served.count_events() == 2
    with suppress(StoreFailedError):
        served.member.renew()
    assert served.member.renew() is not None, "its connection is opened again, too"
    assert not served.watching.done()


async def test_a_writer_that_is_cut_while_idle_is_renewed_behind_the_fence(served: Served) -> None:
    store = served.store
    served.end_sessions(of_writer=True)
    await store.write([event(1)])
    served.end_sessions(of_writer=True)  # the new session has the same name
    assert await store.telemetry_sequence("agent") == 0
    await store.write([event(2)])
    assert await served.count_events() == 2
    assert store.commit_marker.split(".")[2] == "3"
    assert not served.watching.done()
    execute(served.url, "UPDATE slots SET holder = 'another', lease_epoch = 2")
    served.end_sessions(of_writer=True)
    with pytest.raises(StoreFailedError, match="another coordinator has taken over"):
        await store.write([event(3)])
    assert await served.count_events() == 2
    with pytest.raises(StoreFailedError):
        await served.watching


@pytest.mark.parametrize("is_committed", [True, False])
async def test_a_commit_whose_answer_is_lost_is_made_exactly_once(
    served: Served, is_committed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, dialect = served.store, served.store._connection.dialect
    commit = dialect.do_commit

    def cut(connection: Any) -> None:
        monkeypatch.setattr(dialect, "do_commit", commit)
        if is_committed:
            commit(connection)
        served.end_sessions(of_writer=True)
        commit(connection)
        connection.execute("SELECT 1")  # nothing was to be committed any more

    await store.write([offered(1100)])
    monkeypatch.setattr(dialect, "do_commit", cut)
    await store.write([event(1), offered(1200)])
    await store.write([event(2), offered(1200)])
    assert await served.count_events() == 2
    assert store.commit_marker.split(".")[2] == "4"
    assert [record.offer for record in (await stored_run(store)).offers] == [offer(1200)]


async def test_a_database_that_has_lost_commits_is_not_written_to(served: Served) -> None:
    await served.store.write([event(1)])
    execute(served.url, "UPDATE coordinator SET commit_number = 1", "DELETE FROM events")
    served.end_sessions(of_writer=True)
    with pytest.raises(StoreFailedError, match=r"it has lost commits: expected 2 of them, found 1$"):
        await served.store.write([event(2)])
    assert await served.count_events() == 0


FAIL_TWICE = """
CREATE SEQUENCE attempts;
CREATE FUNCTION fail() RETURNS trigger AS $$ BEGIN
    IF nextval('attempts') <= {count} THEN RAISE EXCEPTION 'a conflict' USING ERRCODE = '{state}'; END IF;
    RETURN NEW;
END $$ LANGUAGE plpgsql;
CREATE TRIGGER fail BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION fail()"""


@pytest.mark.parametrize("state", ["40001", "40P01", "55P03", "57014"])
async def test_a_transaction_that_loses_a_conflict_is_tried_again(served: Served, state: str) -> None:
    execute(served.url, FAIL_TWICE.format(state=state, count=2))
    await served.store.write([event(1)])
    assert await served.count_events() == 1
    assert not served.watching.done()


@pytest.mark.parametrize(("state", "attempts"), [("40001", 2), ("23505", 1)])
async def test_a_conflict_that_does_not_end_and_any_other_error_are_fatal(
    served: Served, state: str, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_store, "REPEAT_LIMIT_S", 30.0 if attempts == 1 else 0.04)
    execute(served.url, FAIL_TWICE.format(state=state, count=1000))
    with pytest.raises(StoreFailedError, match="a conflict"):
        await served.store.write([event(1)])
    with psycopg.connect(served.url) as connection:
        found = connection.execute("SELECT last_value FROM attempts").fetchone()
    assert found is not None
    assert found[0] == 1 if attempts == 1 else found[0] > 1
    with pytest.raises(StoreFailedError):
        await served.watching


async def test_what_the_driver_refuses_is_not_tried_again(served: Served) -> None:
    async with asyncio.timeout(20):  # a lost connection would be waited for for longer
        with pytest.raises(StoreFailedError, match="NUL"):
            await served.store.write([TelemetrySequence("\0", 7)])


async def test_a_lock_of_another_session_is_waited_for(served: Served) -> None:
    with psycopg.connect(served.url) as other:
        other.execute("LOCK TABLE events")
        writing = asyncio.create_task(served.store.write([event(1)]))
        await asyncio.wait({writing}, timeout=3.0)  # longer than the limit of one attempt
        assert not writing.done()
    await writing
    assert await served.count_events() == 1


async def test_a_connection_that_is_given_up_is_not_opened_again(served: Served) -> None:
    served.store._opened.abort()
    with pytest.raises(StoreFailedError, match="the server can't be reached"):
        await served.store.write([event(1)])
    assert await served.count_events() == 0


# ---------------------------------------------------------------------- standbys


@contextmanager
def standby(server: Server, folder: Path) -> Iterator[None]:
    program = next(Path("/usr/lib/postgresql").glob("*/bin/pg_receivewal"))
    command = [str(program), "--synchronous", "--no-loop", "-D", str(folder), "-d", server.url("postgres")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow("another process connects to the server")
async def test_standbys_are_counted_by_whether_commits_wait_for_them(
    postgresql_server: Server, url: str, tmp_path: Path
) -> None:
    setting = "synchronous_standby_names"
    async with opened(url) as store:
        assert await store.standbys() == {"synchronous": 0, "asynchronous": 0}
        with standby(postgresql_server, tmp_path):
            for names, kind in (("", "asynchronous"), ("*", "synchronous")):
                execute(url, f"ALTER SYSTEM SET {setting} = '{names}'", "SELECT pg_reload_conf()")
                async with asyncio.timeout(20):
                    while not (await store.standbys())[kind]:  # noqa: ASYNC110 - the server is asked
                        await asyncio.sleep(0.02)
            execute(url, f"ALTER SYSTEM RESET {setting}", "SELECT pg_reload_conf()")


async def test_there_are_none_without_permission_to_see_them(url: str) -> None:
    execute(url, "CREATE ROLE plain LOGIN", "GRANT ALL ON SCHEMA public TO plain")
    async with opened(url.replace("tester@", "plain@")) as store:
        assert await store.standbys() == {}


async def test_there_are_none_on_sqlite(path: Path) -> None:
    async with opened(path) as store:
        assert await store.standbys() == {}
