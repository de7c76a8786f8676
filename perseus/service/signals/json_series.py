"""Reads a provider's JSON: members at a path, and rows of times and values as a signal."""

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.signals import HOUR_S, SignalKind
from perseus.service.fleet.signals.series import Signal
from perseus.service.signals.source import SourceError

MAX_ROWS = 10_000


def member(name: str, response: Any, *path: str) -> Any:
    """Return the member at a path of names.

    Raises:
        SourceError: there is none.
    """
    for depth, key in enumerate(path):
        if not isinstance(response, dict) or key not in response:
            raise SourceError(f"{name}: expected {'.'.join(path[: depth + 1])}, found none")
        response = response[key]
    return response


def rows(name: str, response: Any, *path: str) -> Sequence[Any]:
    """Return the rows at a path of names.

    Raises:
        SourceError: there is no list, or it has too many rows.
    """
    found = member(name, response, *path)
    where = f"{name}: {'.'.join(path)}"
    if not isinstance(found, list):
        raise SourceError(f"{where}: expected a list, found {type(found).__name__}")
    if len(found) > MAX_ROWS:
        raise SourceError(f"{where}: expected at most {MAX_ROWS} rows, found {len(found)}")
    return found


def time_s(name: str, text: Any) -> float:
    """Parse an ISO 8601 time, UTC without an offset; return seconds since 1970.

    Raises:
        SourceError: it is not such a time.
    """
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError):
        raise SourceError(f"{name}: expected a time in ISO 8601, found {_shown(text)}") from None


def number(name: str, value: Any) -> float | None:
    """Return a number, or None for null.

    Raises:
        SourceError: it is neither.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SourceError(f"{name}: expected a number or null, found {_shown(value)}")
    return float(value)


def text_of_time(time_s: float) -> str:
    """Format a time to the minute, as providers expect it."""
    return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%dT%H:%MZ}"


def signal_of(
    name: str, kind: SignalKind, found: Iterable[tuple[float, float | None]], stale_s: float
) -> Signal:
    """Return the signal of times and values; None is a gap, and of duplicate times the later value counts.

    Raises:
        SourceError: there is no value, or an impossible one.
    """
    by_time: dict[float, float | None] = {}
    for at_s, value in found:
        by_time[at_s] = by_time.get(at_s) if value is None else value
    times_s = sorted(by_time)
    known = [(at_s, value) for at_s in times_s if (value := by_time[at_s]) is not None]
    if not known:
        raise SourceError(f"{name}: expected at least one value, found none")
    valid_s = min((after - before for before, after in pairwise(times_s)), default=HOUR_S)
    try:
        return Signal(
            kind,
            tuple(at_s for at_s, _ in known),
            tuple(value for _, value in known),
            max(1.0, valid_s),
            stale_s,
        )
    except InvalidFieldError as error:
        raise SourceError(f"{name}: {error}") from None


def _shown(value: Any) -> str:
    return repr(value)[:60]
