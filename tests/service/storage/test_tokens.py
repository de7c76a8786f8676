"""Bearer tokens are stored as they are, and an unreadable one is not accepted."""

import asyncio
from dataclasses import replace
from pathlib import Path

from perseus.service.domain.principals import Grant, Scope, Token, digest_of
from perseus.service.storage.checking import check_database
from perseus.service.storage.store import TokenEntry
from tests.service.storage.stores import execute, fill, opened

SECRET = "perseus_secret"
AGENT = Token("agents", digest_of(SECRET), Grant(Scope.AGENT, ("llama-*", "opt"), ("node-1*",)), 1.5, 20.25)
OPERATOR = Token("operator", digest_of("perseus_other"), Grant(Scope.OPERATOR), 2.0)


async def test_tokens_survive_a_restart_as_last_written(database: Path | str) -> None:
    revoked = replace(AGENT, revoke_time_s=3.75)
    async with opened(database) as store:
        assert await store.load_tokens() == []
        await store.write([TokenEntry(OPERATOR), TokenEntry(AGENT)])
        await store.write([TokenEntry(revoked)])
    async with opened(database) as store:
        assert await store.load_tokens() == [revoked, OPERATOR]


async def test_an_unreadable_token_is_left_out_and_the_check_reports_it(path: Path) -> None:
    await fill(path, TokenEntry(OPERATOR), TokenEntry(AGENT))
    execute(path, "UPDATE tokens SET scope = 'root' WHERE name = 'agents'")
    (finding,) = check_database(path)
    assert finding.startswith("token 'agents': can't be read, and is not accepted")
    async with opened(path) as store:
        assert await store.load_tokens() == [OPERATOR]
    assert SECRET.encode() not in await asyncio.to_thread(path.read_bytes)
