"""Bearer tokens are stored as they are, and an unreadable one is not accepted."""

import sqlite3
from dataclasses import replace
from pathlib import Path

from perseus.service.domain.principals import Grant, Scope, Token, digest_of
from perseus.service.storage.checking import check_database
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import TokenEntry

SECRET = "perseus_secret"
AGENT = Token("agents", digest_of(SECRET), Grant(Scope.AGENT, ("llama-*", "opt"), ("node-1*",)), 1.5, 20.25)
OPERATOR = Token("operator", digest_of("perseus_other"), Grant(Scope.OPERATOR), 2.0)


async def test_tokens_survive_a_restart_as_last_written(database: Path | str) -> None:
    store = await SqlStore.open(database)
    assert await store.load_tokens() == []
    await store.write([TokenEntry(OPERATOR), TokenEntry(AGENT)])
    revoked = replace(AGENT, revoke_time_s=3.75)
    await store.write([TokenEntry(revoked)])
    await store.close()
    store = await SqlStore.open(database)
    assert await store.load_tokens() == [revoked, OPERATOR]
    await store.close()


async def test_an_unreadable_token_is_left_out_and_the_check_reports_it(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    store = await SqlStore.open(path)
    await store.write([TokenEntry(OPERATOR), TokenEntry(AGENT)])
    await store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE tokens SET scope = 'root' WHERE name = 'agents'")
    connection.close()
    (finding,) = check_database(path)
    assert finding.startswith("token 'agents': can't be read, and is not accepted")
    store = await SqlStore.open(path)
    assert await store.load_tokens() == [OPERATOR]
    await store.close()
    assert SECRET.encode() not in path.read_bytes()
