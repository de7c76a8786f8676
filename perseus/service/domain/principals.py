"""Who speaks to the coordinator, and what they may do.

Whoever calls is a principal: by a bearer token, or by the certificate of mutual TLS where the configuration
says what its identity may do. What a principal may do is its grant: a scope, and for agents the jobs.

A token is 256 random bits behind a prefix that makes it known for what it is, in a log or a repository. What
is kept of it is its SHA-256: a slow hash protects secrets that can be guessed, and 256 random bits can't.
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
"""Random ones, written as base64url after the prefix."""

MAX_PATTERN_COUNT = 64

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_JOB_PATTERN = re.compile(r"[a-z0-9._*?-]{1,63}")
_HOST_PATTERN = re.compile(r"[A-Za-z0-9._*?-]{1,253}")


class Scope(enum.Enum):
    """What kind of calls a principal may make; `perseus.service.api.rpc_scopes` says which these are."""

    AGENT = "agent"
    OPERATOR = "operator"
    READER = "reader"
    GRID = "grid"


@dataclass(frozen=True, slots=True)
class Grant:
    """What a principal may do.

    Attributes:
        scope: what kind of calls.
        job_patterns: of an agent, the identifiers of the jobs that it may speak for; `*` and `?` stand for
            any characters, and for one.
        host_patterns: of an agent, the names of the hosts that it may run on; any if there are none.
    """

    scope: Scope
    job_patterns: tuple[str, ...] = ()
    host_patterns: tuple[str, ...] = ()

    def check(self) -> "Grant":
        """Return it, if it can be.

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
            "job_patterns", self.job_patterns, _JOB_PATTERN, "1 to 63 of a–z, 0–9, '-', '_', '.', '*' and '?'"
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
        """Return what a text such as `operator`, `agent:llama-*,opt-1` or `agent:*@node-17` says.

        Raises:
            InvalidFieldError: it is none.
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
            expected = "operator, reader, grid or agent:JOB,JOB…, and @HOST,HOST… behind for some hosts"
            raise InvalidFieldError(field="scope", expected=expected, found=repr(text)) from None

    def covers(self, job_id: str) -> bool:
        """Whether it lets a principal speak for a job."""
        if self.scope is Scope.AGENT:
            return any(fnmatchcase(job_id, pattern) for pattern in self.job_patterns)
        return self.scope is Scope.OPERATOR

    def names_host(self, hostname: str) -> bool:
        """Whether it is of that host, among a few; not if it lets a principal run on any."""
        return any(fnmatchcase(hostname, pattern) for pattern in self.host_patterns)


def _check_patterns(field: str, patterns: Collection[str], kind: re.Pattern[str], expected: str) -> None:
    check_size(field, len(patterns), MAX_PATTERN_COUNT)
    for row, pattern in enumerate(patterns):
        if not kind.fullmatch(pattern):
            raise InvalidFieldError(field=f"{field}[{row}]", expected=expected, found=repr(pattern[:64]))


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls. `token_name` is that of the token, `certificate_name` what the certificate is for; or ""."""

    name: str
    grant: Grant
    token_name: str = ""
    certificate_name: str = ""

    def check_job(self, job_id: str) -> None:
        """Refuse to let it speak for a job that it may not speak for.

        Raises:
            JobOutOfScopeError: it may not.
        """
        if not self.grant.covers(job_id):
            raise JobOutOfScopeError(principal=self.name, job_id=job_id)

    def check_host(self, hostname: str) -> None:
        """Refuse to let it run on a host that it may not run on.

        Raises:
            HostOutOfScopeError: it may not.
        """
        if self.grant.host_patterns and not self.grant.names_host(hostname):
            raise HostOutOfScopeError(principal=self.name, hostname=hostname)

    def vouches_for(self, hostname: str) -> bool:
        """Whether it may speak for a host's GPUs, also for those that run no rank of it."""
        return (
            self.grant.scope is Scope.OPERATOR
            or self.grant.names_host(hostname)
            or (self.certificate_name != "" and self.certificate_name == hostname)
        )


ANYBODY = Principal("anybody", Grant(Scope.OPERATOR))
"""Everybody, where nobody has to say who they are."""


@dataclass(frozen=True, slots=True)
class Token:
    """What is known of a token, which is not the token itself. Times are of the wall clock, seconds."""

    name: str
    digest: str
    grant: Grant
    create_time_s: float
    expire_time_s: float | None = None
    revoke_time_s: float | None = None

    def check_valid(self, now_s: float) -> None:
        """Refuse it if it is no longer good for anything.

        Raises:
            TokenRevokedError, TokenExpiredError: why.
        """
        if self.revoke_time_s is not None:
            raise TokenRevokedError(name=self.name)
        if self.expire_time_s is not None and now_s >= self.expire_time_s:
            raise TokenExpiredError(name=self.name)

    @property
    def principal(self) -> Principal:
        """Who shows it."""
        return Principal(f"token {self.name}", self.grant, self.name)


def check_token_name(name: str) -> str:
    """Return a token's name, if it is one.

    Raises:
        InvalidFieldError: it is none.
    """
    if not _NAME.fullmatch(name):
        expected = "1 to 63 of a–z, 0–9, '-', '_' and '.', beginning with a letter or digit"
        raise InvalidFieldError(field="name", expected=expected, found=repr(name[:64]))
    return name


def digest_of(secret: str) -> str:
    """Return what is kept of a token."""
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


class TokenRegistry:
    """All tokens, by name and by what is kept of them."""

    def __init__(self, tokens: Iterable[Token] = ()) -> None:
        self._by_name: dict[str, Token] = {}
        self._by_digest: dict[str, Token] = {}
        for token in tokens:
            self.put(token)

    @property
    def tokens(self) -> Collection[Token]:
        """All of them, revoked and expired ones too, by name."""
        return [self._by_name[name] for name in sorted(self._by_name)]

    def get(self, name: str) -> Token | None:
        """The token of that name."""
        return self._by_name.get(name)

    def put(self, token: Token) -> None:
        """Take a token, in place of the one that has its name."""
        if (before := self._by_name.get(token.name)) is not None:
            self._by_digest.pop(before.digest, None)
        self._by_name[token.name] = token
        self._by_digest[token.digest] = token

    def find(self, secret: str, now_s: float) -> Token:
        """Return the token that somebody shows, if it is valid.

        Raises:
            TokenUnknownError, TokenRevokedError, TokenExpiredError: it is not.
        """
        return self.find_digest(digest_of(secret), now_s)

    def find_digest(self, digest: str, now_s: float) -> Token:
        """Return the token of which this is kept, if it is valid.

        How long looking up a digest takes tells of the digest, which nobody can choose; the comparison that
        counts takes the same time whatever differs.

        Raises:
            TokenUnknownError, TokenRevokedError, TokenExpiredError: it is not.
        """
        token = self._by_digest.get(digest)
        if token is None or not hmac.compare_digest(token.digest, digest):
            raise TokenUnknownError
        token.check_valid(now_s)
        return token
