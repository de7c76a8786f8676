"""A stand-in for a probe in tests of attachments and hooks, and a training loop without a framework."""

from collections.abc import Sequence
from typing import Any

from perseus.agent.link.computation import Computation, Kind
from perseus.agent.probe.attachment import Attachment
from perseus.agent.probe.exchange import ExecutedOrder, LocalExchange
from perseus.agent.probe.placement import Placement


def _noting(name: str) -> Any:
    """Return a method that records its call under a name."""

    def note(self: "MarksStub", *arguments: Any) -> None:
        self.note(name, *arguments)

    return note


class MarksStub:
    """Records all calls; raises `failure`, if any, at the method `failing`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.registered: list[dict[str, Any]] = []
        self.failing = ""
        self.failure: Exception | None = None
        self.work = 0

    begin_iteration = _noting("begin_iteration")
    end_iteration = _noting("end_iteration")
    begin_computation = _noting("begin")
    end_computation = _noting("end")
    begin_wait = _noting("begin_wait")
    end_wait = _noting("end_wait")
    report_unmarked = _noting("unmarked")
    finish = _noting("finish")
    close = _noting("close")

    def register(self, **arguments: Any) -> bool:
        self.note("register")
        self.registered.append(arguments)
        return True

    def count_work(self, elements: int) -> None:
        self.work += elements

    def note(self, name: str, *arguments: Any) -> None:
        if name == self.failing:
            raise self.failure or RuntimeError(f"{name} fails")
        self.calls.append((name, *arguments))


class Tensor:
    """Something with so many elements."""

    def __init__(self, elements: int) -> None:
        self._elements = elements

    def numel(self) -> int:
        return self._elements


def attached(marks: MarksStub, pipeline_count: int = 1, **more: Any) -> Attachment:
    """Return the attachment of a rank that is a pipeline by itself."""
    return Attachment(Placement(0, pipeline_count, 0, 1), marks, LocalExchange(), **more)


def iteration_of(*computations: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the marks of an iteration of computations, each a kind, a microbatch and a chunk, or 0."""
    marks: list[tuple[Any, ...]] = [("begin_iteration",)]
    for kind, microbatch, *chunk in computations:
        marks += [(edge, kind, microbatch, *(chunk or [0])) for edge in ("begin", "end")]
    return [*marks, ("end_iteration",)]


ALONE = Placement(pipeline=0, pipeline_count=3, stage=0, stage_count=2, tensor=0, tensor_count=4)
ORDER = (Computation(Kind.FORWARD, 0), Computation(Kind.BACKWARD, 0))
OTHER = ExecutedOrder(1, ORDER)


def beside(*others: ExecutedOrder) -> LocalExchange:
    """An exchange with other stages, which have posted their orders."""
    exchange = LocalExchange()
    for other in others:
        exchange.post("first", other)
    return exchange


def train(attachment: Attachment, order: Sequence[Computation] = ORDER) -> None:
    attachment.begin_iteration()
    for each in order:
        attachment.begin(each.kind, each.microbatch, each.chunk)
        attachment.end(each.kind, each.microbatch, each.chunk)
    attachment.end_iteration()
