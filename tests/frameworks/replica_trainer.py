"""Train a tiny model on CPUs with data-parallel ranks, without pipelines: `-m …replica_trainer TASK…`.

The task's schedule sets how they share it: `ddp` (a whole replica each, `DistributedDataParallel`), `fsdp2`
(a shard each, `fully_shard`) or `hsdp` (the same, over two replicas).
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from perseus.agent.torch import attach_model
from tests.frameworks.trainers import Rank, main

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


def sharded(replica_count: int = 1) -> tuple[nn.Module, Reducing]:
    """Return a shard on every rank; layers are gathered one after another."""
    shard_count = distributed.get_world_size() // replica_count
    mesh = init_device_mesh("cpu", (replica_count, shard_count), mesh_dim_names=("replicate", "shard"))
    if replica_count == 1:
        mesh = mesh["shard"]
    layers = make_layers(2)
    for layer in layers[:-1]:
        fully_shard(layer, mesh=mesh)
    model = fully_shard(nn.Sequential(*layers), mesh=mesh)

    @contextmanager
    def reducing(reduces: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(reduces)
        yield

    return model, reducing


WRAPPINGS: Mapping[str, Callable[[], tuple[nn.Module, Reducing]]] = {
    "ddp": replicated,
    "fsdp2": sharded,
    "hsdp": lambda: sharded(replica_count=2),
}


def train(rank: Rank) -> None:
    """Train one rank; gradients are accumulated over the microbatches and reduced with the last."""
    task, number = rank.task, rank.number
    torch.manual_seed(0)
    model, reducing = WRAPPINGS[task.schedule]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with rank.attached(partial(attach_model, model, optimizer), number, 0):
        for iteration in rank.iterations(task.iteration_count):
            generator = torch.Generator().manual_seed(1000 * number + iteration)
            losses = []
            for microbatch in range(task.microbatch_count):
                inputs = torch.randn(BATCH, WIDTH, generator=generator)
                with reducing(microbatch == task.microbatch_count - 1):
                    loss = functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
                    loss.backward()
                losses.append(loss.item())
            distributed.barrier()  # as for clipping
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(inputs)  # an evaluation, which is not marked
            rank.leave_losses(number, losses)


if __name__ == "__main__":
    sys.exit(main(train))
