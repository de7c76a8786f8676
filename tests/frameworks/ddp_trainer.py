"""A tiny model in `DistributedDataParallel` on CPUs, one replica a rank: `-m …ddp_trainer TASK`."""

import sys
from contextlib import nullcontext

import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from perseus.agent.torch import attach_model
from tests.frameworks.trainers import TrainerTask, main

WIDTH, BATCH = 32, 4


def train(task: TrainerTask, rank: int) -> None:
    """Train one replica; gradients are accumulated over the microbatches and reduced with the last."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=task.rendezvous, rank=rank, world_size=task.rank_count)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)]
    model = DistributedDataParallel(nn.Sequential(*layers))
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
            is_last = microbatch == task.microbatch_count - 1
            with nullcontext() if is_last else model.no_sync():
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
