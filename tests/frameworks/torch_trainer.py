"""Train a tiny transformer with `torch.distributed.pipelining` on CPUs: `-m …torch_trainer TASK`."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from perseus.agent.torch import attach
from tests.frameworks.trainers import TrainerTask, main

VOCABULARY, WIDTH, LENGTH, MICROBATCH_SIZE = 64, 32, 16, 2
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
BREAK_INTERVAL = 10
"""Iterations between two breaks."""
CHECKPOINT_S = 5.0
EVALUATION_STEPS = 20


class Chunk(nn.Module):  # type: ignore[misc]
    """A few layers of the transformer; the first one has the embedding, the last one the head."""

    def __init__(self, position: int, count: int, layer_count: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if position == 0 else None
        layers = [
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(layer_count)
        ]
        self.block = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTH, VOCABULARY) if position == count - 1 else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        hidden = self.block(hidden)
        return self.head(hidden) if self.head is not None else hidden


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.reshape(-1, VOCABULARY), target.reshape(-1))


def make_schedule(task: TrainerTask, stage: int, group: Any) -> tuple[Any, list[nn.Module]]:
    """Return this rank's schedule, and its chunks of the model."""
    chunks = make_chunks(task, stage)
    return schedule_of(task, stage, chunks, group), chunks


def make_chunks(task: TrainerTask, stage: int) -> list[nn.Module]:
    """Return a stage's chunks of the model."""
    chunks = []
    for position in _positions(task, stage):
        torch.manual_seed(position)
        layer_count = task.layers[position] if task.layers else 1
        chunks.append(Chunk(position, task.stage_count * task.chunk_count, layer_count))
    return chunks


def schedule_of(task: TrainerTask, stage: int, chunks: Sequence[nn.Module], group: Any) -> Any:
    """Return the schedule of a stage's chunks."""
    count = task.stage_count * task.chunk_count
    stages = [
        PipelineStage(chunk, position, count, torch.device("cpu"), group=group)
        for position, chunk in zip(_positions(task, stage), chunks, strict=True)
    ]
    schedule_class = get_schedule_class(task.schedule)
    of_stages = stages if issubclass(schedule_class, PipelineScheduleMulti) else stages[0]
    return schedule_class(of_stages, task.microbatch_count, loss_fn=loss_of)


def _positions(task: TrainerTask, stage: int) -> list[int]:
    if task.schedule in V_SHAPED:
        return [stage, task.stage_count * task.chunk_count - 1 - stage]
    return [stage + chunk * task.stage_count for chunk in range(task.chunk_count)]


def _checkpoint(task: TrainerTask, rank: int, parameters: Sequence[torch.Tensor]) -> None:
    """Write a checkpoint, which takes as long as a large one if the training is attached."""
    torch.save([parameter.detach() for parameter in parameters], f"{task.losses_dir}/checkpoint-{rank}.pt")
    if task.is_attached:
        time.sleep(CHECKPOINT_S)


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class HiccupError(Exception):
    """Raised in the first iteration, after all computations."""


def failing_once(step: Callable[..., Any]) -> Callable[..., Any]:
    first = iter([True])

    def failing(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if next(first, False):
            raise HiccupError
        return result

    return failing


def train(task: TrainerTask, rank: int) -> None:
    """Train one rank."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=task.rendezvous, rank=rank, world_size=task.rank_count)
    sizes = (task.pipeline_count, task.stage_count, task.tensor_count)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "pp", "tp"))
    pipeline, stage, tensor = mesh.get_coordinate()
    chunks = make_chunks(task, stage)
    if task.tensor_count > 1:
        plan = {"block.*.linear1": ColwiseParallel(), "block.*.linear2": RowwiseParallel()}
        for chunk in chunks:
            parallelize_module(chunk, mesh["tp"], plan)
    schedule = schedule_of(task, stage, chunks, mesh.get_group("pp"))
    if task.planted == "step" and rank in task.planted_ranks:
        schedule.step = failing_once(schedule.step)
    attachment = None
    if task.is_attached:
        # Without a mesh, ranks synchronise when they attach.
        device_mesh = None if task.planted else mesh
        attachment = attach(
            schedule, device_mesh=device_mesh, **task.attach_arguments(pipeline, stage, tensor)
        )
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    # The model's last chunk has the losses: in a V it is on the first stage.
    has_losses = any(chunk.head is not None for chunk in chunks)
    losses: list[float] = []
    iteration, goes_on = 0, True
    while goes_on:
        generator = torch.Generator().manual_seed(1000 * pipeline + iteration)
        size = (task.microbatch_count * MICROBATCH_SIZE, LENGTH + 1)
        tokens = torch.randint(0, VOCABULARY, size, generator=generator)
        inputs = [tokens[:, :-1]] if chunks[0].embedding is not None else []
        found: list[torch.Tensor] = []
        with suppress(HiccupError):
            schedule.step(*inputs, **({"target": tokens[:, 1:], "losses": found} if has_losses else {}))
        losses += [loss.item() for loss in found]
        gradients = [_local(parameter.grad) for parameter in parameters]
        for gradient in gradients:
            distributed.all_reduce(gradient, group=mesh.get_group("dp"))
        iteration += 1
        # The norm of all gradients, as for clipping: here all ranks wait for each other.
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        state = torch.stack([norm, torch.tensor(float(rank == 0 and task.is_over(iteration)))])
        distributed.all_reduce(state)
        goes_on = state[1].item() == 0
        optimizer.step()
        optimizer.zero_grad()
        if iteration % BREAK_INTERVAL == 0 and task.break_for == "checkpoint":
            _checkpoint(task, rank, parameters)
        elif iteration % BREAK_INTERVAL == 0 and task.break_for == "evaluation":
            for _ in range(EVALUATION_STEPS):
                schedule.eval(*inputs, **({"target": tokens[:, 1:]} if has_losses else {}))
    if attachment is not None:
        attachment.detach()
    if has_losses and tensor == 0:
        task.leave_losses(pipeline, losses)
    distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(train))
