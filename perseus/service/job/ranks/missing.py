"""The missing ranks of a job, the first of them, and since when. Pure.

Ranks come and go in any order. A change of one rank costs the logarithm of the job's size: the places are in
a heap, and ranks that have returned are dropped from it only when they reach its top.
"""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from perseus.service.domain.specification import Coordinates


class MissingRanks:
    """The places of ranks that no agent serves."""

    def __init__(self, places: Iterable[Coordinates], now_s: float) -> None:
        self._since_s = dict.fromkeys(places, now_s)
        self._heap = list(self._since_s)
        heapify(self._heap)
        self._in_heap = set(self._heap)

    def __len__(self) -> int:
        return len(self._since_s)

    def miss(self, place: Coordinates, now_s: float) -> None:
        """Add a rank as missing from now on, if it was not before."""
        if place not in self._since_s:
            self._since_s[place] = now_s
            if place not in self._in_heap:
                self._in_heap.add(place)
                heappush(self._heap, place)

    def find(self, place: Coordinates) -> None:
        """Remove a rank that is no longer missing."""
        self._since_s.pop(place, None)

    def first(self) -> tuple[Coordinates, float] | None:
        """Return the first missing rank, in order, and since when it is missing; None if none is."""
        while self._heap and self._heap[0] not in self._since_s:
            self._in_heap.discard(heappop(self._heap))
        return (self._heap[0], self._since_s[self._heap[0]]) if self._heap else None
