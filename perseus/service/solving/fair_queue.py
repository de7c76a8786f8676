"""Chooses the problem to solve next: start-time fair queueing over jobs. Pure.

Every job is charged the seconds that its problems take. A problem's *tag* is its job's charge, but no less
than the latest tag that got a turn: an idle job saves up no credit, and a job that took much waits until the
others have had as much. The lowest tag comes first, the oldest among equals. No job starves: every turn of
others raises the tags of later problems. (Goyal, Vin and Cheng, Start-Time Fair Queueing, SIGCOMM '96; here a
problem's cost is known only after its turn.)
"""

from dataclasses import dataclass


@dataclass(slots=True)
class _Entry:
    tag: float
    number: int
    not_before_s: float


class FairQueue:
    """Jobs with a problem that waits or is being solved, at most one problem per job.

    Times are of any monotonic clock.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, _Entry] = {}
        self._running: dict[str, float] = {}
        # The charges that exceed the virtual time; the others no longer matter.
        self._charged: dict[str, float] = {}
        self._virtual = 0.0
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, key: str, not_before_s: float = 0.0) -> None:
        """Queue a job for a turn, not before a given time."""
        assert key not in self._waiting
        assert key not in self._running
        self._count += 1
        tag = max(self._virtual, self._charged.get(key, 0.0))
        self._waiting[key] = _Entry(tag, self._count, not_before_s)

    def take(self, now_s: float) -> str | None:
        """Return the next job to get a turn; None if none is ready."""
        ready = [
            (some.tag, some.number, key) for key, some in self._waiting.items() if _is_ready(some, now_s)
        ]
        if not ready:
            return None
        tag, _, key = min(ready)
        del self._waiting[key]
        self._running[key] = tag
        self._virtual = max(self._virtual, tag)
        return key

    def end(self, key: str, spent_s: float) -> None:
        """End a job's turn and charge its time."""
        self._charged[key] = self._running.pop(key) + spent_s
        self._charged = {key: charged for key, charged in self._charged.items() if charged > self._virtual}

    def remove(self, key: str) -> None:
        """Remove a waiting job."""
        self._waiting.pop(key, None)

    def is_anybody_ready(self, now_s: float) -> bool:
        """Return whether any job is ready for a turn."""
        return any(_is_ready(entry, now_s) for entry in self._waiting.values())

    def next_ready_s(self) -> float | None:
        """Return when the first waiting job is ready, possibly in the past; None if none waits."""
        return min((entry.not_before_s for entry in self._waiting.values()), default=None)


def _is_ready(entry: _Entry, now_s: float) -> bool:
    return entry.not_before_s <= now_s
