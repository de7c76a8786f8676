"""A rank's registered order, which plans are made for and marks are held against. Pure."""

from collections.abc import Sequence

from perseus.agent.link.computation import Computation


class Order:
    """One iteration's computations, as registered.

    Attributes:
        computations: in the order in which they come.
        begins_alone: whether the first has no like, of its kind and chunk, in the iteration.
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
        """How many computations there are."""
        return len(self.computations)

    def position(self, computation: Computation) -> int | None:
        """Where a computation comes, from 0 on; None if it does not."""
        return self._positions.get(computation)

    def difference(self, found: Sequence[Computation]) -> str:
        """In what another order differs first."""
        expected = self.computations
        if len(expected) != len(found):
            return f"expected the registered order of {len(expected)} computations, found {len(found)}"
        position = next(i for i, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1])
        return (
            f"computation {position}: expected {expected[position]}, as registered, found {found[position]}"
        )
