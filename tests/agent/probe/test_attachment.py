"""The hooks' common part: an attached rank's marks, and that no failure of ours raises into training."""

import copy
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from perseus.agent.link.computation import Kind
from perseus.agent.probe.attachment import Attachment, never_raises
from perseus.agent.probe.marks import UnmarkableError
from tests.agent.marks_stub import ALONE, OTHER, MarksStub, beside, iteration_of, train


@pytest.mark.parametrize("failing", ["begin_iteration", "end_iteration", "begin", "end", "register"])
def test_nothing_of_ours_raises_into_training(
    marks: MarksStub, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    exchange = beside(OTHER)
    marks.failing = failing
    attachment = Attachment(ALONE, marks, exchange)
    for _ in range(3):
        train(attachment)
    attachment.detach()
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
    assert marks.calls[-1] == ("close",), "the agent considers the rank gone"
    (own, _) = exchange.poll("first", 2)
    assert own is not None
    assert own.lost == (f"{failing} fails" if failing != "register" else ""), "the other stages are notified"


def test_a_marked_function_keeps_its_arguments_result_and_exceptions(marks: MarksStub) -> None:
    def compute(microbatch: int, *rest: str, scale: float = 1.0) -> tuple[object, ...]:
        if scale < 0:
            raise ValueError("scale")
        return microbatch, rest, scale

    noted: list[tuple[object, ...]] = []
    attachment = Attachment(ALONE, marks, beside(OTHER))
    marked = attachment.marked(
        compute, lambda args, _kwargs: (Kind.FORWARD, args[0], 1), lambda *reported: noted.append(reported)
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


def test_an_iteration_that_fails_is_not_ended_and_the_next_one_is_whole(marks: MarksStub) -> None:
    def run_out() -> None:
        raise RuntimeError("out of memory")

    attachment = Attachment(ALONE, marks, beside(OTHER))
    with pytest.raises(RuntimeError, match="out of memory"):
        attachment.marked_iteration(run_out, lambda: True)()
    assert marks.calls == [("begin_iteration",)]
    train(attachment)
    assert marks.calls[1:] == [*iteration_of((Kind.FORWARD, 0), (Kind.BACKWARD, 0)), ("register",)]


@pytest.mark.parametrize("failing", ["identify", "note", "is_training"])
def test_a_failing_question_is_logged_once_and_ends_marking(
    marks: MarksStub, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    """Fails as with an unknown version of a framework."""

    def answer(name: str, value: object) -> Any:
        if name == failing:
            raise AttributeError(f"no {name}")
        return value

    exchange = beside(OTHER)
    attachment = Attachment(ALONE, marks, exchange)
    compute = attachment.marked(
        lambda: "output", lambda *_: answer("identify", (Kind.FORWARD, 0, 0)), lambda *_: answer("note", None)
    )
    iterate = attachment.marked_iteration(lambda: [compute(), compute()], lambda: answer("is_training", True))
    for _ in range(3):
        assert iterate() == ["output", "output"]
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"no longer marked, training continues at stock clocks: no {failing}" in record.getMessage()
    assert marks.calls[-1] == ("close",), "the agent brings the GPU back to stock"
    (own, _) = exchange.poll("first", 2)
    assert own is not None
    assert own.lost == f"no {failing}", "the other stages are notified"


@pytest.mark.parametrize("leave", [lambda: None, lambda: failed()])
def test_leaving_never_raises(
    marks: MarksStub, caplog: pytest.LogCaptureFixture, leave: Callable[[], None]
) -> None:
    marks.failing = "close"
    with suppress(OSError), Attachment(ALONE, marks, beside(OTHER)):
        leave()
    assert caplog.messages == []


def failed() -> None:
    raise OSError("disk full")


def test_an_iteration_that_is_captured_whole_ends_marking_and_is_logged_once(
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
    assert record.getMessage() == "no longer marked, training continues at stock clocks: captured whole"
    assert record.exc_info is None


def test_marks_are_put_completely_or_not_at_all(marks: MarksStub, caplog: pytest.LogCaptureFixture) -> None:
    framework = SimpleNamespace(step="framework's")
    attachment = Attachment(ALONE, marks, beside(OTHER))

    def put() -> None:
        attachment.replace(framework, "step", "ours")
        raise AttributeError("no forward_one_chunk")

    assert attachment.put_marks(put) is attachment
    assert framework.step == "framework's"
    assert marks.calls == [("close",)]
    assert "training continues at stock clocks: no forward_one_chunk" in caplog.text


def test_training_continues_if_a_hook_fails_and_mistakes_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def attach(failure: Exception, *, job_id: str, max_slowdown_percent: float = 0.0) -> Attachment:
        raise failure

    attached = never_raises(attach)
    with attached(AttributeError("no parallel_state"), job_id="GPT-3") as attachment:
        train(attachment)
    (record,) = caplog.records
    assert record.getMessage() == "not attached, training continues at stock clocks: no parallel_state"
    with pytest.raises(ValueError, match="no pipeline"):
        attached(ValueError("no pipeline"), job_id="GPT-3")
    with pytest.raises(TypeError, match="job_id"):
        attached(OSError())  # type: ignore[call-arg]
    job_ids: list[Any] = ["", "GPT 3", "-gpt", "x" * 64, 3]
    for job_id in job_ids:
        with pytest.raises(ValueError, match=r"job_id: expected 1 to 63 of a–z, A–Z, .*, found "):
            attached(OSError(), job_id=job_id)
    percents: list[Any] = [-1.0, math.nan, math.inf, 101, True, "5"]
    for percent in percents:
        with pytest.raises(ValueError, match="max_slowdown_percent: expected 0 to 100, found "):
            attached(OSError(), job_id="GPT-3", max_slowdown_percent=percent)


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
    train(copy.deepcopy(attachment))  # as a part of what holds it
    assert marks.calls == []
    attachment.detach()
    assert (framework.step(), module.forward, module.kept) == ("framework's", "module's", "somebody else's")
    assert not vars(framework)
    assert marks.calls == [("finish",), ("close",)]
    train(attachment)
    assert marks.calls == [("finish",), ("close",)]


def test_as_a_context_it_finishes_only_without_a_failure(marks: MarksStub) -> None:
    with Attachment(ALONE, marks, beside(OTHER)):
        pass
    assert marks.calls == [("finish",), ("close",)]
    failing = MarksStub()
    with pytest.raises(OSError, match="disk full"), Attachment(ALONE, failing, beside(OTHER)):
        raise OSError("disk full")
    assert failing.calls == [("close",)]
