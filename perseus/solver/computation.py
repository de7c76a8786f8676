"""The unit of planning: one piece of work of one stage on one microbatch."""

import enum
import functools
from dataclasses import dataclass


@functools.total_ordering
class Kind(enum.Enum):
    """What a computation does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward-input"
    BACKWARD_WEIGHT = "backward-weight"
    RECOMPUTATION = "recomputation"
    FIXED = "fixed"
    """Takes the same time whatever the clock (data loading, optimizer step); it gets no clock of its own."""

    # Members are single: what tells them apart is enough, and an enumeration's own hash is ten times as dear.
    __hash__ = object.__hash__

    def __lt__(self, other: "Kind") -> bool:
        return _RANK[self] < _RANK[other]


_RANK = {kind: rank for rank, kind in enumerate(Kind)}


@dataclass(frozen=True, slots=True, order=True)
class Computation:
    """One computation of an iteration; its four coordinates are its identity.

    ``chunk`` tells a stage's model chunks (virtual stages) apart. Several FIXED computations of a stage are
    told apart by ``microbatch`` and ``chunk``, which mean nothing else there.
    """

    stage: int
    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f" chunk {self.chunk}" if self.chunk else ""
        return f"stage {self.stage}{chunk} {self.kind.value} of microbatch {self.microbatch}"
