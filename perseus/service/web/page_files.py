"""The page's files: read once from the package, and served from memory, compressed where that helps."""

import gzip
import hashlib
import importlib.resources
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources.abc import Traversable

from aiohttp import hdrs, web

_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
    "ico": "image/x-icon",
    "txt": "text/plain; charset=utf-8",
    "json": "application/json",
    "woff2": "font/woff2",
}
_OTHER_TYPE = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file. `packed` is None where gzip saves nothing."""

    body: bytes
    packed: bytes | None
    content_type: str
    etag: str

    @classmethod
    def of(cls, name: str, body: bytes) -> "PageFile":
        """Return a file with that name and content."""
        packed = gzip.compress(body, 9, mtime=0)
        return cls(
            body,
            packed if len(packed) < 0.9 * len(body) else None,
            _TYPES.get(name.rpartition(".")[2], _OTHER_TYPE),
            hashlib.sha256(body).hexdigest()[:32],
        )

    def answer(self, request: web.Request) -> web.Response:
        """Return the file, or 304 if the browser has it already."""
        # Browsers ask at every load and get 304 if nothing changed: files of different releases are never
        # mixed.
        headers = {hdrs.ETAG: f'"{self.etag}"', hdrs.CACHE_CONTROL: "no-cache", hdrs.VARY: "Accept-Encoding"}
        if any(each.value == self.etag for each in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        headers[hdrs.CONTENT_TYPE] = self.content_type
        if self.packed is not None and "gzip" in request.headers.get(hdrs.ACCEPT_ENCODING, ""):
            headers[hdrs.CONTENT_ENCODING] = "gzip"
            return web.Response(body=self.packed, headers=headers)
        return web.Response(body=self.body, headers=headers)


def packaged_page() -> dict[str, PageFile]:
    """Return the page that is part of this package, by the files' paths in its folder."""
    return page_of(importlib.resources.files("perseus.service.web") / "page")


def page_of(folder: Traversable) -> dict[str, PageFile]:
    """Return all files of a folder, by their paths in it."""
    return {path: PageFile.of(path, file.read_bytes()) for path, file in _files(folder, "")}


def _files(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    if not folder.is_dir():
        return
    for each in folder.iterdir():
        if each.is_dir():
            yield from _files(each, f"{prefix}{each.name}/")
        else:
            yield f"{prefix}{each.name}", each
