"""Copies, pickles and compilers treat an attached model as one without Perseus, bit for bit."""

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed; `make test-frameworks` has it", allow_module_level=True)

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from perseus.agent.link.computation import Kind
from perseus.agent.probe.attachment import MAX_UNMARKED_STEPS
from perseus.agent.torch import attach, attach_model
from tests.agent.marks_stub import MarksStub

pytestmark = [
    pytest.mark.slow("compiles and trains with torch"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

ITERATIONS = 3
MARKED = [("begin", Kind.FORWARD, 0, 0), ("begin", Kind.BACKWARD, 0, 0)]


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    rendezvous = f"file://{tmp_path_factory.mktemp('group')}/rendezvous"
    distributed.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Net(nn.Sequential):  # type: ignore[misc]
    """A model with its own forward: torch doesn't compile its own code."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs)


def make_model(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    torch.manual_seed(0)
    return kind(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


class Training:
    """Training of a model through the callable under test; attached or not."""

    def __init__(self, model: nn.Module, *, is_attached: bool) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.marks = MarksStub()
        if is_attached:
            self.attachment = attach_model(
                model, self.optimizer, job_id="job", connect=lambda **_: self.marks
            )

    def train(
        self, call: Callable[..., Any] | None = None, after: Callable[[], None] = lambda: None
    ) -> list[float]:
        losses = []
        for iteration in range(ITERATIONS):
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(iteration))
            loss = (call or self.model)(inputs).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            after()
            losses.append(loss.item())
        return losses

    @property
    def begun(self) -> list[tuple[Any, ...]]:
        return [call for call in self.marks.calls if call[0] == "begin"]


def outputs(model: Callable[..., Any]) -> list[float]:
    with torch.no_grad():
        found: list[float] = model(torch.ones(2, 8)).flatten().tolist()
    return found


def both(what: Callable[[Training], Any], kind: type[nn.Sequential] = nn.Sequential) -> tuple[Any, Any]:
    """Return the results without Perseus, and attached."""
    plain, attached = (Training(make_model(kind), is_attached=is_attached) for is_attached in (False, True))
    found = what(plain), what(attached)
    assert attached.begun[:2] == MARKED
    return found


def test_averaged_models_and_copies_have_their_own_weights() -> None:
    def averaged(training: Training) -> list[Any]:
        average = AveragedModel(training.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        copied = copy.deepcopy(training.model)
        found: list[Any] = training.train(after=lambda: average.update_parameters(training.model))
        return [*found, outputs(average), outputs(copied), outputs(training.model), *average.state_dict()]

    plain, attached = both(averaged)
    assert attached == plain


def test_a_copy_is_not_marked() -> None:
    training = Training(make_model(), is_attached=True)
    copied = copy.deepcopy(training.model)
    assert type(copied) is nn.Sequential
    Training(copied, is_attached=False).train()
    assert training.begun == []


def test_a_whole_model_is_saved_and_loaded_without_perseus(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"

    def saved(training: Training) -> list[Any]:
        training.train()
        torch.save(training.model, path)
        script = (
            "import sys; sys.modules['perseus'] = None; import torch; "
            f"print(torch.load({str(path)!r}, weights_only=False)(torch.ones(2, 8)).flatten().tolist())"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        there = pickle.loads(pickle.dumps(training.model))
        return [done.stdout, outputs(there), type(there), list(training.model.state_dict())]

    plain, attached = both(saved)
    assert attached == plain


@pytest.mark.parametrize("is_full_graph", [False, True])
def test_a_model_that_is_compiled_in_place_is_marked(is_full_graph: bool) -> None:
    def compiled(training: Training) -> list[float]:
        training.model.compile(backend="eager", fullgraph=is_full_graph)
        return training.train()

    plain, attached = both(compiled, Net)
    assert attached == plain


@pytest.mark.parametrize("is_full_graph", [False, True])
def test_a_compiled_model_is_marked_if_it_is_the_attached_one(is_full_graph: bool) -> None:
    plain = Training(make_model(Net), is_attached=False)
    expected = plain.train(torch.compile(plain.model, backend="eager", fullgraph=is_full_graph))
    model = torch.compile(make_model(Net), backend="eager", fullgraph=is_full_graph)
    training = Training(model, is_attached=True)
    assert training.train() == expected
    assert training.begun[:2] == MARKED


@pytest.mark.parametrize("is_full_graph", [False, True])
def test_a_model_compiled_after_attaching_computes_as_before_and_the_log_has_advice(
    is_full_graph: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plain, attached = (Training(make_model(Net), is_attached=is_attached) for is_attached in (False, True))
    losses = [
        each.train(torch.compile(each.model, backend="eager", fullgraph=is_full_graph))
        for each in (plain, attached)
    ]
    assert losses[0] == losses[1]
    assert attached.begun == []
    for _ in range(MAX_UNMARKED_STEPS - ITERATIONS):
        attached.optimizer.step()
    assert "without a marked iteration: the attached model is not called" in caplog.text
    attached.attachment.detach()


def test_scripts_traces_slices_and_functional_calls_match_the_model() -> None:
    def found(training: Training) -> list[Any]:
        training.train()
        model, inputs = training.model, torch.ones(2, 8)
        weights = {name: 2 * each.detach() for name, each in model.named_parameters()}
        return [
            outputs(torch.jit.script(model)),
            outputs(torch.jit.trace(model, inputs)),
            outputs(torch.export.export(model, (inputs,)).module()),
            torch.func.functional_call(model, weights, (inputs,)).tolist(),
            type(model[:2]),
            outputs(model[:2]),
            repr(model),
        ]

    plain, attached = both(found)
    assert attached == plain


def test_a_scripted_model_is_marked() -> None:
    plain = Training(torch.jit.script(make_model()), is_attached=False)
    attached = Training(torch.jit.script(make_model()), is_attached=True)
    assert attached.train() == plain.train()
    assert attached.begun[:2] == MARKED
    attached.attachment.detach()
    assert type(attached.model) is type(plain.model)


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_a_wrapped_model_that_is_deleted_is_not_kept_by_its_attachment(wrap: Callable[..., Any]) -> None:
    training = Training(wrap(make_model()), is_attached=True)
    training.train()
    gone = weakref.ref(training.model)
    del training.model
    gc.collect()
    assert gone() is None
    assert training.marks.calls[-1] == ("close",)


@pytest.mark.parametrize("is_kept", [True, False], ids=["attachment kept", "attachment dropped"])
def test_a_schedule_that_is_deleted_leaves_no_hooks_and_is_not_kept(is_kept: bool) -> None:
    before = len(_global_optimizer_post_hooks)
    stage = PipelineStage(make_model(), 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    marks = MarksStub()
    attachment = attach(schedule, job_id="job", connect=lambda **_: marks)
    for _ in range(2):
        schedule.step(torch.ones(4, 8), target=torch.ones(4, 1))
    assert len(_global_optimizer_post_hooks) == before + 1
    if not is_kept:
        del attachment
    gone = [weakref.ref(schedule), weakref.ref(stage)]
    del schedule, stage
    gc.collect()
    assert [each() for each in gone] == [None, None]
    assert marks.calls[-1] == ("close",)
    assert len(_global_optimizer_post_hooks) == before
