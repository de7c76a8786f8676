"""The protocol that every source of a signal implements, and its error."""

from typing import Protocol

from perseus.service.fleet.signals.series import Signal


class SourceError(Exception):
    """A source can't be read; the text is one line for people, without secrets.

    `retry_after_s`: the delay that the source asks for; 0 for none.
    """

    def __init__(self, text: str, retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class Source(Protocol):
    """A source of a signal.

    Attributes:
        period_s: the polling interval.
    """

    period_s: float

    async def read(self, now_s: float) -> Signal | None:
        """Return the signal at a time of the wall clock: its past and, if known, its forecast.

        None if nothing is new.

        Raises:
            SourceError: it can't be read.
        """

    async def close(self) -> None:
        """Release the source's resources."""
