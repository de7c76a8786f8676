"""The interface through which framework hooks send marks: a probe, or a wrapper around one."""

from collections.abc import Callable, Sequence
from typing import Protocol

from perseus.agent.link.computation import Computation, Kind
from perseus.agent.probe.job_spec import Path


class UnmarkableError(Exception):
    """Marks can't follow this training; the message has the reason."""


class Marks(Protocol):
    """The methods that an attachment needs of its probe or wrapper; they work as those of `Probe`."""

    def register(
        self,
        *,
        pipeline_count: int,
        stage_count: int,
        tensor_count: int,
        schedule: Sequence[Sequence[Computation]],
        paths: Sequence[Path],
        max_slowdown_percent: float,
        stage_work: Sequence[str],
        stage_layers: Sequence[Sequence[int]],
        waits: bool,
    ) -> bool:
        """Register the job."""

    def begin_iteration(self) -> None:
        """Mark the begin of an iteration. UnmarkableError ends all marking."""

    def end_iteration(self) -> None:
        """Mark the end of the iteration."""

    def begin_computation(self, kind: Kind, microbatch: int, chunk: int) -> None:
        """Mark the begin of a computation."""

    def end_computation(self, kind: Kind, microbatch: int, chunk: int) -> None:
        """Mark the end of the computation."""

    def count_work(self, elements: int) -> None:
        """Add to the work of the current iteration: the elements of a model's inputs."""

    def begin_wait(self) -> None:
        """Mark the begin of a wait for other ranks."""

    def end_wait(self) -> None:
        """Mark the end of the wait."""

    def report_unmarked(self, message: str) -> None:
        """Report that training goes on without marked iterations, and why."""

    def finish(self) -> None:
        """Report the end of training."""

    def close(self) -> None:
        """Close the connection."""


Connect = Callable[..., Marks]
"""`Probe.connect`, or another callable with its keyword arguments."""
