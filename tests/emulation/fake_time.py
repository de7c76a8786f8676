"""A clock that advances only in sleeps."""

from collections.abc import Callable


class FakeTime:
    """A substitute for time.monotonic and time.sleep; `at` schedules an action during a sleep."""

    MIN_SLEEP_S = 1e-6
    """Sleep; even zero seconds take a moment."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s
        self._actions: list[tuple[float, Callable[[], None]]] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        until_s = self.now_s + max(duration_s, self.MIN_SLEEP_S)
        for due_s, action in sorted(self._actions, key=lambda pair: pair[0]):
            if due_s <= until_s:
                self._actions.remove((due_s, action))
                self.now_s = max(self.now_s, due_s)
                action()
        self.now_s = until_s

    def at(self, due_s: float, action: Callable[[], None]) -> None:
        self._actions.append((due_s, action))
