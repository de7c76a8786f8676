"""Reads a signal from a CSV file with a column of times and one of values, named in the header.

Times are ISO 8601 (UTC without an offset) or seconds since 1970. A row without a value is a gap. Values have
the unit that the operator states. Without one they are in g/kWh or per kWh, and an intensity that only other
units can explain is refused. Messages number lines as an editor does: the header is line 1.
"""

import csv
import io
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from perseus.regular_file import open_regular, read_bounded
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.ledger import MAX_INTENSITY_G_PER_KWH
from perseus.service.domain.signals import HOUR_S, MAX_SIGNAL_TIME_S, SignalKind
from perseus.service.fleet.signals.series import MAX_VALUE, Signal
from perseus.service.signal_settings import UNITS

TIME_COLUMN = "timestamp"
_MAX_BYTES = 64 * 2**20
_MAX_ROWS = 1_000_000
_MAX_ASSUMED_G_PER_KWH = 1000.0
"""Hardly any grid emits more, so without a stated unit it is rather lbs/MWh, a number 2.2 times as high."""


class SignalFileError(Exception):
    """A file is not a signal; the text names the file, line and column, and what was expected and found."""


def read_signal_csv(
    path: Path, kind: SignalKind, column: str, *, unit: str | None = None, stale_s: float = 3 * HOUR_S
) -> Signal:
    """Read a signal. A value is valid until the next row, the last one for the shortest interval of rows.

    `unit`: one of its kind's in `UNITS`.

    Raises:
        SignalFileError: the file can't be read as such a table, a value is impossible, or times do not rise.
    """
    try:
        text = read_bounded(open_regular(path), _MAX_BYTES).decode("utf-8-sig")
        lines = io.StringIO(text, newline="").readlines()
        rows = list(_rows(path, csv.DictReader(lines, strict=True), column))
        if not lines[-1].endswith("\n"):  # the file is incomplete, perhaps in the middle of a number
            raise SignalFileError(f"{path}, line {len(lines)}: expected an end of line, found none")
    except OSError as error:
        raise SignalFileError(f"{path}: expected a readable file, found: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SignalFileError(
            f"{path}: expected UTF-8 text, found byte 0x{error.object[error.start]:02x} at {error.start}"
        ) from None
    factor = 1.0 if unit is None else UNITS[kind.value][unit]
    times_s: list[float] = []
    values: list[float] = []
    for line, time_s, value in rows:
        if times_s and time_s <= times_s[-1]:
            raise _refusal(path, line, TIME_COLUMN, "a later time than in the row before", f"{time_s:.0f} s")
        if value is not None:
            if kind is SignalKind.CARBON:
                _check_intensity(path, line, column, value * factor, unit)
            times_s.append(time_s)
            values.append(value * factor)
    if not values:
        raise SignalFileError(f"{path}, column {column}: expected at least one value, found none")
    every_s = [row[1] for row in rows]
    valid_s = min((after - before for before, after in pairwise(every_s)), default=HOUR_S)
    try:
        return Signal(kind, times_s, values, max(1.0, valid_s), stale_s)
    except InvalidFieldError as error:
        raise SignalFileError(f"{path}: {error}") from None


def _rows(
    path: Path, reader: "csv.DictReader[str]", column: str
) -> Iterator[tuple[int, float, float | None]]:
    try:
        header = reader.fieldnames or ()
        for name in (TIME_COLUMN, column):
            if name not in header:
                found = ", ".join(header) or "an empty file"
                raise SignalFileError(f"{path}, line 1: expected a column {name}, found {found}")
        for count, row in enumerate(reader):
            line = reader.line_num
            if count >= _MAX_ROWS:
                raise SignalFileError(f"{path}, line {line}: expected at most {_MAX_ROWS} rows, found more")
            yield line, _time_s(path, line, row[TIME_COLUMN]), _value(path, line, column, row[column])
    except csv.Error as error:
        raise SignalFileError(f"{path}, line {reader.reader.line_num}: expected CSV, found {error}") from None


def _time_s(path: Path, line: int, text: str | None) -> float:
    found = (text or "").strip()
    try:
        time_s = float(found)
    except ValueError:
        try:
            moment = datetime.fromisoformat(found)
        except ValueError:
            expected = "a time in ISO 8601, or seconds since 1970"
            raise _refusal(path, line, TIME_COLUMN, expected, repr(found)) from None
        time_s = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not 0 <= time_s <= MAX_SIGNAL_TIME_S:
        raise _refusal(path, line, TIME_COLUMN, f"0 to {MAX_SIGNAL_TIME_S:g} s since 1970", repr(found))
    return time_s


def _value(path: Path, line: int, column: str, text: str | None) -> float | None:
    found = (text or "").strip()
    if not found:
        return None
    try:
        value = float(found)
    except ValueError:
        raise _refusal(path, line, column, "a number, or nothing", repr(found)) from None
    if not (math.isfinite(value) and abs(value) <= MAX_VALUE):
        raise _refusal(path, line, column, f"a number from {-MAX_VALUE:g} to {MAX_VALUE:g}", repr(found))
    return value


def _check_intensity(path: Path, line: int, column: str, g_per_kwh: float, unit: str | None) -> None:
    maximum = _MAX_ASSUMED_G_PER_KWH if unit is None else MAX_INTENSITY_G_PER_KWH
    if g_per_kwh > maximum:
        hint = f" where no unit ({', '.join(UNITS['carbon'])}) is set" if unit is None else ""
        raise _refusal(path, line, column, f"at most {maximum:g} g/kWh{hint}", f"{g_per_kwh:g} g/kWh")


def _refusal(path: Path, line: int, column: str, expected: str, found: str) -> SignalFileError:
    return SignalFileError(f"{path}, line {line}, column {column}: expected {expected}, found {found}")
