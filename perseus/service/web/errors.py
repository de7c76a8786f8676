"""Responses to requests that are refused or fail: the status that gRPC's callers see, as HTTP and JSON."""

import math
from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web

from perseus.service.api.calls import CallRefusedError, Refusal
from perseus.service.web.json_text import as_json

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_HTTP = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "OUT_OF_RANGE": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "ABORTED": 409,
    "RESOURCE_EXHAUSTED": 429,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_OTHER = 500  # INTERNAL, DATA_LOSS

_CODES = {404: "NOT_FOUND", 405: "UNIMPLEMENTED", 413: "RESOURCE_EXHAUSTED"}


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a refusal with its reason, and an unexpected error without any details."""
    try:
        return await handler(request)
    except CallRefusedError as error:
        return _answer(error.refusal)
    except web.HTTPException as error:  # an unknown route or method, or too large a request
        refusal = Refusal(_CODES.get(error.status, "INVALID_ARGUMENT"), f"HTTP_{error.status}", error.reason)
        allow = error.headers.get(hdrs.ALLOW)
        return _answer(refusal, error.status, {hdrs.ALLOW: allow} if allow is not None else {})
    except Exception as error:
        return _answer(Refusal.of(error, f"{request.method} {request.path}"))


def _answer(
    refusal: Refusal, status: int | None = None, headers: dict[str, str] | None = None
) -> web.Response:
    status = _HTTP.get(refusal.code, _OTHER) if status is None else status
    headers = dict(headers or {})
    if refusal.retry_delay_s is not None:
        headers[hdrs.RETRY_AFTER] = str(math.ceil(refusal.retry_delay_s))
    if status == 401:
        headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
    text = as_json(
        {
            "code": refusal.code,
            "reason": refusal.reason,
            "message": refusal.message,
            "metadata": dict(refusal.metadata),
        }
    )
    return web.Response(status=status, body=text.encode(), content_type="application/json", headers=headers)
