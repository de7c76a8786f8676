"""The unit of planning: one piece of work of one stage on one microbatch."""

import enum
import functools
from dataclasses import dataclass


@functools.total_ordering
class Kind(enum.Enum):
    """The kind of a computation."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward-input"
    BACKWARD_WEIGHT = "backward-weight"
    RECOMPUTATION = "recomputation"
    FIXED = "fixed"
    """Takes the same time at any clock (data loading, optimizer step); it gets no clock of its own."""

    # Members are singletons, so identity suffices; an enumeration's own hash is ten times as slow.
    __hash__ = object.__hash__

    def __lt__(self, other: "Kind") -> bool:
        return _RANK[self] < _RANK[other]


_RANK = {kind: rank for rank, kind in enumerate(Kind)}


@dataclass(frozen=True, slots=True, order=True)
class Computation:
    """One computation of an iteration; its four coordinates are its identity.

    ``chunk`` distinguishes a stage's model chunks (virtual stages). For FIXED computations, ``microbatch``
    and ``chunk`` only distinguish those of a stage and have no other meaning.
    """

    stage: int
    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f" chunk {self.chunk}" if self.chunk else ""
        return f"stage {self.stage}{chunk} {self.kind.value} of microbatch {self.microbatch}"
