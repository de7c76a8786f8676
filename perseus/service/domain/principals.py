"""Principals, their grants, and tokens.

Every caller is a principal. It authenticates with a bearer token, or with a client certificate (mutual TLS)
whose identity the configuration grants something. Its grant is a scope and, for agents, the jobs and hosts.

A token is 256 random bits behind a prefix that scanners of logs and repositories recognise. Only its SHA-256
is kept: a slow hash protects secrets that can be guessed, and 256 random bits can't.
"""

import enum
import hashlib
import hmac
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from perseus.service.domain.bounds import check_size
from perseus.service.domain.errors import (
    HostOutOfScopeError,
    InvalidFieldError,
    JobOutOfScopeError,
    TokenExpiredError,
    TokenRevokedError,
    TokenUnknownError,
)

TOKEN_PREFIX = "perseus_"
TOKEN_BYTES = 32
"""Random bytes, encoded as base64url after the prefix."""

MAX_PATTERN_COUNT = 64

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_JOB_PATTERN = re.compile(r"[A-Za-z0-9._*?-]{1,63}")
_HOST_PATTERN = re.compile(r"[A-Za-z0-9._*?-]{1,253}")


class Scope(enum.Enum):
    """Which calls a principal may make; `perseus.service.api.rpc_scopes` assigns calls to scopes."""

    AGENT = "agent"
    OPERATOR = "operator"
    READER = "reader"
    GRID = "grid"


@dataclass(frozen=True, slots=True)
class Grant:
    """The rights of a principal.

    Attributes:
        scope: which calls it may make.
        job_patterns: of an agent, the identifiers of the jobs that it may speak for; `*` matches any
            characters, `?` exactly one.
        host_patterns: of an agent, the names of the hosts that it may run on; any host if empty.
    """

    scope: Scope
    job_patterns: tuple[str, ...] = ()
    host_patterns: tuple[str, ...] = ()

    def check(self) -> "Grant":
        """Return it after checking it.

        Raises:
            InvalidFieldError: names the field.
        """
        if (self.scope is Scope.AGENT) != bool(self.job_patterns):
            expected = (
                "one or more" if self.scope is Scope.AGENT else f"none, as the scope is {self.scope.value}"
            )
            raise InvalidFieldError(field="job_patterns", expected=expected, found=len(self.job_patterns))
        if self.scope is not Scope.AGENT and self.host_patterns:
            expected = f"none, as the scope is {self.scope.value}"
            raise InvalidFieldError(field="host_patterns", expected=expected, found=len(self.host_patterns))
        _check_patterns(
            "job_patterns",
            self.job_patterns,
            _JOB_PATTERN,
            "1 to 63 of letters, digits, '-', '_', '.', '*' and '?'",
        )
        _check_patterns(
            "host_patterns",
            self.host_patterns,
            _HOST_PATTERN,
            "1 to 253 of letters, digits, '-', '_', '.', '*' and '?'",
        )
        return self

    @classmethod
    def parse(cls, text: str) -> "Grant":
        """Parse a text such as `operator`, `agent:llama-*,opt-1` or `agent:*@node-17`.

        Raises:
            InvalidFieldError: it is not a grant.
        """
        scope, _, patterns = text.partition(":")
        jobs, has_hosts, hosts = patterns.partition("@")
        try:
            return cls(
                Scope(scope),
                tuple(jobs.split(",")) if jobs else (),
                tuple(hosts.split(",")) if has_hosts else (),
            ).check()
        except ValueError:
            expected = "operator, reader, grid or agent:JOB,JOB…, optionally followed by @HOST,HOST…"
            raise InvalidFieldError(field="scope", expected=expected, found=repr(text)) from None

    def covers(self, job_id: str) -> bool:
        """Return whether it lets a principal speak for a job."""
        if self.scope is Scope.AGENT:
            return any(fnmatchcase(job_id, pattern) for pattern in self.job_patterns)
        return self.scope is Scope.OPERATOR

    def names_host(self, hostname: str) -> bool:
        """Return whether its patterns match a host; False if it has none and so allows any."""
        return any(fnmatchcase(hostname, pattern) for pattern in self.host_patterns)


def _check_patterns(field: str, patterns: Collection[str], kind: re.Pattern[str], expected: str) -> None:
    check_size(field, len(patterns), MAX_PATTERN_COUNT)
    for row, pattern in enumerate(patterns):
        if not kind.fullmatch(pattern):
            raise InvalidFieldError(field=f"{field}[{row}]", expected=expected, found=repr(pattern[:64]))


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller. `token_name` is its token's name, `certificate_name` its certificate's identity; or ""."""

    name: str
    grant: Grant
    token_name: str = ""
    certificate_name: str = ""

    def check_job(self, job_id: str) -> None:
        """Check that it may speak for a job.

        Raises:
            JobOutOfScopeError: it may not.
        """
        if not self.grant.covers(job_id):
            raise JobOutOfScopeError(principal=self.name, job_id=job_id)

    def check_host(self, hostname: str) -> None:
        """Check that it may run on a host.

        Raises:
            HostOutOfScopeError: it may not.
        """
        if self.grant.host_patterns and not self.grant.names_host(hostname):
            raise HostOutOfScopeError(principal=self.name, hostname=hostname)

    def vouches_for(self, hostname: str) -> bool:
        """Return whether it may report all of a host's GPUs, including those that run no rank of its own."""
        return (
            self.grant.scope is Scope.OPERATOR
            or self.grant.names_host(hostname)
            or (self.certificate_name != "" and self.certificate_name == hostname)
        )


ANYBODY = Principal("anybody", Grant(Scope.OPERATOR))
"""Every caller, where no authentication is configured."""


@dataclass(frozen=True, slots=True)
class Token:
    """The record of a token, without its secret. Times are of the wall clock, seconds."""

    name: str
    digest: str
    grant: Grant
    create_time_s: float
    expire_time_s: float | None = None
    revoke_time_s: float | None = None

    def check_valid(self, now_s: float) -> None:
        """Check that it is neither revoked nor expired.

        Raises:
            TokenRevokedError, TokenExpiredError: it is.
        """
        if self.revoke_time_s is not None:
            raise TokenRevokedError(name=self.name)
        if self.expire_time_s is not None and now_s >= self.expire_time_s:
            raise TokenExpiredError(name=self.name)

    @property
    def principal(self) -> Principal:
        """The principal that authenticates with it."""
        return Principal(f"token {self.name}", self.grant, self.name)


def check_token_name(name: str) -> str:
    """Return a token's name after checking it.

    Raises:
        InvalidFieldError: it is invalid.
    """
    if not _NAME.fullmatch(name):
        expected = "1 to 63 of a–z, 0–9, '-', '_' and '.', beginning with a letter or digit"
        raise InvalidFieldError(field="name", expected=expected, found=repr(name[:64]))
    return name


def digest_of(secret: str) -> str:
    """Return the digest under which a token is stored."""
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


@dataclass(frozen=True, slots=True)
class Session:
    """A browser's login: `digest` is that of its identifier. It ends at a time, or with its token."""

    digest: str
    token_digest: str
    principal_name: str
    end_time_s: float


class TokenRegistry:
    """All tokens, by name and by digest."""

    def __init__(self, tokens: Iterable[Token] = ()) -> None:
        self._by_name: dict[str, Token] = {}
        self._by_digest: dict[str, Token] = {}
        for token in tokens:
            self.put(token)

    @property
    def tokens(self) -> Collection[Token]:
        """All tokens in the order of their names, including revoked and expired ones."""
        return [self._by_name[name] for name in sorted(self._by_name)]

    def get(self, name: str) -> Token | None:
        """Return the token of that name, if there is one."""
        return self._by_name.get(name)

    def put(self, token: Token) -> None:
        """Add a token, in place of the one that has its name."""
        if (before := self._by_name.get(token.name)) is not None:
            self._by_digest.pop(before.digest, None)
        self._by_name[token.name] = token
        self._by_digest[token.digest] = token

    def find(self, secret: str, now_s: float) -> Token:
        """Return the token of a secret, if it is valid.

        Raises:
            TokenUnknownError, TokenRevokedError, TokenExpiredError: it is not.
        """
        return self.find_digest(digest_of(secret), now_s)

    def find_digest(self, digest: str, now_s: float) -> Token:
        """Return the token of a digest, if it is valid.

        The lookup's timing reveals something about the digest, which a caller can't choose; the final
        comparison takes constant time.

        Raises:
            TokenUnknownError, TokenRevokedError, TokenExpiredError: it is not.
        """
        token = self._by_digest.get(digest)
        if token is None or not hmac.compare_digest(token.digest, digest):
            raise TokenUnknownError
        token.check_valid(now_s)
        return token
