"""What marks are sent by, as the hooks into frameworks see it: a probe, or what stands before one."""

from collections.abc import Callable, Sequence
from typing import Protocol

from perseus.agent.link.computation import Computation, Kind
from perseus.agent.probe.job_spec import Path


class UnmarkableError(Exception):
    """What is trained can't be followed by marks, and why."""


class Marks(Protocol):
    """What an attachment needs of its probe, or of what stands before one."""

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
        waits: bool = True,
    ) -> bool:
        """See `Probe.register`."""

    def begin_iteration(self) -> None:
        """See `Probe.begin_iteration`. UnmarkableError ends all marking."""

    def end_iteration(self) -> None:
        """See `Probe.end_iteration`."""

    def begin_computation(self, kind: Kind, microbatch: int, chunk: int) -> None:
        """See `Probe.begin_computation`."""

    def end_computation(self, kind: Kind, microbatch: int, chunk: int) -> None:
        """See `Probe.end_computation`."""

    def begin_wait(self) -> None:
        """See `Probe.begin_wait`."""

    def end_wait(self) -> None:
        """See `Probe.end_wait`."""

    def finish(self) -> None:
        """See `Probe.finish`."""

    def close(self) -> None:
        """See `Probe.close`."""


Connect = Callable[..., Marks]
"""How marks are sent: `Probe.connect`, or what takes its keyword arguments."""
