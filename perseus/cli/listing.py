"""How commands list things of a coordinator: page by page, from a time on."""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perseus.cli.terminal import fail

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta

    from perseus.v1.job_pb2 import Label

LabelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--label", metavar="KEY=VALUE", help="Only jobs with this label; repeatable.", show_default=False
    ),
]

TIMEOUT_S = 10.0
PAGE_SIZE = 1000

_DURATION = re.compile(r"(?P<count>[0-9]+)(?P<unit>[smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def label_filter(labels: "Sequence[str] | None") -> "list[Label]":
    """Return the labels of `--label KEY=VALUE`; exit if one has another form."""
    from perseus.v1.job_pb2 import Label

    found = []
    for text in labels or ():
        key, is_pair, value = text.partition("=")
        if not (key and is_pair):
            fail(f"--label: expected KEY=VALUE, found {text!r}")
        found.append(Label(key=key, value=value))
    return found


def pages(method: Callable[..., Any], request: Any) -> Iterator[Any]:
    """Request one page after another, and yield the responses."""
    wanted = type(request)()
    wanted.CopyFrom(request)  # it can be sent to other coordinators, too
    while True:
        page = method(wanted, timeout=TIMEOUT_S)
        yield page
        if not page.next_page_token:
            return
        wanted.page_token = page.next_page_token


def later(flag: str, text: str) -> "datetime":
    """Return a flag's time, given as a time or as a duration from now; exit if it is neither."""
    return _moment(flag, text, sign=1)


def moment(flag: str, text: str) -> "datetime":
    """Return a flag's time, given as a time or as a duration before now; exit if it is neither."""
    return _moment(flag, text, sign=-1)


def duration_s(flag: str, text: str) -> float:
    """Return a flag's duration, seconds; exit if it is not a duration."""
    duration = None
    with suppress(OverflowError):
        duration = _duration(text)
    if duration is None:
        fail(f"{flag}: expected a duration such as 90s, 15m, 2h or 7d, found {text!r}")
    return duration.total_seconds()


def _moment(flag: str, text: str, *, sign: int) -> "datetime":
    from datetime import UTC, datetime

    try:
        if (duration := _duration(text)) is not None:
            return datetime.now(UTC) + sign * duration
        given = datetime.fromisoformat(text)
        return given.astimezone(UTC) if given.tzinfo is not None else given.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        fail(f"{flag}: expected a time such as 2026-01-31T12:00, or 90s, 15m, 2h or 7d, found {text!r}")


def _duration(text: str) -> "timedelta | None":
    from datetime import timedelta

    found = _DURATION.fullmatch(text)
    return timedelta(**{_UNITS[found["unit"]]: int(found["count"])}) if found is not None else None
