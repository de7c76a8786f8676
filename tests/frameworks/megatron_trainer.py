"""Train a tiny GPT of Megatron-Core on CPUs: `-m …megatron_trainer TASK`.

Its schedules: "1f1b" through the schedules seam, "1f1b-timers" through that of the timers, "interleaved".
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed

from perseus.demo.megatron_on_cpu import do_without_cuda
from tests.frameworks.trainers import TrainerTask, main

VOCABULARY, WIDTH, LENGTH, MICROBATCH_SIZE = 64, 32, 16, 2


def train(task: TrainerTask, rank: int) -> None:
    """Train one rank."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=task.rendezvous, rank=rank, world_size=task.rank_count)
    from megatron.core import parallel_state

    config, chunks = make_chunks(task)
    timers = CountingTimers()
    config.timers = timers
    pipeline, stage = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    attachment = None
    if task.is_attached:
        from perseus.agent.megatron import attach

        arguments = task.attach_arguments(pipeline, stage)
        if task.schedule == "1f1b-timers":
            arguments["seam"] = "timers"
        attachment = attach(config, **arguments)
    optimizer = torch.optim.SGD([p for chunk in chunks for p in chunk.parameters()], lr=0.1)
    losses: list[float] = []
    iteration, goes_on = 0, True
    while goes_on:
        losses += step(task, chunks, seed=1000 * pipeline + iteration)
        iteration += 1
        # The norm of all gradients, as for clipping: here all ranks wait for each other.
        norm = torch.stack([p.grad.square().sum() for chunk in chunks for p in chunk.parameters()]).sum()
        state = torch.stack([norm, torch.tensor(float(rank == 0 and task.is_over(iteration)))])
        distributed.all_reduce(state)
        goes_on = state[1].item() == 0
        optimizer.step()
        optimizer.zero_grad()
    if attachment is not None:
        attachment.detach()
    assert config.timers is timers
    assert timers.counts["forward-compute"] == 2 * iteration * task.microbatch_count * task.chunk_count
    if losses:
        task.leave_losses(pipeline, losses)
    distributed.destroy_process_group()


def prepare(_task: TrainerTask) -> None:
    """Import Megatron-Core, without CUDA."""
    do_without_cuda()
    importlib.import_module("megatron.core.pipeline_parallel.schedules")
    importlib.import_module("megatron.core.models.gpt.gpt_model")
    importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")


def step(task: TrainerTask, chunks: list[Any], seed: int, *, forward_only: bool = False) -> list[float]:
    """Run one iteration or evaluation; return its microbatches' losses on the rank that has them."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    size = (task.microbatch_count, MICROBATCH_SIZE, LENGTH + 1)
    microbatches = torch.randint(0, VOCABULARY, size, generator=torch.Generator().manual_seed(seed))
    has_chunks = task.chunk_count > 1
    found = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=[iter(microbatches) for _ in chunks] if has_chunks else iter(microbatches),
        model=chunks if has_chunks else chunks[0],
        num_microbatches=task.microbatch_count,
        seq_length=LENGTH,
        micro_batch_size=MICROBATCH_SIZE,
        forward_only=forward_only,
    )
    return [each["loss"].item() for each in found]


class CountingTimers:
    """The user's own timers, which must keep working: counts the starts and stops of each."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def __call__(self, name: str, log_level: int | None = None) -> "CountingTimers":
        del log_level
        self._name = name
        return self

    def start(self, barrier: bool = False) -> None:
        self.counts[self._name] = self.counts.get(self._name, 0) + 1

    def stop(self, barrier: bool = False) -> None:
        self.counts[self._name] += 1


def make_chunks(task: TrainerTask) -> tuple[Any, list[Any]]:
    """Return this rank's chunks of the model and their configuration, in a parallel state made for them."""
    from megatron.core import parallel_state

    virtual = task.chunk_count if task.chunk_count > 1 else None
    parallel_state.initialize_model_parallel(1, task.stage_count, virtual)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    config = _config(task)
    return config, [_chunk(config, task, stage, chunk) for chunk in range(task.chunk_count)]


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
