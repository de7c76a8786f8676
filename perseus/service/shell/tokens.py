"""The tokens that the coordinator knows: read once, written through the writer, watched until they end."""

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

from perseus.service.domain.errors import (
    CoordinatorError,
    InvalidFieldError,
    TokenAlreadyExistsError,
    TokenNotFoundError,
)
from perseus.service.domain.principals import (
    TOKEN_BYTES,
    TOKEN_PREFIX,
    Grant,
    Principal,
    Scope,
    Token,
    TokenRegistry,
    check_token_name,
    digest_of,
)
from perseus.service.shell.writer import Writer
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import TokenEntry

OPERATOR = "operator"
"""Name of the token in the operator's file."""


def new_secret() -> str:
    """Return a new token."""
    return TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


class Tokens:
    """All tokens. `clock` is the wall clock."""

    def __init__(self, store: SqlStore, writer: Writer, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._writer = writer
        self._clock = clock
        self._registry = TokenRegistry()
        # By token: those who are to hear of its end.
        self._waiting: dict[str, set[asyncio.Future[CoordinatorError]]] = {}

    async def load(self) -> None:
        """Load what is stored."""
        self._registry = TokenRegistry(await self._store.load_tokens())

    @property
    def tokens(self) -> Collection[Token]:
        """All of them, revoked and expired ones too, by name."""
        return self._registry.tokens

    def authenticate(self, secret: str) -> Principal:
        """Return who shows a token.

        Raises:
            TokenUnknownError, TokenRevokedError, TokenExpiredError: it is not valid.
        """
        return self._registry.find(secret, self._clock()).principal

    def holder(self, digest: str) -> Principal:
        """Return whose token it is of which this is kept (`digest_of`).

        Raises:
            TokenUnknownError, TokenRevokedError, TokenExpiredError: it is not valid any more.
        """
        return self._registry.find_digest(digest, self._clock()).principal

    async def create(self, name: str, grant: Grant, expire_time_s: float | None) -> tuple[Token, str]:
        """Make a token, durably; return it, and the secret that nobody can be told again.

        Raises:
            InvalidFieldError: it can't be.
            TokenAlreadyExistsError: there is one of that name, be it revoked or expired.
        """
        check_token_name(name)
        grant.check()
        now_s = self._clock()
        if expire_time_s is not None and expire_time_s <= now_s:
            raise InvalidFieldError(field="expire_time", expected="a time to come", found=expire_time_s)
        if self._registry.get(name) is not None:
            raise TokenAlreadyExistsError(name=name)
        secret = new_secret()
        token = Token(name, digest_of(secret), grant, now_s, expire_time_s)
        await self._put(token)
        return token, secret

    async def adopt(self, secret: str) -> None:
        """Let the token in the operator's file be an operator's; one that was revoked stays revoked."""
        digest = digest_of(secret)
        known = self._registry.get(OPERATOR)
        if known is None or known.digest != digest:
            await self._put(Token(OPERATOR, digest, Grant(Scope.OPERATOR), self._clock()))

    async def revoke(self, name: str) -> Token:
        """End a token for good, durably, and what goes on by it; nothing happens if it is revoked already.

        Raises:
            TokenNotFoundError: there is none of that name.
        """
        token = self._registry.get(name)
        if token is None:
            raise TokenNotFoundError(name=name)
        if token.revoke_time_s is None:
            token = replace(token, revoke_time_s=self._clock())
            await self._put(token)
        return token

    async def _put(self, token: Token) -> None:
        self._registry.put(token)
        self.tick()
        await self._writer.later([TokenEntry(token)])

    @contextmanager
    def watched(self, principal: Principal) -> Iterator[asyncio.Future[CoordinatorError]]:
        """For the length of a block: a future that is done, with the reason, when the token ends."""
        ended: asyncio.Future[CoordinatorError] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(principal.token_name, set())
        waiting.add(ended)
        try:
            yield ended
        finally:
            waiting.discard(ended)
            if not waiting and self._waiting.get(principal.token_name) is waiting:
                del self._waiting[principal.token_name]

    def tick(self) -> None:
        """Tell those who wait of tokens that have ended."""
        now_s = self._clock()
        for name, waiting in self._waiting.items():
            token = self._registry.get(name)
            if token is None:  # a certificate's
                continue
            try:
                token.check_valid(now_s)
            except CoordinatorError as error:
                for ended in waiting:
                    if not ended.done():
                        ended.set_result(error)
