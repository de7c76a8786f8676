"""Whose problem is solved next: start-time fair queueing over jobs. Pure.

Every job is charged the seconds that its problems take. A problem's *tag* is what its job has been charged,
but no less than the tag of what was last taken: who was idle for long has saved up nothing, and who took much
waits until the others have had as much. The lowest tag is taken first, of equal ones the oldest. Nobody waits
for ever: every turn of others raises the tags of those that come after it. (Goyal, Vin and Cheng, Start-Time
Fair Queueing, SIGCOMM '96; here a problem's cost is known only after it.)
"""

from dataclasses import dataclass


@dataclass(slots=True)
class _Entry:
    tag: float
    number: int
    not_before_s: float


class FairQueue:
    """Keys of jobs with a problem that waits or is being solved, at most one of each.

    Times are of any clock that never goes back.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, _Entry] = {}
        self._running: dict[str, float] = {}
        # What those have been charged that have more than the rest.
        self._charged: dict[str, float] = {}
        self._virtual = 0.0
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, key: str, not_before_s: float = 0.0) -> None:
        """Let a job wait for its turn, which does not come before a time."""
        assert key not in self._waiting
        assert key not in self._running
        self._count += 1
        tag = max(self._virtual, self._charged.get(key, 0.0))
        self._waiting[key] = _Entry(tag, self._count, not_before_s)

    def take(self, now_s: float) -> str | None:
        """Give a job its turn, if one is ready."""
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
        """A job's turn has ended, after so long."""
        self._charged[key] = self._running.pop(key) + spent_s
        self._charged = {key: charged for key, charged in self._charged.items() if charged > self._virtual}

    def remove(self, key: str) -> None:
        """A job waits no longer."""
        self._waiting.pop(key, None)

    def is_anybody_ready(self, now_s: float) -> bool:
        """Whether somebody waits for nothing but a turn."""
        return any(_is_ready(entry, now_s) for entry in self._waiting.values())

    def next_ready_s(self) -> float | None:
        """When the first of those that wait is ready; it may be in the past."""
        return min((entry.not_before_s for entry in self._waiting.values()), default=None)


def _is_ready(entry: _Entry, now_s: float) -> bool:
    return entry.not_before_s <= now_s
