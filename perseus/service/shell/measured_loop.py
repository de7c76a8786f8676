"""An event loop that counts the time during which it has nothing to do."""

import asyncio
import selectors
import time


class _Selector(selectors.DefaultSelector):
    idle_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        begun_s = time.monotonic()
        try:
            return super().select(timeout)
        finally:
            self.idle_s += time.monotonic() - begun_s


class MeasuredLoop(asyncio.SelectorEventLoop):
    """The coordinator's event loop."""

    def __init__(self) -> None:
        self._measured = _Selector()
        super().__init__(self._measured)

    @property
    def idle_s(self) -> float:
        """For how long it has had nothing to do, seconds."""
        return self._measured.idle_s
