"""How commands ask a coordinator for lists: page by page, and from which time on."""

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from perseus.cli.terminal import fail

if TYPE_CHECKING:
    from datetime import datetime

TIMEOUT_S = 10.0
PAGE_SIZE = 1000

_AGO = re.compile(r"(?P<count>[0-9]+)(?P<unit>[smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def pages(method: Callable[..., Any], request: Any) -> Iterator[Any]:
    """Ask for one page after another."""
    while True:
        page = method(request, timeout=TIMEOUT_S)
        yield page
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


def later(flag: str, text: str) -> "datetime":
    """Return a time that a flag has, or one in so long; exits if it is none."""
    from datetime import UTC, datetime, timedelta

    if lasting := _AGO.fullmatch(text):
        try:
            return datetime.now(UTC) + timedelta(**{_UNITS[lasting["unit"]]: int(lasting["count"])})
        except OverflowError:
            fail(f"{flag}: expected a time such as 2026-01-31T12:00, or 90s, 15m, 2h or 7d, found {text!r}")
    return moment(flag, text)


def moment(flag: str, text: str) -> "datetime":
    """Return a time that a flag has, or one so long ago; exits if it is none."""
    from datetime import UTC, datetime, timedelta

    try:
        if ago := _AGO.fullmatch(text):
            return datetime.now(UTC) - timedelta(**{_UNITS[ago["unit"]]: int(ago["count"])})
        given = datetime.fromisoformat(text)
        return given.astimezone(UTC) if given.tzinfo is not None else given.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        fail(f"{flag}: expected a time such as 2026-01-31T12:00, or 90s, 15m, 2h or 7d, found {text!r}")
