"""Messages that are made once of a value and sent to many: a plan's share goes to every pipeline.

They are found by the value's identity, so finding one costs the same whatever its size. The value is kept
with its message: no other can have its identity meanwhile.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from google.protobuf.message import Message

Value = TypeVar("Value")
Made = TypeVar("Made", bound=Message)


class Memo(Generic[Value, Made]):
    """The messages made last, of values that don't change. They are to be copied, not changed."""

    def __init__(self, make: Callable[[Value], Made], limit: int) -> None:
        """Keep `limit` of what is made by `make`."""
        self._make = make
        self._limit = limit
        self._made: dict[int, tuple[Value, Made]] = {}

    def of(self, value: Value) -> Made:
        """Return what was made of a value, made now if it is not kept."""
        found = self._made.get(id(value))
        if found is None:
            found = self._made[id(value)] = value, self._make(value)
            if len(self._made) > self._limit:
                del self._made[next(iter(self._made))]
        return found[1]
