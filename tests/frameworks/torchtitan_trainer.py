"""torchtitan's debug model, trained by torchtitan itself on CPUs: `-m …torchtitan_trainer TASK`."""

import importlib
import os
import sys
from typing import Any

import torch
from torch import distributed

from perseus.agent.probe.marks import Connect
from tests.frameworks import torchtitan_on_cpu
from tests.frameworks.trainers import TrainerTask, main


def train(task: TrainerTask, rank: int) -> None:
    """Train one rank, starting with torchtitan's command line."""
    torch.set_num_threads(1)
    be_a_rank(task, rank)
    losses = run(task, rank)
    if rank == task.rank_count - 1:
        task.leave_losses(0, losses)


def prepare(task: TrainerTask) -> None:
    """Import torchtitan, without CUDA."""
    torchtitan_on_cpu.do_without_cuda()
    sys.argv = ["train", *arguments(task)]
    torchtitan_on_cpu.prepare()
    importlib.import_module("torchtitan.train")


def arguments(task: TrainerTask) -> list[str]:
    """Return the task as torchtitan's command line."""
    return torchtitan_on_cpu.arguments(
        task.schedule, task.stage_count, task.microbatch_count, task.losses_dir
    )


def be_a_rank(task: TrainerTask, rank: int) -> None:
    """Set up a rank as torchrun does, but for a CPU."""
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(task.rank_count))
    init = distributed.init_process_group

    def init_process_group(*_args: Any, **_kwargs: Any) -> None:
        init("gloo", init_method=task.rendezvous, rank=rank, world_size=task.rank_count)

    distributed.init_process_group = init_process_group


def run(task: TrainerTask, rank: int, connect: Connect | None = None) -> list[float]:
    """Train, attached if the task or `connect` requires it; return the losses that torchtitan would log."""
    from torchtitan import train as titan
    from torchtitan.components.metrics import MetricsProcessor

    from perseus.agent import torchtitan as hook

    losses: list[float] = []

    def log(_processor: Any, _step: int, loss: float, *_args: Any, **_kwargs: Any) -> None:
        losses.append(loss)

    def goes_on(trainer: Any) -> bool:
        is_over = torch.tensor(float(rank == 0 and trainer.step > 0 and task.is_over(trainer.step)))
        distributed.broadcast(is_over, 0)
        return not is_over.item()

    MetricsProcessor.log = log
    titan.Trainer.should_continue_training = goes_on
    if task.is_attached:
        connect = task.attach_arguments(0, rank)["connect"]
    if connect is not None:
        hook.main([f"--perseus.job-id={task.job_id}", *arguments(task)], connect)
    else:
        hook.run(titan)
    return losses


if __name__ == "__main__":
    sys.exit(main(train, prepare))
