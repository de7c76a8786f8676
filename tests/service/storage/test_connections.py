"""Connections to a real PostgreSQL: the server's defaults, conflicts, and connections that are cut."""

import asyncio
from io import StringIO

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url

from perseus.service.domain.errors import DatabaseUnavailableError
from perseus.service.storage.archive import import_database
from perseus.service.storage.engines import connect
from perseus.service.storage.membership import MemberRows
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import TelemetrySequence
from tests.service.storage.postgresql import Server

DEFAULTS = {
    "default_transaction_isolation": "serializable",
    "default_transaction_read_only": "on",
    "statement_timeout": "100ms",
    "lock_timeout": "50ms",
    "idle_in_transaction_session_timeout": "50ms",
    "idle_session_timeout": "50ms",
    "client_encoding": "LATIN1",
    "extra_float_digits": "-10",
    "synchronous_commit": "off",
}
LEASE_S = 30.0


@pytest.fixture
def url(postgresql_server: Server) -> str:
    return postgresql_server.new_database()


def run(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


async def test_defaults_of_server_database_and_role_are_not_inherited(url: str) -> None:
    name = make_url(url).database
    run(url, *(f"ALTER DATABASE {name} SET {key} = '{value}'" for key, value in DEFAULTS.items()))
    for is_read_only in (False, True):
        opened = connect(url, is_read_only=is_read_only)
        connection = opened.connection
        found = {key: connection.scalar(text(f"SHOW {key}")) for key in DEFAULTS}
        isolation, read_only = ("repeatable read", "on") if is_read_only else ("read committed", "off")
        assert found.pop("default_transaction_read_only") == read_only
        assert not found.items() & DEFAULTS.items()
        assert connection.scalar(text("SHOW transaction_isolation")) == isolation
        assert connection.scalar(text("SHOW transaction_read_only")) == read_only
        connection.execute(text("SELECT pg_sleep(0.2)"))
        await asyncio.sleep(0.2)
        assert connection.scalar(text("SELECT 'ɸ' || (0.1::float8 + 0.2::float8)")) == f"ɸ{0.1 + 0.2}"
        opened.close()
    member = await asyncio.to_thread(MemberRows, url, LEASE_S)
    store = await SqlStore.open(url)
    await asyncio.to_thread(member.join, "ɸ:1", "")
    await store.write([TelemetrySequence("agent", 7, "ɸ")])
    assert await store.telemetry_principal("agent") == "ɸ"
    await store.close()
    member.close()


@pytest.mark.parametrize("limit_s", [0.0, 0.25])
def test_how_long_a_statement_waits_for_a_lock_is_the_connections(url: str, limit_s: float) -> None:
    opened = connect(url, lock_limit_s=limit_s, statement_limit_s=2 * limit_s)
    assert opened.connection.scalar(text("SHOW lock_timeout")) == ("250ms" if limit_s else "0")
    assert opened.connection.scalar(text("SHOW statement_timeout")) == ("500ms" if limit_s else "0")
    opened.close()


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
        import_database(url, StringIO('{"format": "perseus-store", "schema": "v0007", "slot_count": 1}\n'))
