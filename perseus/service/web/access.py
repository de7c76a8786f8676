"""Who asks over HTTP: by a bearer token, or by a certificate that stands for a grant, as over gRPC."""

from collections.abc import Collection, Mapping

from aiohttp import web

from perseus.service.domain.errors import CredentialMissingError, ScopeTooNarrowError
from perseus.service.domain.principals import Grant, Principal, Scope
from perseus.service.shell.tokens import Tokens

READERS = frozenset({Scope.READER, Scope.OPERATOR})


class Access:
    """Finds out who asks. `certificates`: what their identities (common or alternative names) stand for."""

    def __init__(self, tokens: Tokens, certificates: Mapping[str, Grant]) -> None:
        self._tokens = tokens
        self._certificates = certificates

    def check(self, request: web.Request, wanted: Collection[Scope]) -> Principal:
        """Return who asks, if one of these scopes is theirs.

        Raises:
            AuthenticationError: nobody knows who it is.
            ScopeTooNarrowError: they may not.
        """
        principal = self._principal(request)
        if principal.grant.scope not in wanted:
            raise ScopeTooNarrowError(
                rpc=f"{request.method} {request.path}",
                expected=" or ".join(sorted(scope.value for scope in wanted)),
                found=principal.grant.scope.value,
                principal=principal.name,
            )
        return principal

    def _principal(self, request: web.Request) -> Principal:
        shown = request.headers.get("Authorization")
        if shown is not None:  # whoever shows a wrong token is refused, whatever else they show
            scheme, _, secret = shown.partition(" ")
            if scheme.lower() != "bearer":
                raise CredentialMissingError
            return self._tokens.authenticate(secret.strip())
        transport = request.transport
        facts = (transport.get_extra_info("peercert") if transport is not None else None) or {}
        for name in (*_common_names(facts), *(value for _, value in facts.get("subjectAltName", ()))):
            if (grant := self._certificates.get(name)) is not None:
                return Principal(f"certificate {name}", grant)
        raise CredentialMissingError


def _common_names(facts: Mapping[str, tuple[tuple[tuple[str, str], ...], ...]]) -> list[str]:
    pairs = (pair for relative_name in facts.get("subject", ()) for pair in relative_name)
    return [value for key, value in pairs if key == "commonName"]
