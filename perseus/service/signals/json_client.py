"""An HTTP client for JSON with a timeout, a limit on the response's size, and errors in one line.

Errors never contain headers, which may hold a key. Redirects are not followed, so that a key goes to no other
host.
"""

import json
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from perseus.service.signals.source import SourceError

TIMEOUT_S = 30.0
MAX_BYTES = 2**20
_MAX_RETRY_AFTER_S = 3600.0
_TOO_MANY, _UNAVAILABLE = 429, 503


class JsonClient:
    """A client of one server."""

    def __init__(
        self, url: str, headers: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._url = url.rstrip("/")
        self._headers = dict(headers or {})
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """Return the JSON at a path.

        Raises:
            SourceError: the server can't be reached, does not answer in time, or does not answer with JSON.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout, trust_env=True)
        url = f"{self._url}{path}"
        try:
            async with self._session.get(
                url, params=query, headers=self._headers, allow_redirects=False
            ) as response:
                if response.status != 200:
                    found = f"{response.status} {response.reason or ''}".strip()
                    raise SourceError(f"{url}: expected an answer, found {found}", _retry_after_s(response))
                return _parse(url, await _body(url, response))
        except TimeoutError:
            raise SourceError(f"{url}: expected an answer in {self._timeout.total:g} s, found none") from None
        except aiohttp.ClientError as error:
            raise SourceError(f"{url}: expected an answer, found: {_cause(error)}") from None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


async def _body(url: str, response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_chunked(65_536):
        body += chunk
        if len(body) > MAX_BYTES:
            raise SourceError(f"{url}: expected at most {MAX_BYTES} bytes, found more")
    return bytes(body)


def _parse(url: str, body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        start = body[:40].decode(errors="replace")
        raise SourceError(f"{url}: expected JSON, found {start!r}") from None


def _retry_after_s(response: aiohttp.ClientResponse) -> float:
    """Return the delay that the server asks for: Retry-After, seconds or a date (RFC 9110, 10.2.3)."""
    text = response.headers.get("Retry-After", "")
    if response.status not in (_TOO_MANY, _UNAVAILABLE) or not text:
        return 0.0
    if text.isascii() and text.isdigit():
        return min(_MAX_RETRY_AFTER_S, float(text[:9]))
    try:
        until = parsedate_to_datetime(text)
        now = parsedate_to_datetime(response.headers.get("Date", ""))
        return min(_MAX_RETRY_AFTER_S, max(0.0, (until - now).total_seconds()))
    except (TypeError, ValueError):
        return 0.0


def _cause(error: aiohttp.ClientError) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or "no connection"
    return type(error).__name__
