"""A tiny model that `fully_shard` (FSDP2) has sharded on CPUs, one shard a rank: `-m …fsdp_trainer TASK`."""

import sys

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from perseus.agent.torch import attach_model
from tests.frameworks.trainers import TrainerTask, main

WIDTH, BATCH, LAYERS = 32, 4, 2


def make_model() -> nn.Module:
    """Layers that are gathered one after the other."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(nn.Sequential(*layers, nn.Linear(WIDTH, 1)), mesh=mesh)


def train(task: TrainerTask, rank: int) -> None:
    """Train one shard; gradients are accumulated over the microbatches and scattered with the last."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=task.rendezvous, rank=rank, world_size=task.rank_count)
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    attachment = None
    if task.is_attached:
        attachment = attach_model(model, optimizer, **task.attach_arguments(rank, 0))
    losses: list[float] = []
    iteration, goes_on = 0, True
    while goes_on:
        generator = torch.Generator().manual_seed(1000 * rank + iteration)
        for microbatch in range(task.microbatch_count):
            inputs = torch.randn(BATCH, WIDTH, generator=generator)
            model.set_requires_gradient_sync(microbatch == task.microbatch_count - 1)
            loss = functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
            loss.backward()
            losses.append(loss.item())
        iteration += 1
        state = torch.tensor([float(rank == 0 and task.is_over(iteration))])
        distributed.all_reduce(state)
        goes_on = state.item() == 0
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(inputs)  # an evaluation, which is not marked
    if attachment is not None:
        attachment.detach()
    task.leave_losses(rank, losses)
    distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(train))
