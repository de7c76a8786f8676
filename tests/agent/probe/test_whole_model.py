"""Marks around a whole model, with stand-ins for it and for autograd; tests/frameworks uses the real ones."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from perseus.agent.link.computation import Kind
from perseus.agent.probe.attachment import Attachment
from perseus.agent.probe.exchange import LocalExchange
from perseus.agent.probe.placement import Placement
from perseus.agent.probe.whole_model import MarkedModel, TorchParts
from tests.agent.marks_stub import MarksStub


class Tensor:
    """Calls its hooks when a gradient comes."""

    def __init__(self, *, requires_grad: bool = True) -> None:
        self.requires_grad = requires_grad
        self.hooks: list[Callable[[object], None]] = []

    def register_hook(self, hook: Callable[[object], None]) -> None:
        assert self.requires_grad
        self.hooks.append(hook)


class Engine:
    """Autograd: gradients reach some tensors, and then it calls back, in order."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []

    def call_back(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def backward(self, *outputs: Tensor) -> None:
        for output in outputs:
            for hook in output.hooks:
                assert hook("gradient") is None
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback()


class Model:
    """Returns a tensor, and something that needs no gradient."""

    training = True

    def __call__(self, value: str) -> dict[str, Any]:
        return {"loss": Tensor(), "mask": Tensor(requires_grad=False), "value": value}


class Handle:
    """Of a hook."""

    def __init__(self, hooks: list[Any]) -> None:
        self._hooks = hooks

    def remove(self) -> None:
        self._hooks.clear()


class Optimizer:
    """Calls its hooks after a step."""

    def __init__(self) -> None:
        self.hooks: list[Callable[..., None]] = []

    def register_step_post_hook(self, hook: Callable[..., None]) -> Handle:
        self.hooks.append(hook)
        return Handle(self.hooks)

    def step(self) -> None:
        for hook in self.hooks:
            hook(self, (), {})


class Training:
    """An attached model, and its training loop."""

    def __init__(self) -> None:
        self.marks, self.engine = MarksStub(), Engine()
        self.model, self.optimizer = Model(), Optimizer()
        self.is_grad_enabled, self.is_compiling = True, False
        self.attachment = Attachment(Placement(0, 4, 0, 1), self.marks, LocalExchange())
        parts = TorchParts(
            lambda: self.is_compiling,
            lambda: self.is_grad_enabled,
            lambda result: result.values(),
            self.engine.call_back,
        )
        MarkedModel(self.attachment, parts).mark(self.model, self.optimizer)


def begin_and_end(kind: Kind, microbatch: int) -> list[tuple[Any, ...]]:
    return [("begin", kind, microbatch, 0), ("end", kind, microbatch, 0)]


F, B = Kind.FORWARD, Kind.BACKWARD


@pytest.fixture
def training() -> Training:
    return Training()


def test_accumulated_microbatches_up_to_the_optimizers_step_are_an_iteration(training: Training) -> None:
    for _ in range(2):
        for value in ("first", "second"):
            output = training.model(value)
            assert output["value"] == value
            training.engine.backward(output["loss"])
        training.optimizer.step()
    computed = [*begin_and_end(F, 0), *begin_and_end(B, 0), *begin_and_end(F, 1), *begin_and_end(B, 1)]
    iteration = [("begin_iteration",), *computed, ("end_iteration",)]
    assert training.marks.calls == [*iteration, ("register",), *iteration]


def test_a_loss_of_two_forwards_is_one_backward(training: Training) -> None:
    losses = [training.model("x")["loss"] for _ in range(2)]
    training.engine.backward(*reversed(losses))
    training.optimizer.step()
    computed = [*begin_and_end(F, 0), *begin_and_end(F, 1), *begin_and_end(B, 1)]
    assert training.marks.calls[1:-2] == computed


def test_calls_outside_of_training_are_not_marked(training: Training) -> None:
    training.is_grad_enabled = False
    training.model("x")
    training.is_grad_enabled = True
    training.model.training = False
    training.engine.backward(training.model("x")["loss"])
    training.optimizer.step()
    assert training.marks.calls == []


def test_copies_and_pickles_have_the_original_class(training: Training) -> None:
    assert vars(training.model) == {}
    copies = [
        copy.copy(training.model),
        copy.deepcopy(training.model),
        pickle.loads(pickle.dumps(training.model)),
        training.model.__class__(),
    ]
    assert [type(each) for each in copies] == 4 * [Model]


def test_a_call_that_is_being_compiled_is_the_original_one(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    training.is_compiling = True
    for _ in range(2):
        training.engine.backward(training.model("x")["loss"])
        training.optimizer.step()
    assert training.marks.calls == []
    (message,) = caplog.messages
    assert "the optimizer steps, but the attached Model was not called" in message


def test_detaching_leaves_the_model_and_the_optimizer_as_they_were(training: Training) -> None:
    output = training.model("x")
    training.attachment.detach()
    assert type(training.model) is Model
    assert training.optimizer.hooks == []
    calls = [*training.marks.calls]
    training.engine.backward(output["loss"])
    training.optimizer.step()
    assert training.marks.calls == calls
