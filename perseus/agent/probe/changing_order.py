"""Compares a stage's executed order with the registered one, and detects when another order is stable. Pure.

    as registered       nothing to do; earlier differences are forgotten
    otherwise           reported once for each order; stable after `STABLE_AFTER` equal iterations in a row

An order that was registered before needs twice as many each time, so that an alternating job does not
register forever.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from perseus.agent.link.computation import Computation, Kind

STABLE_AFTER = 5
"""Iterations in a row after which another order counts as stable."""

_MAX_REPORTED = 8


@dataclass(frozen=True, slots=True)
class Change:
    """A differing iteration. `is_new`: not reported before. `is_stable`: its order is to be registered."""

    executed: tuple[Computation, ...]
    is_new: bool
    is_stable: bool


class ChangingOrder:
    """One stage's executed order, computation by computation. `registered`: the initial order."""

    def __init__(self, registered: Sequence[Computation]) -> None:
        self.registered = tuple(registered)
        self._expected = _keys(self.registered)
        self._position = 0
        # Executed computations, from the first difference on.
        self._others: list[tuple[Kind, int, int]] = []
        self._latest: tuple[Computation, ...] | None = None
        self._repeat_count = 0
        self._reported: list[tuple[Computation, ...]] = []
        self._registered_counts = {self.registered: 1}

    def begin_iteration(self) -> None:
        """Begin the next iteration."""
        self._position = 0
        self._others.clear()

    def begin(self, kind: Kind, microbatch: int, chunk: int) -> None:
        """Record the begin of a computation."""
        computation = kind, microbatch, chunk
        position = self._position
        if not self._others and position < len(self._expected) and self._expected[position] == computation:
            self._position = position + 1
        else:
            self._others.append(computation)

    def end_iteration(self) -> Change | None:
        """End the iteration; return None if it was as registered."""
        if not self._others and self._position == len(self._expected):
            self._latest = None
            return None
        others = (Computation(*each) for each in self._others)
        executed = (*self.registered[: self._position], *others)
        self._repeat_count = self._repeat_count + 1 if executed == self._latest else 1
        self._latest = executed
        is_new = executed not in self._reported and len(self._reported) < _MAX_REPORTED
        if is_new:
            self._reported.append(executed)
        needed_count = STABLE_AFTER * 2 ** self._registered_counts.get(executed, 0)
        return Change(executed, is_new, self._repeat_count == needed_count)

    def register(self, executed: tuple[Computation, ...]) -> None:
        """Set the registered order."""
        self.registered = executed
        self._expected = _keys(executed)
        self._latest = None
        self._registered_counts[executed] = self._registered_counts.get(executed, 0) + 1


def describe_change(registered: Sequence[Computation], executed: Sequence[Computation]) -> str:
    """Describe the change, for part of a sentence."""
    counts = [(len({each.microbatch for each in order}), len(order)) for order in (executed, registered)]
    (microbatches, computations), (microbatches_before, before) = counts
    return (
        f"{microbatches} microbatches ({computations} computations) instead of "
        f"{microbatches_before} ({before})"
    )


def _keys(order: Sequence[Computation]) -> tuple[tuple[Kind, int, int], ...]:
    return tuple((c.kind, c.microbatch, c.chunk) for c in order)
