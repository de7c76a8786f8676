"""Logins of browsers: a token is presented once, and from then on a random session ID replaces it.

Only the SHA-256 of the ID is kept, as of tokens. The session's token is looked up at every use, so the
session ends with its token.
"""

import secrets
import time
from collections.abc import Callable

from perseus.service.api.rpc_scopes import READERS, check_one_of
from perseus.service.domain.errors import CredentialMissingError, LimitReachedError
from perseus.service.domain.principals import Principal, Session, digest_of
from perseus.service.shell.tokens import Tokens

LIFETIME_S = 12 * 3600.0

MAX_SESSIONS_PER_TOKEN = 64
"""Simultaneous sessions of one token; a new one replaces the oldest."""

MAX_SESSIONS = 4_096
"""Simultaneous sessions of all tokens; a new one replaces the oldest."""

MAX_ATTEMPTS = 10
"""Attempts in a row from one address; after that, one every `ATTEMPT_S`."""

ATTEMPT_S = 2.0

_MAX_ADDRESSES = 1_024
_ID_BYTES = 32


class Sessions:
    """All sessions; the database has them, so they outlive a restart. `clock` is the wall clock."""

    def __init__(self, tokens: Tokens, clock: Callable[[], float] = time.time) -> None:
        self._tokens = tokens
        self._clock = clock

    def __len__(self) -> int:
        return len(self._tokens.sessions)

    async def begin(self, secret: str) -> tuple[str, Principal]:
        """Begin a session with a token; return its ID and the principal.

        Raises:
            AuthenticationError: the token is not valid.
            ScopeTooNarrowError: its scope doesn't allow reading.
        """
        principal = self._tokens.authenticate(secret)
        check_one_of(READERS, "POST /session", principal)
        now_s = self._clock()
        known = self._tokens.sessions
        ended = {digest for digest, each in known.items() if each.end_time_s <= now_s}
        own = [digest for digest, each in known.items() if each.principal_name == principal.name]
        ended.update(_oldest([digest for digest in own if digest not in ended], MAX_SESSIONS_PER_TOKEN - 1))
        ended.update(_oldest([digest for digest in known if digest not in ended], MAX_SESSIONS - 1))
        await self._tokens.drop_sessions(ended)
        session_id = secrets.token_urlsafe(_ID_BYTES)
        await self._tokens.put_session(
            Session(digest_of(session_id), digest_of(secret), principal.name, now_s + LIFETIME_S)
        )
        return session_id, principal

    def find(self, session_id: str) -> Principal:
        """Return the principal of a session.

        Raises:
            CredentialMissingError: there is no such session, or it has ended.
            TokenUnknownError, TokenRevokedError, TokenExpiredError: its token has ended.
        """
        session = self._tokens.sessions.get(digest_of(session_id))
        if session is None or session.end_time_s <= self._clock():
            raise CredentialMissingError
        return self._tokens.holder(session.token_digest)

    async def end(self, session_id: str) -> None:
        """End a session, if there is one."""
        await self._tokens.drop_sessions([digest_of(session_id)])


def _oldest(digests: list[str], limit: int) -> list[str]:
    """Return those beyond a limit."""
    return digests[: max(0, len(digests) - limit)]


class LoginRateLimiter:
    """Limits the rate of login attempts by address."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        # By address, the latest at the end: how many attempts are left, and since when.
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, address: str) -> None:
        """Count an attempt.

        Raises:
            LimitReachedError: it is one too many.
        """
        now_s = self._monotonic()
        left, since_s = self._left.pop(address, (MAX_ATTEMPTS, now_s))
        left = min(MAX_ATTEMPTS, left + (now_s - since_s) / ATTEMPT_S)
        is_one_too_many = left < 1
        self._left[address] = (left if is_one_too_many else left - 1, now_s)
        while len(self._left) > _MAX_ADDRESSES:
            del self._left[next(iter(self._left))]
        if is_one_too_many:
            raise LimitReachedError(
                principal=address, what="logins in a row", limit=MAX_ATTEMPTS, found=MAX_ATTEMPTS + 1
            )
