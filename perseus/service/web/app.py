"""The routes of the HTTP server, and what is answered where something is wrong."""

from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web

from perseus.service.domain.errors import AuthenticationError, ForbiddenError
from perseus.service.web.access import READERS, Access
from perseus.service.web.scrape import Scrape

log = structlog.get_logger(__name__)

_MOST_REQUEST_BYTES = 65_536

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(scrape: Scrape, access: Access | None) -> web.Application:
    """Return the application. Without `access` nobody is asked who they are."""

    async def metrics(request: web.Request) -> web.Response:
        if access is not None:
            access.check(request, READERS)
        body, content_type = await scrape.answer(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    app = web.Application(middlewares=[_answer_errors], client_max_size=_MOST_REQUEST_BYTES)
    app.router.add_get("/metrics", metrics)
    return app


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except AuthenticationError as error:
        return web.Response(status=401, text=f"{error}\n", headers={"WWW-Authenticate": "Bearer"})
    except ForbiddenError as error:
        return web.Response(status=403, text=f"{error}\n")
    except web.HTTPException:  # no such route, no such method
        raise
    except Exception as error:
        log.error("unexpected error", where=f"{request.method} {request.path}", exc_info=error)
        return web.Response(status=500, text="a fault of the coordinator's own; its log says more\n")
