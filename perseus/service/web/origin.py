"""Protection against requests that another site's page makes in the name of its reader.

There are two ways to make such requests:

- *Across sites*: the page sends a request to us, and the browser adds cookies and certificates by itself. It
  also adds the page's `Origin`, which scripts can't choose. (The cookie is SameSite=Strict besides.)
- *DNS rebinding*: the site's own name is resolved to our address, so that the browser takes us for that site.
  But the browser then sends that name as `Host`. Addresses and `localhost` can't be rebound this way; over
  TLS no name can, as the certificate is for ours.
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
    """The accepted host names of the coordinator in plaintext, beside localhost and addresses.

    Attributes:
        names: in lower case.
        are_metrics_free: whether metrics are served under any name: where other machines reach them anyway.
    """

    names: Collection[str] = ()
    are_metrics_free: bool = False

    def check(self, request: web.Request) -> None:
        """Refuse a request with an unknown host name.

        Raises:
            HostUnknownError: the name is unknown.
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
    """Refuse a request other than GET from another origin, and where `is_needed`, one without an origin.

    A browser never adds a bearer token by itself: with one, no origin is needed.

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
