"""A model trained as a whole, attached: it computes as before, bit for bit, and nothing is left behind.

Copies, pickles and compilers treat it as one without Perseus. Most need no `torch.distributed`.
"""

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed; `make test-frameworks` has it", allow_module_level=True)

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from perseus.agent.link.computation import Kind
from perseus.agent.probe.attachment import MAX_UNMARKED_STEPS, Attachment
from perseus.agent.probe.marks import Marks
from perseus.agent.torch import attach, attach_model
from tests.agent.marks_stub import MarksStub
from tests.frameworks.notebook import Notebook

pytestmark = [
    pytest.mark.slow("compiles and trains with torch"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

ITERATIONS, MICROBATCHES = 2, 2
F, B = Kind.FORWARD, Kind.BACKWARD
ITERATION = [
    ("begin_iteration",),
    *((edge, kind, each, 0) for each in range(MICROBATCHES) for kind in (F, B) for edge in ("begin", "end")),
    ("end_iteration",),
]

# Computes a microbatch's output by the model.
Call = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Net(nn.Sequential):  # type: ignore[misc]
    """A model with its own forward: torch doesn't compile its own code."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs)


def make_model(kind: type[nn.Sequential] = nn.Sequential, *more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return kind(nn.Linear(8, 8), *more, nn.ReLU(), nn.Linear(8, 1))


def plainly(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs)


class Training:
    """A model's training in one process, attached or not."""

    def __init__(self, model: nn.Module | None = None, *, is_attached: bool = True) -> None:
        self.model = make_model() if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.marks = MarksStub()
        self.placed: list[dict[str, object]] = []
        self.attachment = self.attach() if is_attached else None

    def attach(self) -> Attachment:
        def connect(**arguments: object) -> Marks:
            self.placed.append(arguments)
            return self.marks

        return attach_model(self.model, self.optimizer, job_id="GPT-3", connect=connect)

    def detach(self) -> None:
        assert self.attachment is not None
        self.attachment.detach()

    def train(
        self,
        call: Call = plainly,
        iteration_count: int = ITERATIONS,
        after: Callable[[], None] = lambda: None,
    ) -> list[float]:
        losses = []
        for iteration in range(iteration_count):
            for microbatch in range(MICROBATCHES):
                generator = torch.Generator().manual_seed(10 * iteration + microbatch)
                inputs = torch.randn(4, 8, generator=generator, requires_grad=True)
                loss = call(self.model, inputs).square().mean()
                loss.backward()
                losses.append(loss.item())
            self.optimizer.step()
            self.optimizer.zero_grad()
            after()
        return losses

    @property
    def begun(self) -> list[tuple[Any, ...]]:
        return [call for call in self.marks.calls if call[0] == "begin"]


def outputs(model: Callable[..., Any]) -> list[float]:
    with torch.no_grad():
        computed: list[float] = model(torch.ones(2, 8)).flatten().tolist()
    return computed


def check_equal(
    compute: Callable[[Training], Any], make: Callable[[], nn.Module] = make_model, *, is_marked: bool = True
) -> Training:
    """Check that something is the same without Perseus and attached; return the attached training."""
    expected = compute(Training(make(), is_attached=False))
    attached = Training(make())  # only now: dropout draws on from the seed of the model
    assert compute(attached) == expected
    assert attached.begun[:2] == ([("begin", F, 0, 0), ("begin", B, 0, 0)] if is_marked else [])
    return attached


# ------------------------------------------------------------------------------------------------- marks


def reentrant(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return checkpoint(model, inputs, use_reentrant=True)


def not_reentrant(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return checkpoint(model, inputs, use_reentrant=False)


def in_a_function(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda given: model(given).clone(), inputs, use_reentrant=True)


@pytest.mark.parametrize("call", [plainly, reentrant, not_reentrant, in_a_function])
def test_one_process_is_attached_as_it_is_also_with_a_checkpoint_of_the_whole_model(call: Call) -> None:
    attached = check_equal(
        lambda training: training.train(call), lambda: make_model(nn.Sequential, nn.Dropout(0.5))
    )
    assert attached.marks.calls == [*ITERATION, ("register",), *ITERATION]
    (place,) = attached.placed
    assert (place["pipeline"], place["stage"], place["tensor"]) == (0, 0, 0)
    (registered,) = attached.marks.registered
    assert (registered["pipeline_count"], registered["stage_count"], registered["tensor_count"]) == (1, 1, 1)
    attached.detach()


def test_processes_without_a_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ValueError, match="expected it to be initialised before attach, as WORLD_SIZE is 8"):
        Training()


# ------------------------------------------------------------------------------- copies and compilers


def test_averaged_models_and_copies_have_their_own_weights() -> None:
    def averaged(training: Training) -> list[Any]:
        average = AveragedModel(training.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        copied = copy.deepcopy(training.model)
        losses: list[Any] = training.train(after=lambda: average.update_parameters(training.model))
        models = (average, copied, training.model)
        return [*losses, *map(outputs, models), type(copied), *average.state_dict()]

    check_equal(averaged)


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

    check_equal(saved)


def compiled(is_full_graph: bool) -> nn.Module:
    return torch.compile(make_model(Net), backend="eager", fullgraph=is_full_graph)


@pytest.mark.parametrize("is_full_graph", [False, True])
def test_a_compiled_model_is_marked_if_it_is_the_attached_one(is_full_graph: bool) -> None:
    def compile_and_train(training: Training) -> list[float]:
        training.model.compile(backend="eager", fullgraph=is_full_graph)
        return training.train()

    check_equal(compile_and_train, lambda: make_model(Net))
    check_equal(Training.train, lambda: compiled(is_full_graph))


@pytest.mark.parametrize("is_full_graph", [False, True])
def test_a_model_compiled_after_attaching_computes_as_before_and_the_log_has_advice(
    is_full_graph: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_and_train(training: Training) -> list[float]:
        call = torch.compile(training.model, backend="eager", fullgraph=is_full_graph)
        return training.train(lambda _, inputs: call(inputs))

    attached = check_equal(compile_and_train, lambda: make_model(Net), is_marked=False)
    for _ in range(MAX_UNMARKED_STEPS - ITERATIONS):
        attached.optimizer.step()
    assert "without a marked iteration: the attached model is not called" in caplog.text
    attached.detach()


def test_scripts_traces_slices_and_functional_calls_match_the_model() -> None:
    def derived(training: Training) -> list[Any]:
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

    check_equal(derived)


def test_a_scripted_model_is_marked() -> None:
    attached = check_equal(Training.train, lambda: torch.jit.script(make_model()))
    attached.detach()
    assert type(attached.model) is type(torch.jit.script(make_model()))


# --------------------------------------------------------------------------------------------- the end


def hook_count(optimizer: torch.optim.Optimizer) -> int:
    return len(optimizer._optimizer_step_post_hooks) + len(torch_optimizer._global_optimizer_post_hooks)


def test_detaching_leaves_no_hooks_and_no_references() -> None:
    gc.collect()
    of_others = len(torch_optimizer._global_optimizer_post_hooks)
    training = Training()
    training.train()
    assert hook_count(training.optimizer) == of_others + 2
    with pytest.raises(ValueError, match="expected one that is not attached"):
        training.attach()
    training.detach()
    assert hook_count(training.optimizer) == of_others
    assert type(training.model) is nn.Sequential
    gone = weakref.ref(training.model)
    del training.model
    assert gone() is None, "although the attachment and the optimizer are alive"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("wrap", [None, DistributedDataParallel, fully_shard])
@pytest.mark.parametrize("is_kept", [True, False], ids=["attachment kept", "attachment dropped"])
def test_a_model_that_is_deleted_is_not_kept_and_leaves_no_hooks(
    wrap: Callable[..., Any] | None, is_kept: bool
) -> None:
    training = Training(wrap(make_model()) if wrap else None)
    training.train()
    gone = weakref.ref(training.model)
    if not is_kept:
        training.attachment = None
    gc.collect()
    assert training.marks.calls[-1] == ("end_iteration",), "the model is alive, and so is its attachment"
    gc.disable()
    del training.model
    assert (gone() is not None) == (wrap is fully_shard), "whose own state and model refer to each other"
    gc.enable()
    gc.collect()
    assert gone() is None
    assert training.marks.calls[-1] == ("close",), "its GPU returns to stock"
    assert hook_count(training.optimizer) == 0
    training.optimizer.step()


@pytest.mark.usefixtures("one_rank")
def test_copies_of_a_trainer_and_of_its_callbacks_train_themselves_unattached(tmp_path: Path) -> None:
    from tests.frameworks.everyday_trainer import transformers_trainer

    marks = Notebook()
    trainer, other = (transformers_trainer("ddp", tmp_path, each) for each in (marks.connect, None))
    copied = copy.deepcopy(trainer)
    other.callback_handler.callbacks = copy.deepcopy(trainer.callback_handler.callbacks)
    for each in (copied, other):
        each.train()
    assert (len(copied.losses), len(other.losses), trainer.losses, marks.calls) == (8, 8, [], [])
    trainer.train()
    assert ("finish",) in marks.calls
    gone = weakref.ref(trainer)
    gc.collect()
    gc.disable()
    del trainer, each
    assert gone() is None
    gc.enable()


def padded_training(folder: Path, connect: Any) -> tuple[list[float], int]:
    """Train on sentences of any length with Transformers' own collator; return losses and input elements."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        DataCollatorWithPadding,
        PreTrainedTokenizerFast,
        Trainer,
        TrainingArguments,
    )

    from perseus.agent.transformers import PerseusCallback

    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "word": 1}, unk_token="word"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")
    data = [{**fast("word " * (1 + 7 * number % 31)), "label": number % 2} for number in range(16)]
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=2, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model, sizes = BertForSequenceClassification(config), []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(sum(each.numel() for each in (*args, *kwargs.values()))),
        with_kwargs=True,
    )
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        max_steps=8,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Trainer(model, arguments, DataCollatorWithPadding(fast), train_dataset=data)
    if connect is not None:
        trainer.add_callback(PerseusCallback(trainer, job_id="GPT-3", connect=connect))
    trainer.train()
    assert len({*sizes}) > 4, "padded to different lengths"
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], sum(sizes)


@pytest.mark.usefixtures("one_rank")
def test_padded_batches_are_an_iterations_work_and_losses_are_the_same(tmp_path: Path) -> None:
    marks = Notebook()
    losses, elements = padded_training(tmp_path, marks.connect)
    assert marks.work == elements
    assert len(losses) == 8
    assert padded_training(tmp_path, None) == (losses, elements)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("is_kept", [True, False], ids=["attachment kept", "attachment dropped"])
def test_a_schedule_that_is_deleted_leaves_no_hooks_and_is_not_kept(is_kept: bool) -> None:
    before = len(torch_optimizer._global_optimizer_post_hooks)
    stage = PipelineStage(make_model(), 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    marks = MarksStub()
    attachment = attach(schedule, job_id="job", connect=lambda **_: marks)
    for _ in range(2):
        schedule.step(torch.ones(4, 8), target=torch.ones(4, 1))
    assert len(torch_optimizer._global_optimizer_post_hooks) == before + 1
    if not is_kept:
        del attachment
    gone = [weakref.ref(schedule), weakref.ref(stage)]
    gc.disable()
    del schedule, stage
    assert [each() for each in gone] == [None, None]
    gc.enable()
    assert marks.calls[-1] == ("close",)
    assert len(torch_optimizer._global_optimizer_post_hooks) == before
