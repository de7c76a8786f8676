"""Train a tiny GPT of Megatron-Core on CPUs: `-m …megatron_trainer TASK…`.

Its schedules: "1f1b" and "interleaved" through the schedules seam, "1f1b-timers" through that of the timers,
"interleaved" with a notebook as in Megatron-LM's own loop.
The schedule "release" trains nothing: it wraps the loop of a release that has it.
"""

import importlib
import inspect
import io
import logging
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import distributed

from perseus.demo.megatron_on_cpu import do_without_cuda
from tests.frameworks.trainers import Rank, TrainerTask, main

VOCABULARY, WIDTH, LENGTH, MICROBATCH_SIZE = 64, 32, 16, 2
LOOP = "megatron.training.training"


def prepare(task: TrainerTask) -> None:
    """Import Megatron-Core, without CUDA."""
    if task.schedule == "release":
        # The release is for Python 3.12.
        typing.override = importlib.import_module("typing_extensions").override  # type: ignore[attr-defined,unused-ignore]
        return
    do_without_cuda()
    importlib.import_module("megatron.core.pipeline_parallel.schedules")
    importlib.import_module("megatron.core.models.gpt.gpt_model")
    importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")


def train(rank: Rank) -> None:
    """Train one rank."""
    if rank.task.schedule == "release":
        check_release()
        return
    from megatron.core.pipeline_parallel import schedules

    from perseus.agent.megatron import attach

    task, training, untouched = rank.task, Training(rank), dict(vars(schedules))
    seam: Literal["schedules", "timers"] = "timers" if task.schedule == "1f1b-timers" else "schedules"
    hook = partial(attach, training.config, seam=seam)
    if seam == "timers" and task.is_noted:
        sys.modules[LOOP] = ModuleType(LOOP)
        with pytest.raises(ValueError, match="expected 'schedules', as Megatron-LM's own loop sets"):
            hook(**rank.attach_arguments(training.pipeline, training.stage))
        del sys.modules[LOOP]
    if task.schedule == "interleaved" and task.is_noted:
        training.train_in_loop()
    else:
        with rank.attached(hook, training.pipeline, training.stage) as attachment:
            if task.is_noted:
                again = hook(**rank.attach_arguments(training.pipeline, training.stage))
                assert again is attachment, "once for every virtual stage"
            training.train()
    assert vars(schedules) == untouched
    if task.is_noted:
        training.step(seed=0)  # training still works
    assert training.config.timers is None


class Training:
    """One rank's chunks of the model, and how they are trained."""

    def __init__(self, rank: Rank) -> None:
        from megatron.core import parallel_state

        self.rank, task = rank, rank.task
        virtual = task.chunk_count if task.chunk_count > 1 else None
        parallel_state.initialize_model_parallel(1, task.stage_count, virtual)
        self.pipeline = parallel_state.get_data_parallel_rank()
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        self.config = _config(task)
        self.chunks = [_chunk(self.config, task, self.stage, chunk) for chunk in range(task.chunk_count)]
        self.parameters = [parameter for chunk in self.chunks for parameter in chunk.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)

    def train(self) -> None:
        """Train until the end, with evaluations if the task asks for them."""
        task = self.rank.task
        for iteration in self.rank.iterations(task.iteration_count):
            losses = self.step(seed=1000 * self.pipeline + iteration)
            # The norm of all gradients, as for clipping: here all ranks wait for each other.
            distributed.all_reduce(torch.stack([each.grad.square().sum() for each in self.parameters]).sum())
            self.optimizer.step()
            self.optimizer.zero_grad()
            if task.evaluate_every:
                with torch.no_grad():
                    losses += self.step(seed=-1 - iteration, forward_only=True)
            if losses:
                self.rank.leave_losses(self.pipeline, losses)

    def train_in_loop(self) -> None:
        """Train in a stand-in for the module of Megatron-LM's loop."""
        from perseus.agent.megatron import wrap_training

        sys.modules[LOOP] = loop = ModuleType(LOOP)
        vars(loop)["train"] = lambda config: self.train()
        wrap_training(**self.rank.attach_arguments(self.pipeline, self.stage))
        loop.train(self.config)

    def step(self, seed: int, *, forward_only: bool = False) -> list[float]:
        """Run one iteration or evaluation; return its microbatches' losses on the rank that has them."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        task = self.rank.task
        size = (task.microbatch_count, MICROBATCH_SIZE, LENGTH + 1)
        microbatches = torch.randint(0, VOCABULARY, size, generator=torch.Generator().manual_seed(seed))
        has_chunks = task.chunk_count > 1
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[iter(microbatches) for _ in self.chunks] if has_chunks else iter(microbatches),
            model=self.chunks if has_chunks else self.chunks[0],
            num_microbatches=task.microbatch_count,
            seq_length=LENGTH,
            micro_batch_size=MICROBATCH_SIZE,
            forward_only=forward_only,
        )
        return [each["loss"].item() for each in losses]


def check_release() -> None:
    """Wrap Megatron-LM's own loop: a call of `pretrain` first reaches `attach`, with its configuration."""
    from megatron.training import training

    from perseus.agent.megatron import wrap_training

    original = training.train
    wrap_training(job_id="x")
    assert training.pretrain.__globals__["train"] is training.train is not original
    log = io.StringIO()
    logging.getLogger("perseus.attachment").addHandler(logging.StreamHandler(log))
    with suppress(Exception):  # Megatron-LM's: it goes on to train, which it can't without a GPU
        training.train(None, [], None, None, None, None, None, SimpleNamespace(), {}, None)
    assert "at stock clocks: Megatron-Core: expected its parallel state to be initialised" in log.getvalue()


def _config(task: TrainerTask) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=task.stage_count * task.chunk_count,
        hidden_size=WIDTH,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_model_parallel_size=task.stage_count,
        virtual_pipeline_model_parallel_size=task.chunk_count if task.chunk_count > 1 else None,
        pipeline_dtype=torch.float32,
        # With two stages and virtual ones, Megatron requires sends and receives to overlap.
        overlap_p2p_comm=task.chunk_count > 1,
        batch_p2p_comm=task.chunk_count == 1,
    )


def _chunk(config: Any, task: TrainerTask, stage: int, chunk: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    position, count = chunk * task.stage_count + stage, task.stage_count * task.chunk_count
    arguments = {}
    if task.chunk_count > 1:
        # Up to 0.12 a chunk gets its place from the parallel state, later from an argument.
        parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        if "vp_stage" in inspect.signature(GPTModel).parameters:
            arguments["vp_stage"] = chunk
    torch.manual_seed(position)
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        LENGTH,
        pre_process=position == 0,
        post_process=position == count - 1,
        share_embeddings_and_output_weights=False,
        **arguments,
    )


def _forward_step(
    microbatches: Iterator[torch.Tensor], model: Any
) -> tuple[torch.Tensor, Callable[..., Any]]:
    tokens = next(microbatches)
    positions = torch.arange(LENGTH).expand(MICROBATCH_SIZE, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]), _loss


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.mean()
    return loss, {"loss": loss.detach().clone()}


if __name__ == "__main__":
    sys.exit(main(train, prepare))
