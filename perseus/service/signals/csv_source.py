"""A signal from a CSV file, which is read again whenever it changes; rows in the future are its forecast."""

import asyncio
from bisect import bisect_right
from dataclasses import replace
from pathlib import Path

from perseus.service.domain.signals import SignalKind
from perseus.service.fleet.signals.series import Signal
from perseus.service.signals.csv_file import SignalFileError, read_signal_csv
from perseus.service.signals.source import SourceError

PERIOD_S = 1.0


class CsvSource:
    """A source that reads a CSV file. Without `has_forecast`, a row counts only once its time has come."""

    period_s = PERIOD_S

    def __init__(
        self,
        path: Path,
        kind: SignalKind,
        column: str,
        stale_s: float,
        *,
        unit: str | None = None,
        has_forecast: bool = True,
    ) -> None:
        self._path = path
        self._kind = kind
        self._column = column
        self._unit = unit
        self._stale_s = stale_s
        self._has_forecast = has_forecast
        # Size, modification time and inode of the file that was read last.
        self._seen: tuple[int, int, int] | None = None
        self._signal: Signal | None = None
        self._logged_count = 0

    async def read(self, now_s: float) -> Signal | None:
        """Return the signal if the file, or the rows whose time has come, changed; otherwise None.

        Raises:
            SourceError: the file can't be read as a signal.
        """
        is_new = await asyncio.to_thread(self._read)
        signal = self._signal
        if signal is None or self._has_forecast:
            return signal if is_new else None
        count = bisect_right(signal.times_s, now_s)
        if count == 0 or not (is_new or count != self._logged_count):
            return None
        self._logged_count = count
        return replace(signal, times_s=signal.times_s[:count], values=signal.values[:count])

    async def close(self) -> None:
        """Do nothing: the file is not kept open."""

    def _read(self) -> bool:
        """Read the file if it has changed; return whether it has."""
        try:
            found = self._path.stat()
        except OSError as error:
            self._seen = None
            raise SourceError(f"{self._path}: expected a readable file, found: {error.strerror}") from None
        seen = found.st_size, found.st_mtime_ns, found.st_ino
        if seen == self._seen:
            return False
        try:
            self._signal = read_signal_csv(
                self._path, self._kind, self._column, unit=self._unit, stale_s=self._stale_s
            )
        except SignalFileError as error:
            raise SourceError(str(error)) from None
        self._seen = seen
        return True
