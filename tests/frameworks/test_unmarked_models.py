"""A model that is trained in one process without `torch.distributed`; and what `attach_model` leaves behind.

Each training is compared with the same one without Perseus, bit for bit.
"""

import gc
import weakref
from collections.abc import Callable
from importlib.util import find_spec

import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed; `make test-frameworks` has it", allow_module_level=True)

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.checkpoint import checkpoint

from perseus.agent.link.computation import Kind
from perseus.agent.probe.attachment import MAX_UNMARKED_STEPS, Attachment
from perseus.agent.probe.device_marks import DeviceMarks
from perseus.agent.probe.marks import Marks
from perseus.agent.torch import attach_model
from tests.agent.marks_stub import MarksStub
from tests.agent.probe.test_device_marks import Device, ProbeStub

pytestmark = pytest.mark.slow("trains with torch")

F, B = Kind.FORWARD, Kind.BACKWARD

# Computes a microbatch's output by the model.
Call = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 1))


class Training:
    """A model's training of two microbatches an iteration, in one process."""

    def __init__(self, *, is_attached: bool = True, marks: Marks | None = None) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.marks = MarksStub()
        self.connected = marks or self.marks
        self.placed: list[dict[str, object]] = []
        self.attachment = self.attach() if is_attached else None

    def attach(self) -> Attachment:
        def connect(**arguments: object) -> Marks:
            self.placed.append(arguments)
            return self.connected

        return attach_model(self.model, self.optimizer, job_id="GPT-3", connect=connect)

    def train(self, call: Call, iteration_count: int = 2) -> list[float]:
        losses = []
        for iteration in range(iteration_count):
            for microbatch in range(2):
                generator = torch.Generator().manual_seed(10 * iteration + microbatch)
                inputs = torch.randn(4, 8, generator=generator, requires_grad=True)
                loss = call(self.model, inputs).square().mean()
                loss.backward()
                losses.append(loss.item())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses


def plainly(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs)


def reentrant(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return checkpoint(model, inputs, use_reentrant=True)


def not_reentrant(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return checkpoint(model, inputs, use_reentrant=False)


def in_a_function(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda given: model(given).clone(), inputs, use_reentrant=True)


@pytest.mark.parametrize("call", [plainly, reentrant, not_reentrant, in_a_function])
def test_one_process_is_attached_as_it_is_also_with_a_checkpoint_of_the_whole_model(call: Call) -> None:
    attached = Training()
    assert attached.train(call) == Training(is_attached=False).train(call)
    computed = [
        (edge, kind, microbatch, 0) for microbatch in range(2) for kind in (F, B) for edge in ("begin", "end")
    ]
    iteration = [("begin_iteration",), *computed, ("end_iteration",)]
    assert attached.marks.calls == [*iteration, ("register",), *iteration]
    (place,) = attached.placed
    assert (place["pipeline"], place["stage"], place["tensor"]) == (0, 0, 0)
    (registered,) = attached.marks.registered
    assert (registered["pipeline_count"], registered["stage_count"], registered["tensor_count"]) == (1, 1, 1)
    assert attached.attachment is not None
    attached.attachment.detach()


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole iterations", "the forward"])
def test_a_captured_training_has_equal_losses_and_the_log_says_what_is_not_marked(
    is_whole: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """On a simulated device. A forward is captured once, after a warm-up, and then called as before."""
    device, probe = Device([float(time_ms) for time_ms in range(1000)]), ProbeStub()
    marks = DeviceMarks(probe, device, has_helper=False, monotonic_ns=device.monotonic_ns)

    def trained(training: Training) -> list[float]:
        losses = training.train(plainly) if is_whole else []
        for device.is_captured in () if is_whole else (False, True):
            training.model(torch.ones(4, 8))
        device.is_captured = is_whole
        return losses + training.train(plainly, 12)

    attached = Training(marks=marks)
    losses = trained(attached)
    if is_whole:
        (message,) = caplog.messages
        assert "training continues at stock clocks: iterations are captured whole in a CUDA graph" in message
        assert probe.marks[-1] == ("close",), "its GPU returns to stock"
    else:
        device.now_ms = 1000.0
        marks.poll()
        message, changed = caplog.messages
        assert "captured in a CUDA graph are not marked" in message
        assert "stage 0 executes 2 microbatches (4 computations) instead of 4 (6)" in changed
        assert [mark[0] for mark in probe.marks].count("register") == 2
        assert probe.marks[-1][0] == "end iteration"
    assert attached.attachment is not None
    attached.attachment.detach()
    assert losses == trained(Training(is_attached=False))


def test_processes_without_a_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ValueError, match="expected it to be initialised before attach, as WORLD_SIZE is 8"):
        Training()


def in_eval(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return model.eval()(inputs)


def inside(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return model.forward(inputs)


@pytest.mark.parametrize(
    ("call", "cause"),
    [(in_eval, "the attached model is in eval()"), (inside, "the attached model is not called")],
)
def test_training_without_marks_is_reported_with_the_cause(
    call: Call, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    losses = training.train(call, MAX_UNMARKED_STEPS + 2)
    assert losses == Training(is_attached=False).train(call, MAX_UNMARKED_STEPS + 2)
    (warning,) = [each for each in caplog.messages if each.startswith("not marked")]
    assert f"{MAX_UNMARKED_STEPS} optimizer steps without a marked iteration: {cause}" in warning
    assert [call[0] for call in training.marks.calls] == ["unmarked"]
    assert training.attachment is not None
    training.attachment.detach()


def hook_count(optimizer: torch.optim.Optimizer) -> int:
    return len(optimizer._optimizer_step_post_hooks) + len(torch_optimizer._global_optimizer_post_hooks)


def test_detaching_leaves_no_hooks_and_no_references() -> None:
    training = Training()
    training.train(plainly)
    assert hook_count(training.optimizer) == 2
    with pytest.raises(ValueError, match="expected one that is not attached"):
        training.attach()
    assert training.attachment is not None
    training.attachment.detach()
    assert hook_count(training.optimizer) == 0
    assert type(training.model) is nn.Sequential
    gone = weakref.ref(training.model)
    del training.model
    assert gone() is None, "although the attachment and the optimizer are alive"


@pytest.mark.parametrize("is_kept", [True, False], ids=["attachment kept", "attachment dropped"])
def test_a_model_that_is_deleted_leaves_no_hooks(is_kept: bool) -> None:
    training = Training()
    training.train(plainly)
    gone = weakref.ref(training.model)
    if not is_kept:
        training.attachment = None
    gc.collect()
    assert training.marks.calls[-1] == ("end_iteration",), "the model is alive, and so is its attachment"
    del training.model
    gc.collect()
    assert gone() is None
    assert training.marks.calls[-1] == ("close",), "its GPU returns to stock"
    assert hook_count(training.optimizer) == 0
    training.optimizer.step()
