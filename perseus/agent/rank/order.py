"""A rank's registered order, for which plans are made and with which marks are compared. Pure."""

from collections.abc import Sequence

from perseus.agent.link.computation import Computation


class Order:
    """One iteration's computations, as registered.

    Attributes:
        computations: in execution order.
        begins_alone: whether the first is the only one of its kind and chunk in the iteration.
    """

    def __init__(self, computations: tuple[Computation, ...]) -> None:
        self.computations = computations
        self._positions = {computation: position for position, computation in enumerate(computations)}
        like_first = [
            each
            for each in computations
            if (each.kind, each.chunk) == (computations[0].kind, computations[0].chunk)
        ]
        self.begins_alone = len(like_first) == 1

    def __len__(self) -> int:
        """Return the number of computations."""
        return len(self.computations)

    def position(self, computation: Computation) -> int | None:
        """Return a computation's position, from 0; None if it is not in the order."""
        return self._positions.get(computation)

    def difference(self, found: Sequence[Computation]) -> str:
        """Describe the first difference of another order."""
        expected = self.computations
        if len(expected) != len(found):
            return f"expected the registered order of {len(expected)} computations, found {len(found)}"
        position = next(i for i, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1])
        return (
            f"computation {position}: expected {expected[position]}, as registered, found {found[position]}"
        )
