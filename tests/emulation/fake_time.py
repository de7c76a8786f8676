"""A clock that moves only when somebody sleeps."""

from collections.abc import Callable


class FakeTime:
    """Injected for time.monotonic and time.sleep; `at` runs an action when a sleep passes a moment."""

    MIN_SLEEP_S = 1e-6
    """Even a sleep of nothing takes a moment."""

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
