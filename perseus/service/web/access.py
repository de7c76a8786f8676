"""Authentication over HTTP: by a bearer token, a session's cookie, or a certificate with a grant."""

from collections.abc import Collection, Mapping

from aiohttp import web

from perseus.service.api.rpc_scopes import check_one_of
from perseus.service.domain.errors import CredentialMissingError
from perseus.service.domain.principals import Grant, Principal, Scope
from perseus.service.shell.tokens import Tokens
from perseus.service.web.sessions import LIFETIME_S, Sessions


class HttpAuthenticator:
    """Authenticates requests.

    Args:
        tokens: those that callers and logins have.
        certificates: the grants of identities (common or alternative names).
        slot: whose coordinator this is: a browser may be logged in at several coordinators of one host.
    """

    def __init__(self, tokens: Tokens, certificates: Mapping[str, Grant], slot: int = 0) -> None:
        self._cookie = f"perseus-{slot}" if slot else "perseus"
        self.sessions = Sessions(tokens)
        self._tokens = tokens
        self._certificates = certificates

    def check(self, request: web.Request, wanted: Collection[Scope]) -> Principal:
        """Return the principal of a request if it has one of these scopes.

        Raises:
            AuthenticationError: the request has no valid credential.
            ScopeTooNarrowError: the principal has none of the scopes.
        """
        principal = self.identify(request)
        check_one_of(wanted, f"{request.method} {request.path}", principal)
        return principal

    def identify(self, request: web.Request) -> Principal:
        """Return the principal of a request.

        Raises:
            AuthenticationError: the request has no valid credential.
        """
        shown = request.headers.get("Authorization")
        if shown is not None:  # a wrong token is refused, whatever other credentials the request has
            scheme, _, secret = shown.partition(" ")
            if scheme.lower() != "bearer":
                raise CredentialMissingError
            return self._tokens.authenticate(secret.strip())
        if (session_id := self.session_id(request)) is not None:
            return self.sessions.find(session_id)
        transport = request.transport
        facts = (transport.get_extra_info("peercert") if transport is not None else None) or {}
        for name in (*_common_names(facts), *(value for _, value in facts.get("subjectAltName", ()))):
            if (grant := self._certificates.get(name)) is not None:
                return Principal(f"certificate {name}", grant)
        raise CredentialMissingError

    def session_id(self, request: web.Request) -> str | None:
        """Return the identifier in a session's cookie."""
        return request.cookies.get(self._cookie_name(request))

    def set_cookie(self, request: web.Request, response: web.Response, session_id: str) -> None:
        """Set a session's cookie: no script can read it, and other sites' requests don't carry it."""
        response.set_cookie(
            self._cookie_name(request),
            session_id,
            max_age=int(LIFETIME_S),
            path="/",
            httponly=True,
            samesite="Strict",
            secure=request.secure,
        )

    def drop_cookie(self, request: web.Request, response: web.Response) -> None:
        """Delete a session's cookie."""
        response.del_cookie(
            self._cookie_name(request), path="/", httponly=True, samesite="Strict", secure=request.secure
        )

    def _cookie_name(self, request: web.Request) -> str:
        """Return the cookie's name; over TLS, one that browsers take over TLS and from this host only."""
        return f"__Host-{self._cookie}" if request.secure else self._cookie


def _common_names(facts: Mapping[str, tuple[tuple[tuple[str, str], ...], ...]]) -> list[str]:
    pairs = (pair for relative_name in facts.get("subject", ()) for pair in relative_name)
    return [value for key, value in pairs if key == "commonName"]
