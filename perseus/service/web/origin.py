"""Whether a request was made by our own page, or by nobody's.

Two ways in which another site's page could ask in the name of whoever looks at it:

- *Across sites*: it sends a request to us, and the browser adds cookies and certificates by itself. It also
  adds the page's `Origin`, which scripts can't choose. (The cookie is SameSite=Strict besides.)
- *By a lent name* (DNS rebinding): the site's own name is made to lead to us, so that to the browser we are
  that site. But the browser then sends that name as `Host`. An address can't be lent, nor can `localhost`;
  over TLS no name can, as the certificate is for ours.
"""

import ipaddress
from collections.abc import Collection
from dataclasses import dataclass

from aiohttp import web

from perseus.service.domain.errors import HostUnknownError, OriginMismatchError
from perseus.tls.address import host_and_port

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class Hosts:
    """By which names the coordinator may be asked in plaintext, beside localhost and addresses.

    Attributes:
        names: in lower case.
        are_metrics_free: whether metrics may be asked for by any: where other machines reach them anyway.
    """

    names: Collection[str] = ()
    are_metrics_free: bool = False

    def check(self, request: web.Request) -> None:
        """Refuse a request by another name.

        Raises:
            HostUnknownError: it is another's.
        """
        if not (request.secure or (self.are_metrics_free and request.path == "/metrics")):
            _check_host(request, self.names)


def _check_host(request: web.Request, names: Collection[str]) -> None:
    shown = request.headers.get("Host", "")
    found = host_and_port(shown)
    host = (found[0] if found is not None else shown.strip("[]")).lower().rstrip(".")
    if host != "localhost" and not host.endswith(".localhost") and host not in names and not _is_ip(host):
        raise HostUnknownError(found=repr(shown))


def check_origin(request: web.Request, *, is_needed: bool) -> None:
    """Refuse what is no GET and comes from another origin; where it is needed, also what comes from none.

    A bearer's token is no browser's to add by itself: with one, it is not needed.

    Raises:
        OriginMismatchError: says what was expected.
    """
    if request.method in _SAFE_METHODS:
        return
    own, shown = f"{request.scheme}://{request.host}", request.headers.get("Origin")
    if shown is None and (not is_needed or "Authorization" in request.headers):
        return
    if shown is None or shown.lower() != own.lower():
        raise OriginMismatchError(expected=own, found=repr(shown) if shown is not None else "none")


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
