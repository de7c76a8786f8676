"""Train a tiny model on CPUs with data-parallel ranks, without pipelines: `-m …replica_trainer TASK`.

The task's schedule sets how they share it: `ddp` (a whole replica each, `DistributedDataParallel`) or `fsdp2`
(a shard each, `fully_shard`).
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from perseus.agent.torch import attach_model
from tests.frameworks.trainers import TrainerTask, main

WIDTH, BATCH = 32, 4

# Context of a microbatch: with True, gradients are reduced over the ranks, else only accumulated.
Reducing = Callable[[bool], AbstractContextManager[object]]


def make_layers(count: int) -> list[nn.Module]:
    """Return `count` hidden layers, and the last one."""
    hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(count)]
    return [*hidden, nn.Linear(WIDTH, 1)]


def replicated() -> tuple[nn.Module, Reducing]:
    """Return a whole model on every rank."""
    model = DistributedDataParallel(nn.Sequential(*make_layers(1)))
    return model, lambda reduces: nullcontext() if reduces else model.no_sync()


def sharded() -> tuple[nn.Module, Reducing]:
    """Return a shard on every rank; layers are gathered one after another."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    layers = make_layers(2)
    for layer in layers[:-1]:
        fully_shard(layer, mesh=mesh)
    model = fully_shard(nn.Sequential(*layers), mesh=mesh)

    @contextmanager
    def reducing(reduces: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(reduces)
        yield

    return model, reducing


WRAPPINGS: Mapping[str, Callable[[], tuple[nn.Module, Reducing]]] = {"ddp": replicated, "fsdp2": sharded}


def train(task: TrainerTask, rank: int) -> None:
    """Train one rank; gradients are accumulated over the microbatches and reduced with the last."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=task.rendezvous, rank=rank, world_size=task.rank_count)
    torch.manual_seed(0)
    model, reducing = WRAPPINGS[task.schedule]()
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
            with reducing(microbatch == task.microbatch_count - 1):
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
    # Before the group: if the model is the last owner of the group, its deletion deadlocks with a thread of
    # gloo.
    del model, reducing, optimizer, loss, attachment
    distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(train))
