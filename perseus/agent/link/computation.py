"""Computations of a stage as probe and agent name them. Standard library only: the probe needs them."""

from dataclasses import dataclass
from enum import IntEnum


class Kind(IntEnum):
    """The kind of a computation; the numbers are those of `perseus.v1.ComputationKind`."""

    FORWARD = 1
    BACKWARD = 2
    BACKWARD_INPUT = 3
    BACKWARD_WEIGHT = 4
    RECOMPUTATION = 5
    FIXED = 6


@dataclass(frozen=True, slots=True)
class Computation:
    """One computation of a stage, by identity: unique within the stage's order."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.name} {self.microbatch}.{self.chunk}"


@dataclass(frozen=True, slots=True)
class Rank:
    """One training process with one GPU: its job, and its place in the job. All counted from 0."""

    job_id: str
    pipeline: int
    stage: int
    tensor: int

    def __str__(self) -> str:
        return f"{self.job_id}[pipeline {self.pipeline}, stage {self.stage}, tensor {self.tensor}]"
