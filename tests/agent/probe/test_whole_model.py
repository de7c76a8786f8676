"""Marks around a whole model, with stand-ins for it and for autograd; tests/frameworks uses the real ones."""

import copy
import gc
import pickle
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from perseus import solver
from perseus.agent.link.computation import Kind
from perseus.agent.probe.attachment import MAX_UNMARKED_STEPS
from perseus.agent.probe.whole_model import MarkedModel, TorchParts, is_marked
from tests.agent.marks_stub import MarksStub, attached, iteration_of


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
        self.is_running = False

    def call_back(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def backward(self, *outputs: Tensor, recompute: Callable[[], object] = lambda: None) -> None:
        self.is_running = True
        for output in outputs:
            for hook in output.hooks:
                assert hook("gradient") is None
            recompute()
        self.is_running = False
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback()


class Model:
    """Returns a tensor, and something that needs no gradient."""

    training = gives_loss = True

    def __call__(self, value: object) -> dict[str, Any]:
        return {
            "loss": Tensor(requires_grad=self.gives_loss),
            "mask": Tensor(requires_grad=False),
            "value": value,
        }


class Optimizer:
    """Calls its hooks after a step."""

    def __init__(self) -> None:
        self.hooks: list[Callable[..., None]] = []

    def register_step_post_hook(self, hook: Callable[..., None]) -> Any:
        self.hooks.append(hook)
        return SimpleNamespace(remove=self.hooks.clear)

    def step(self) -> None:
        for hook in self.hooks:
            hook(self, (), {})


class Training:
    """An attached model, and its training loop."""

    def __init__(self) -> None:
        self.marks, self.engine = MarksStub(), Engine()
        self.model, self.optimizer = Model(), Optimizer()
        self.is_grad_enabled, self.is_compiling, self.is_checkpointing = True, False, False
        self.attachment = attached(self.marks, 4)
        self.parts = TorchParts(
            is_compiling=lambda: self.is_compiling,
            is_grad_enabled=lambda: self.is_grad_enabled,
            is_in_backward=lambda: self.engine.is_running,
            is_checkpointing=lambda: self.is_checkpointing,
            leaves=lambda value: value.values() if isinstance(value, dict) else [value],
            when_backward_is_done=self.engine.call_back,
        )
        self.marked = MarkedModel(self.attachment, self.parts)
        self.marked.mark(self.model, self.optimizer)

    def step(self) -> None:
        self.optimizer.step()
        self.attachment.note_step(id(self.optimizer), self.marked.why_unmarked)


F, B = Kind.FORWARD, Kind.BACKWARD


@pytest.fixture
def training() -> Training:
    return Training()


def test_accumulated_microbatches_up_to_the_optimizers_step_are_an_iteration(training: Training) -> None:
    for _ in range(2):
        for value in ("first", "second"):
            output = training.model(value)
            assert output["value"] == value
            # A call within the backward belongs to it, as by a checkpoint that is not reentrant.
            training.engine.backward(output["loss"], recompute=partial(training.model, value))
        training.optimizer.step()
    iteration = iteration_of((F, 0), (B, 0), (F, 1), (B, 1))
    assert training.marks.calls == [*iteration, ("register",), *iteration]


def test_the_elements_of_the_inputs_are_an_iterations_work(training: Training) -> None:
    ids, mask = SimpleNamespace(numel=lambda: 8 * 512), SimpleNamespace(numel=lambda: 8)
    for value in ({"ids": ids, "mask": mask, "name": "first"}, ids):
        training.model(value)
    assert training.marks.work == 2 * 8 * 512 + 8
    training.engine.is_running = True
    training.model(ids)
    assert training.marks.work == 2 * 8 * 512 + 8, "a call within a backward does no more work"


def test_a_loss_of_two_forwards_and_a_second_backward_are_marked_as_they_come(training: Training) -> None:
    """As a GAN and a gradient penalty have them; the solver takes such an order of one stage."""
    losses = [training.model("x")["loss"] for _ in range(2)]
    training.engine.backward(*reversed(losses))
    training.engine.backward(losses[1])
    training.engine.backward(training.model("x")["loss"])
    training.optimizer.step()
    executed = [(F, 0), (F, 1), (B, 1), (B, 2), (F, 3), (B, 3)]
    assert training.marks.calls[:-1] == iteration_of(*executed)
    solver.Schedule((tuple(solver.Computation(0, solver.Kind[kind.name], each) for kind, each in executed),))


def test_calls_outside_of_training_are_not_marked(training: Training) -> None:
    training.is_grad_enabled = False
    training.model("x")
    training.is_grad_enabled = True
    training.model.training = False
    training.engine.backward(training.model("x")["loss"])
    training.model.training = training.is_compiling = True
    training.engine.backward(training.model("x")["loss"])
    training.optimizer.step()
    assert training.marks.calls == []


def test_a_function_that_calls_the_model_is_marked_in_its_stead(training: Training) -> None:
    training.attachment.detach()
    training.marks.calls.clear()

    class Strategy:
        def training_step(self, value: str) -> dict[str, Any]:
            assert not training.model.training
            return training.model(value)

    strategy = Strategy()
    training.model.training = False  # whatever the model's mode is
    attachment = attached(training.marks, 4)
    MarkedModel(attachment, training.parts).mark_function(strategy, "training_step", training.optimizer)
    output = strategy.training_step("x")
    training.engine.backward(output["loss"])
    training.optimizer.step()
    assert output["value"] == "x"
    assert training.marks.calls[:-1] == iteration_of((F, 0), (B, 0))
    attachment.detach()
    assert vars(strategy) == {}
    assert training.optimizer.hooks == []


@pytest.mark.parametrize("is_summed", [False, True])
def test_a_reentrant_checkpoint_of_the_whole_model_is_marked(training: Training, is_summed: bool) -> None:
    losses = []
    for value in ("first", "second"):
        training.is_checkpointing, training.is_grad_enabled = True, False
        training.model.gives_loss = False
        training.model(value)
        training.is_checkpointing, training.is_grad_enabled = False, True
        training.model.gives_loss = True
        losses.append(Tensor())
        if not is_summed:
            training.engine.backward(losses.pop(), recompute=partial(training.model, value))
    training.engine.backward(*losses, recompute=partial(training.model, "again"))
    training.optimizer.step()
    computed = [(F, 0), (F, 1), (B, 1)] if is_summed else [(F, 0), (B, 0), (F, 1), (B, 1)]
    assert training.marks.calls[:-1] == iteration_of(*computed)


@pytest.mark.parametrize(
    ("is_training", "is_grad_enabled", "cause"),
    [
        # An evaluation is no sign of a mistake.
        (False, False, "the attached model is not called: attach the object that the training loop calls"),
        (False, True, "the attached model is in eval()"),
        (True, False, "the attached model is called without gradients"),
    ],
)
def test_steps_without_an_iteration_are_reported_once_with_the_cause(
    training: Training,
    caplog: pytest.LogCaptureFixture,
    is_training: bool,
    is_grad_enabled: bool,
    cause: str,
) -> None:
    training.engine.backward(training.model("x")["loss"])
    training.step()
    training.marks.calls.clear()
    training.model.training, training.is_grad_enabled = is_training, is_grad_enabled

    def steps(count: int) -> None:
        for _ in range(count):
            training.model("x")
            training.step()

    steps(MAX_UNMARKED_STEPS - 2)
    assert training.marks.calls == []
    steps(MAX_UNMARKED_STEPS)
    message = f"{MAX_UNMARKED_STEPS} optimizer steps without a marked iteration: {cause}"
    (reported,) = training.marks.calls
    assert reported[0] == "unmarked"
    assert reported[1].startswith(message)
    (logged,) = caplog.messages
    assert logged.startswith(f"not marked, training continues at stock clocks: {message}")


def test_another_optimizer_that_steps_is_reported(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(MAX_UNMARKED_STEPS):
        training.model("x")
        training.attachment.note_step(1, training.marked.why_unmarked)
    assert "the attached optimizer does not step: attach the one" in caplog.text


def test_many_optimizers_that_step_in_marked_iterations_are_not_reported(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        training.model("x")
        training.optimizer.step()
        for optimizer in range(2 * MAX_UNMARKED_STEPS):
            training.attachment.note_step(optimizer, training.marked.why_unmarked)
    assert caplog.messages == []


def test_a_model_that_is_deleted_within_an_optimizers_step_leaves_hooks_alone(training: Training) -> None:
    training.attachment.end_with(training.model, may_end=lambda: False)
    del training.model
    gc.collect()
    assert training.marks.calls == []
    training.optimizer.step()


def test_a_marked_model_is_known_until_it_is_detached(training: Training) -> None:
    assert is_marked(training.model)
    copies = copy.copy(training.model), pickle.loads(pickle.dumps(training.model)), type(training.model)()
    assert [type(each) for each in copies] == 3 * [Model]
    training.attachment.detach()
    assert not is_marked(training.model)
    assert type(training.model) is Model
