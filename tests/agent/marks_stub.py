"""A stand-in for a probe in tests of the frameworks' hooks."""

from typing import Any

from perseus.agent.link.computation import Kind
from perseus.agent.probe.attachment import Attachment
from perseus.agent.probe.exchange import LocalExchange
from perseus.agent.probe.placement import Placement


class MarksStub:
    """Records all calls; raises `failure`, if any, at the method `failing`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.registered: list[dict[str, Any]] = []
        self.failing = ""
        self.failure: Exception | None = None

    def register(self, **arguments: Any) -> bool:
        self._note("register")
        self.registered.append(arguments)
        return True

    def begin_iteration(self) -> None:
        self._note("begin_iteration")

    def end_iteration(self) -> None:
        self._note("end_iteration")

    def begin_computation(self, kind: Kind, microbatch: int, chunk: int) -> None:
        self._note("begin", kind, microbatch, chunk)

    def end_computation(self, kind: Kind, microbatch: int, chunk: int) -> None:
        self._note("end", kind, microbatch, chunk)

    def begin_wait(self) -> None:
        self._note("begin_wait")

    def end_wait(self) -> None:
        self._note("end_wait")

    def report_unmarked(self, message: str) -> None:
        self._note("unmarked", message)

    def finish(self) -> None:
        self._note("finish")

    def close(self) -> None:
        self._note("close")

    def _note(self, name: str, *arguments: Any) -> None:
        if name == self.failing:
            raise self.failure or RuntimeError(f"{name} fails")
        self.calls.append((name, *arguments))


def attached(marks: MarksStub, pipeline_count: int = 1, **more: Any) -> Attachment:
    """Return the attachment of a rank that is a pipeline by itself."""
    return Attachment(Placement(0, pipeline_count, 0, 1), marks, LocalExchange(), **more)


def iteration_of(*computations: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the marks of an iteration of computations, each a kind, a microbatch and a chunk, or 0."""
    marks: list[tuple[Any, ...]] = [("begin_iteration",)]
    for kind, microbatch, *chunk in computations:
        marks += [(edge, kind, microbatch, *(chunk or [0])) for edge in ("begin", "end")]
    return [*marks, ("end_iteration",)]
