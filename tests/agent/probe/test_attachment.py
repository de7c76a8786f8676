"""What the hooks share: an attached rank's marks, and that nothing of ours raises into training."""

import logging
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from perseus.agent.link.computation import Kind
from perseus.agent.probe.attachment import Attachment
from perseus.agent.probe.exchange import ExecutedOrder
from perseus.agent.probe.marks import UnmarkableError
from tests.agent.marks_stub import MarksStub
from tests.agent.probe.attached import ALONE, ORDER, OTHER, beside, train


def test_computations_outside_of_iterations_are_not_marked(marks: MarksStub) -> None:
    attachment = Attachment(ALONE, marks, beside(OTHER))
    attachment.begin(Kind.FORWARD, 0)
    attachment.end(Kind.FORWARD, 0)
    assert not marks.calls


@pytest.mark.parametrize("failing", ["begin_iteration", "end_iteration", "begin", "end", "register"])
def test_nothing_of_ours_raises_into_training(
    marks: MarksStub, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    gathered: list[ExecutedOrder] = []

    def gather(order: ExecutedOrder) -> list[ExecutedOrder]:
        gathered.append(order)
        return [order, OTHER]

    marks.failing = failing
    attachment = Attachment(ALONE, marks, gather)
    for _ in range(3):
        train(attachment)
    attachment.detach()
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
    assert marks.calls[-1] == ("close",), "the agent takes the rank for gone"
    assert [each.computations for each in gathered] == [ORDER], "the other stages wait for it"


def test_what_is_marked_is_called_as_it_was_and_returns_and_raises_what_it_did(marks: MarksStub) -> None:
    def compute(microbatch: int, *rest: str, scale: float = 1.0) -> tuple[object, ...]:
        if scale < 0:
            raise ValueError("scale")
        return microbatch, rest, scale

    noted: list[tuple[object, ...]] = []
    attachment = Attachment(ALONE, marks, beside(OTHER))
    marked = attachment.marked(
        compute, lambda args, _kwargs: (Kind.FORWARD, args[0], 1), lambda *told: noted.append(told)
    )
    attachment.begin_iteration()
    assert marked(3, "a", "b", scale=2.0) == (3, ("a", "b"), 2.0)
    with pytest.raises(ValueError, match="scale"):
        marked(4, scale=-1.0)
    assert marks.calls[1:] == [
        ("begin", Kind.FORWARD, 3, 1),
        ("end", Kind.FORWARD, 3, 1),
        ("begin", Kind.FORWARD, 4, 1),
    ]
    assert noted == [((Kind.FORWARD, 3, 1), (3, ("a", "b"), 2.0))]
    assert marked.__name__ == "compute"


@pytest.mark.parametrize("failing", ["identify", "note", "is_training"])
def test_a_question_that_fails_is_told_of_once_and_ends_marking(
    marks: MarksStub, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    """As with a framework that is not as known."""

    def answer(name: str, value: object) -> Any:
        if name == failing:
            raise AttributeError(f"no {name}")
        return value

    gathered: list[ExecutedOrder] = []

    def gather(order: ExecutedOrder) -> list[ExecutedOrder]:
        gathered.append(order)
        return [order, OTHER]

    attachment = Attachment(ALONE, marks, gather)
    compute = attachment.marked(
        lambda: "output", lambda *_: answer("identify", (Kind.FORWARD, 0, 0)), lambda *_: answer("note", None)
    )
    iterate = attachment.marked_iteration(lambda: [compute(), compute()], lambda: answer("is_training", True))
    for _ in range(3):
        assert iterate() == ["output", "output"]
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"not marked any more, training goes on at stock clocks: no {failing}" in record.getMessage()
    assert marks.calls[-1] == ("close",), "the agent brings the GPU back to stock"
    if failing != "is_training":
        assert [each.computations for each in gathered] == [()], "the others learn of it"


@pytest.mark.parametrize("leave", [lambda: None, lambda: failed()])
def test_leaving_never_raises(
    marks: MarksStub, caplog: pytest.LogCaptureFixture, leave: Callable[[], None]
) -> None:
    marks.failing = "close"
    with suppress(OSError), Attachment(ALONE, marks, beside(OTHER)):
        leave()
    assert caplog.messages == ["leaving the agent: close fails"]


def failed() -> None:
    raise OSError("disk full")


def test_an_iteration_that_is_captured_whole_ends_marking_and_is_told_of_once(
    marks: MarksStub, caplog: pytest.LogCaptureFixture
) -> None:
    attachment = Attachment(ALONE, marks, beside(OTHER))
    train(attachment)
    marks.calls.clear()
    marks.failing, marks.failure = "begin_iteration", UnmarkableError("captured whole")
    for _ in range(3):
        train(attachment)
    assert marks.calls == [("close",)], "the agent brings the GPU back to stock"
    (record,) = caplog.records
    assert record.getMessage() == "not marked any more, training goes on at stock clocks: captured whole"
    assert record.exc_info is None


@pytest.mark.parametrize("has_agent", [True, False])
def test_no_collective_goes_into_a_graph(marks: MarksStub, has_agent: bool) -> None:
    is_captured = True
    gathered: list[ExecutedOrder] = []

    def gather(order: ExecutedOrder) -> list[ExecutedOrder]:
        assert not is_captured, "a collective of the host can't be captured"
        gathered.append(order)
        return [order, OTHER]

    attachment = Attachment(ALONE, marks, gather, is_capturing=lambda: is_captured)
    if has_agent:
        marks.failing, marks.failure = "begin_iteration", UnmarkableError("captured whole")
    train(attachment)
    assert not gathered
    is_captured = False
    train(attachment)
    assert [each.computations for each in gathered] == [ORDER], "the other stages wait for it"


def test_detaching_restores_what_was_replaced(marks: MarksStub) -> None:
    class Framework:
        def step(self) -> str:
            return "framework's"

    framework, module = Framework(), SimpleNamespace(forward="module's", kept="mine")
    attachment = Attachment(ALONE, marks, beside(OTHER))
    attachment.replace(framework, "step", lambda: "ours")
    attachment.replace(module, "forward", "ours")
    attachment.replace(module, "forward", "ours, twice")
    attachment.replace(module, "kept", "ours")
    module.kept = "somebody else's"
    assert (framework.step(), module.forward) == ("ours", "ours, twice")
    attachment.detach()
    assert (framework.step(), module.forward, module.kept) == ("framework's", "module's", "somebody else's")
    assert not vars(framework)
    assert marks.calls == [("finish",), ("close",)]
    train(attachment)
    assert marks.calls == [("finish",), ("close",)]


def test_as_a_context_it_finishes_only_what_did_not_fail(marks: MarksStub) -> None:
    with Attachment(ALONE, marks, beside(OTHER)):
        pass
    assert marks.calls == [("finish",), ("close",)]
    failing = MarksStub()
    with pytest.raises(OSError, match="disk full"), Attachment(ALONE, failing, beside(OTHER)):
        raise OSError("disk full")
    assert failing.calls == [("close",)]


def test_it_needs_the_standard_library_only() -> None:
    script = (
        "import sys; import perseus.agent.probe.attachment; "
        "print(*{name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names)"
    )
    result = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True)
    # `-I` still runs site's .pth hooks, whose names are not ours.
    imported = {name for name in result.stdout.split() if "editable" not in name and name != "__main__"}
    assert imported - {"perseus", "sitecustomize", "_distutils_hack"} <= set(), imported
