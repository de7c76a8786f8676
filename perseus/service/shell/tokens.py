"""The coordinator's tokens: read once, written through the writer, watched until they end."""

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import structlog

from perseus.service.domain.errors import (
    CoordinatorError,
    DatabaseUnreadableError,
    InvalidFieldError,
    TokenAlreadyExistsError,
    TokenNotFoundError,
    TokenUnknownError,
)
from perseus.service.domain.members import ALONE, Fleet
from perseus.service.domain.principals import (
    TOKEN_BYTES,
    TOKEN_PREFIX,
    Grant,
    Principal,
    Scope,
    Session,
    Token,
    TokenRegistry,
    check_token_name,
    digest_of,
)
from perseus.service.shell.writer import Writer
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import SessionEnded, SessionEntry, TokenEntry

log = structlog.get_logger(__name__)

OPERATOR = "operator"
"""Name of the token from the operator's file."""


def new_secret() -> str:
    """Return a new token."""
    return TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


RELOAD_S = 2.0
"""How often tokens are read again where another coordinator writes them."""

REFRESH_S = 0.2
"""The least time until they are read again for a caller whose token is unknown: it may be new."""


class Tokens:
    """All tokens, which the coordinator of slot 0 writes. `clock` is the wall clock.

    Attributes:
        sessions: logins of browsers by digest, the oldest first; their tokens, or they, may have ended.
    """

    def __init__(
        self,
        store: SqlStore,
        writer: Writer,
        fleet: Fleet = ALONE,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._writer = writer
        self._fleet = fleet
        self._clock = clock
        self._registry = TokenRegistry()
        self.sessions: dict[str, Session] = {}
        # By token: futures that wait for its end.
        self._waiting: dict[str, set[asyncio.Future[CoordinatorError]]] = {}
        self._reloading = asyncio.Lock()
        self._reloaded_s = -math.inf

    async def load(self) -> None:
        """Load the stored tokens."""
        self._registry = TokenRegistry(await self._store.load_tokens())
        self.sessions = {session.digest: session for session in await self._store.load_sessions()}

    async def run(self) -> None:
        """Read the tokens again and again if another coordinator writes them, until cancelled."""
        while self._fleet.served != 0:
            await asyncio.sleep(RELOAD_S)
            async with self._reloading:
                with suppress(DatabaseUnreadableError):
                    await self._reload()
        await asyncio.Event().wait()

    async def refresh(self) -> None:
        """Read the tokens again, unless that was just done, if another coordinator writes them."""
        if self._fleet.served != 0:
            async with self._reloading:  # one read for all that wait
                if time.monotonic() >= self._reloaded_s + REFRESH_S:
                    await self._reload()

    async def _reload(self) -> None:
        before, self._registry = self._registry, TokenRegistry(await self._store.load_tokens())
        self._reloaded_s = time.monotonic()
        for name in self._waiting:
            old, new = before.get(name), self._registry.get(name)
            if old is not None and (new is None or new.digest != old.digest):  # as the operator's may be
                self._end(name, TokenUnknownError())
        self.tick()

    @property
    def tokens(self) -> Collection[Token]:
        """All tokens, revoked and expired ones too, by name."""
        return self._registry.tokens

    def authenticate(self, secret: str) -> Principal:
        """Return the principal of a token.

        Raises:
            TokenUnknownError, TokenRevokedError, TokenExpiredError: the token is not valid.
        """
        return self._registry.find(secret, self._clock()).principal

    def holder(self, digest: str) -> Principal:
        """Return the principal of the token with this digest (`digest_of`).

        Raises:
            TokenUnknownError, TokenRevokedError, TokenExpiredError: the token is not valid any more.
        """
        return self._registry.find_digest(digest, self._clock()).principal

    async def create(self, name: str, grant: Grant, expire_time_s: float | None) -> tuple[Token, str]:
        """Make a token, durably; return it with its secret, which can't be read again later.

        Raises:
            InvalidFieldError: the name, the grant or the expiry is invalid.
            TokenAlreadyExistsError: a token of that name exists, possibly revoked or expired.
            ServedElsewhereError: another coordinator writes tokens.
        """
        self._fleet.check_slot(0)
        check_token_name(name)
        grant.check()
        now_s = self._clock()
        if expire_time_s is not None and expire_time_s <= now_s:
            raise InvalidFieldError(field="expire_time", expected="a time in the future", found=expire_time_s)
        if self._registry.get(name) is not None:
            raise TokenAlreadyExistsError(name=name)
        secret = new_secret()
        token = Token(name, digest_of(secret), grant, now_s, expire_time_s)
        await self._put(token)
        return token, secret

    async def adopt(self, secret: str) -> None:
        """Make the secret in the operator's file an operator's token; once revoked, it stays revoked.

        Where another coordinator writes tokens, its file counts.
        """
        digest = digest_of(secret)
        known = self._registry.get(OPERATOR)
        if self._fleet.served != 0:
            if known is not None and known.digest != digest:
                log.warning("the operator's token in the file is not the fleet's: copy that of slot 0")
        elif known is None or known.digest != digest:
            await self._put(Token(OPERATOR, digest, Grant(Scope.OPERATOR), self._clock()))

    async def revoke(self, name: str) -> Token:
        """Revoke a token for good, durably, and end its streams; do nothing if it is revoked already.

        Raises:
            TokenNotFoundError: there is no token of that name.
            ServedElsewhereError: another coordinator writes tokens.
        """
        self._fleet.check_slot(0)
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

    async def put_session(self, session: Session) -> None:
        """Store a browser's login, durably."""
        self.sessions[session.digest] = session
        await self._writer.later([SessionEntry(session)])

    async def drop_sessions(self, digests: Iterable[str]) -> None:
        """Forget logins, durably; some may be forgotten already."""
        known = [digest for digest in digests if self.sessions.pop(digest, None) is not None]
        if known:
            await self._writer.later([SessionEnded(digest) for digest in known])

    @contextmanager
    def watched(self, principal: Principal) -> Iterator[asyncio.Future[CoordinatorError]]:
        """Yield, for the length of a block, a future that is done, with the reason, when the token ends."""
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
        """Resolve the futures that wait for tokens that have ended."""
        now_s = self._clock()
        for name in self._waiting:
            token = self._registry.get(name)
            if token is None:  # a certificate's
                continue
            try:
                token.check_valid(now_s)
            except CoordinatorError as error:
                self._end(name, error)

    def _end(self, name: str, error: CoordinatorError) -> None:
        """Resolve the futures that wait for a token."""
        for ended in self._waiting.get(name, ()):
            if not ended.done():
                ended.set_result(error)
