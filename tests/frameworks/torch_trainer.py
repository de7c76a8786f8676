"""Train a tiny transformer with `torch.distributed.pipelining` on CPUs: `-m …torch_trainer TASK…`."""

import sys
from collections.abc import Callable
from functools import partial
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
from tests.frameworks.trainers import Rank, TrainerTask, main

VOCABULARY, WIDTH, LENGTH, MICROBATCH_SIZE = 64, 32, 16, 2
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


class Chunk(nn.Module):  # type: ignore[misc]
    """A few layers of the transformer; the first one has the embedding, the last one the head."""

    def __init__(self, position: int, count: int, layer_count: int) -> None:
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


def positions(task: TrainerTask, stage: int) -> list[int]:
    if task.schedule in V_SHAPED:
        return [stage, task.stage_count * task.chunk_count - 1 - stage]
    return [stage + chunk * task.stage_count for chunk in range(task.chunk_count)]


class Training:
    """One rank's chunks of the model, and how they are trained."""

    def __init__(self, rank: Rank) -> None:
        self.rank, task = rank, rank.task
        sizes = (task.pipeline_count, task.stage_count, task.tensor_count)
        self.mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "pp", "tp"))
        self.pipeline, self.stage, self.tensor = self.mesh.get_coordinate()
        self.chunks = []
        for position in positions(task, self.stage):
            torch.manual_seed(position)
            layer_count = task.layers[position] if task.layers else 1
            self.chunks.append(Chunk(position, task.stage_count * task.chunk_count, layer_count))
        if task.tensor_count > 1:
            plan = {"block.*.linear1": ColwiseParallel(), "block.*.linear2": RowwiseParallel()}
            for chunk in self.chunks:
                parallelize_module(chunk, self.mesh["tp"], plan)
        self.parameters = [parameter for chunk in self.chunks for parameter in chunk.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)
        # The model's last chunk has the losses: in a V it is on the first stage.
        self.has_losses = any(chunk.head is not None for chunk in self.chunks)

    def schedule(self) -> Any:
        task = self.rank.task
        count = task.stage_count * task.chunk_count
        stages = [
            PipelineStage(chunk, position, count, torch.device("cpu"), group=self.mesh.get_group("pp"))
            for position, chunk in zip(positions(task, self.stage), self.chunks, strict=True)
        ]
        schedule_class = get_schedule_class(task.schedule)
        of_stages = stages if issubclass(schedule_class, PipelineScheduleMulti) else stages[0]
        return schedule_class(of_stages, task.microbatch_count, loss_fn=loss_of)

    def compute(self, step: Callable[..., Any], seed: int) -> list[float]:
        """Run an iteration or an evaluation; return its losses on the rank that has them."""
        generator = torch.Generator().manual_seed(seed)
        size = (self.rank.task.microbatch_count * MICROBATCH_SIZE, LENGTH + 1)
        tokens = torch.randint(0, VOCABULARY, size, generator=generator)
        inputs = [tokens[:, :-1]] if self.chunks[0].embedding is not None else []
        losses: list[torch.Tensor] = []
        step(*inputs, **({"target": tokens[:, 1:], "losses": losses} if self.has_losses else {}))
        return [loss.item() for loss in losses]

    def iterate(self, schedule: Any, iteration: int) -> None:
        """Train an iteration, after which all ranks wait for each other, as to clip gradients."""
        task = self.rank.task
        losses = self.compute(schedule.step, 1000 * self.pipeline + iteration)
        gradients = [parameter.grad for parameter in self.parameters]
        local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        for gradient in local:
            distributed.all_reduce(gradient, group=self.mesh.get_group("dp"))
        distributed.all_reduce(torch.stack([gradient.square().sum() for gradient in local]).sum())
        self.optimizer.step()
        self.optimizer.zero_grad()
        if task.evaluate_every and (iteration + 1) % task.evaluate_every == 0:
            for number in range(2 * task.evaluate_every):
                losses += self.compute(schedule.eval, -1 - number)
        if self.has_losses and self.tensor == 0:
            self.rank.leave_losses(self.pipeline, losses)


def train(rank: Rank) -> None:
    """Train one rank."""
    task, training = rank.task, Training(rank)
    schedule = training.schedule()
    # Without a mesh, ranks synchronise when they attach.
    hook = partial(attach, schedule, device_mesh=None if task.planted else training.mesh)
    with rank.attached(hook, training.pipeline, training.stage, training.tensor):
        for iteration in rank.iterations(task.iteration_count):
            training.iterate(schedule, iteration)
    if task.is_noted:
        training.compute(schedule.step, seed=0)  # training still works


if __name__ == "__main__":
    sys.exit(main(train))
