"""The HTTP application, put together: metrics, the page's files, and the page's requests."""

import re
from collections.abc import Mapping

from aiohttp import hdrs, web

from perseus.service.api.rpc_scopes import READERS
from perseus.service.domain.errors import ServedElsewhereError
from perseus.service.domain.members import Fleet
from perseus.service.web.access import HttpAuthenticator
from perseus.service.web.errors import Handler, answer_errors
from perseus.service.web.origin import Hosts
from perseus.service.web.page_api import PageApi
from perseus.service.web.page_files import PageFile
from perseus.service.web.scrape import Scrape

_MAX_REQUEST_BYTES = 65_536

_HEADERS = {
    # The page loads only our own files, and may not be framed.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

_PAGE = "index.html"

_SHOWN = re.compile(r"/(jobs/[^/]+)?")
"""Paths that browsers are led on from by one that stands by; they keep what follows the '#'."""


def make_app(
    scrape: Scrape,
    access: HttpAuthenticator | None,
    page_api: PageApi | None = None,
    files: Mapping[str, PageFile] | None = None,
    hosts: Hosts | None = None,
) -> web.Application:
    """Return the application.

    Args:
        scrape: answers scrapes.
        access: authenticates scrapes; None without authentication.
        page_api: answers the page's requests, if the page is served.
        files: the page's files, by their paths.
        hosts: the accepted host names of the coordinator; None for any.
    """

    async def metrics(request: web.Request) -> web.Response:
        if access is not None:
            access.check(request, READERS)
        return await _scraped(request, scrape)

    async def file(request: web.Request) -> web.Response:
        found = (files or {}).get(request.match_info.get("path", _PAGE))
        if found is None:
            raise web.HTTPNotFound
        return found.answer(request)

    app = _new_app(hosts)
    app.router.add_get("/metrics", metrics)
    if page_api is not None:
        app.router.add_get("/", file)
        app.router.add_get("/static/{path:.+}", file)
        page_api.add_to(app)
    return app


def make_standby_app(fleet: Fleet, hosts: Hosts, scrape: Scrape) -> web.Application:
    """Return the application of a coordinator that stands by: it leads browsers to a page that shows jobs,
    answers scrapes, and tells all other callers where that is."""

    async def metrics(request: web.Request) -> web.Response:
        return await _scraped(request, scrape)

    async def lead(request: web.Request) -> web.Response:
        address, page_url = fleet.any_page()
        if not page_url or request.method != "GET" or not _SHOWN.fullmatch(request.path):
            raise ServedElsewhereError(address=address, page_url=page_url)
        return web.Response(status=302, headers={hdrs.LOCATION: page_url + request.rel_url.raw_path})

    app = _new_app(hosts)
    app.router.add_get("/metrics", metrics)
    app.router.add_route("*", "/{path:.*}", lead)
    return app


async def _scraped(request: web.Request, scrape: Scrape) -> web.Response:
    body, content_type = await scrape.answer(request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": content_type})


def _new_app(hosts: Hosts | None) -> web.Application:
    @web.middleware
    async def check_hosts(request: web.Request, handler: Handler) -> web.StreamResponse:
        if hosts is not None:
            hosts.check(request)
        return await handler(request)

    app = web.Application(middlewares=[answer_errors, check_hosts], client_max_size=_MAX_REQUEST_BYTES)
    app.on_response_prepare.append(_add_headers)
    return app


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)
