"""The expiry of agents' leases: a heap of deadlines, so that hearing one agent does not touch the others.

Every message of an agent renews its lease, many more times than a lease runs out. So renewing only records
the time; the heap keeps an older deadline, which is corrected when it reaches the top. Pure.
"""

import heapq


class Leases:
    """The leases of agent instances, one for all ranks that an instance serves."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._heard_s: dict[str, float] = {}
        # The deadline in the heap for each instance, never later than the true one. Other entries of the heap
        # belong to ended leases, and are dropped when they reach the top.
        self._noted_s: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __contains__(self, instance_id: object) -> bool:
        return instance_id in self._heard_s

    def __len__(self) -> int:
        return len(self._heard_s)

    def hear(self, instance_id: str, now_s: float) -> None:
        """Begin or renew a lease."""
        self._heard_s[instance_id] = now_s
        if instance_id not in self._noted_s:
            self._note(instance_id)

    def end(self, instance_id: str) -> None:
        """Forget an instance that serves no rank any more."""
        self._heard_s.pop(instance_id, None)
        self._noted_s.pop(instance_id, None)

    def left_s(self, instance_id: str, now_s: float) -> float:
        """Return how much of an instance's lease is left, s."""
        return max(0.0, self._heard_s[instance_id] + self._lease_s - now_s)

    def next_deadline_s(self) -> float | None:
        """Return when the next lease runs out; None if there is none."""
        while self._heap:
            noted_s, instance_id = self._heap[0]
            if self._noted_s.get(instance_id) != noted_s:
                heapq.heappop(self._heap)
            elif noted_s < self._heard_s[instance_id] + self._lease_s:
                heapq.heappop(self._heap)
                self._note(instance_id)
            else:
                return noted_s
        return None

    def expired(self, now_s: float) -> list[str]:
        """Return and forget the instances whose lease has run out, the longest silent first."""
        found = []
        while (deadline_s := self.next_deadline_s()) is not None and deadline_s <= now_s:
            _, instance_id = self._heap[0]
            self.end(instance_id)
            found.append(instance_id)
        return found

    def validate(self) -> None:
        """Check the invariants."""
        assert self._noted_s.keys() == self._heard_s.keys()
        assert {(noted_s, instance_id) for instance_id, noted_s in self._noted_s.items()} <= set(self._heap)

    def _note(self, instance_id: str) -> None:
        deadline_s = self._heard_s[instance_id] + self._lease_s
        self._noted_s[instance_id] = deadline_s
        heapq.heappush(self._heap, (deadline_s, instance_id))
