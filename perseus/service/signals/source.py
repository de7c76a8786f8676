"""Where a signal is read from: what every source does, and the mistake that it tells of itself."""

from typing import Protocol

from perseus.service.fleet.signals.series import Signal


class SourceError(Exception):
    """A source does not say what it should; one line for people, without secrets.

    `retry_after_s`: how long it asks to be left alone; 0 if it does not say.
    """

    def __init__(self, text: str, retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class Source(Protocol):
    """Something that a signal is read from.

    Attributes:
        period_s: between two looks at it.
    """

    period_s: float

    async def read(self, now_s: float) -> Signal | None:
        """Return what it says at a time of the wall clock: what was, and what it says will be.

        None if it says nothing new.

        Raises:
            SourceError: it can't be read.
        """

    async def close(self) -> None:
        """Let go of what it holds."""
