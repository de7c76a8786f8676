"""Messages that are made once from a value and sent to many: all pipelines get the same share of a plan.

They are found by the value's identity, so the cost of a lookup doesn't depend on its size. The value is kept
with its message, so that its identity is not reused meanwhile.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")
Made = TypeVar("Made")


class Memo(Generic[Value, Made]):
    """The messages made last, from immutable values. Callers must copy them, not change them."""

    def __init__(self, make: Callable[[Value], Made], limit: int) -> None:
        """Keep the last `limit` messages that `make` made."""
        self._make = make
        self._limit = limit
        self._made: dict[int, tuple[Value, Made]] = {}

    def of(self, value: Value) -> Made:
        """Return the message of a value; make it if it is not kept."""
        found = self._made.get(id(value))
        if found is None:
            found = self._made[id(value)] = value, self._make(value)
            if len(self._made) > self._limit:
                del self._made[next(iter(self._made))]
        return found[1]
