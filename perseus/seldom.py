"""What is told at most once in a while, however often it happens. Pure: the clock is given."""

from collections.abc import Callable, Hashable


class Seldom:
    """Says when something of a kind is due to be told again, and how often it was left out until then.

    Args:
        period_s: between two times that the like is told.
        most: kinds that are remembered; the one that was told longest ago makes room for another.
        monotonic: the time in seconds, which never goes back.
    """

    def __init__(self, period_s: float, most: int, monotonic: Callable[[], float]) -> None:
        self._period_s = period_s
        self._most = most
        self._monotonic = monotonic
        self._told: dict[Hashable, tuple[float, int]] = {}

    def due(self, *kind: Hashable) -> dict[str, int] | None:
        """Note one more; None if it is not to be told, else what belongs to it: `left_out`, if any was."""
        now_s = self._monotonic()
        told_at_s, left_out = self._told.get(kind, (-self._period_s, 0))
        if now_s - told_at_s < self._period_s:
            self._told[kind] = (told_at_s, left_out + 1)
            return None
        self._told.pop(kind, None)
        while len(self._told) >= self._most:
            self._told.pop(next(iter(self._told)))
        self._told[kind] = (now_s, 0)
        return {"left_out": left_out} if left_out else {}

    def forget(self) -> None:
        """Let everything be news again."""
        self._told.clear()
