"""Train a little under all of torch's schedules, attached only to a notebook: `-m …torch_orders TASK`.

Two ranks. Each rank writes a file with its marks, and stage 0's registration.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from perseus.agent.torch import attach
from tests.frameworks.notebook import Notebook
from tests.frameworks.torch_trainer import LENGTH, MICROBATCH_SIZE, V_SHAPED, VOCABULARY, make_schedule
from tests.frameworks.trainers import TrainerTask, main

SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
"""Chunks on each rank, by schedule."""

ITERATIONS = 3


def step(schedule: Any, task: TrainerTask, stage: int, seed: int, *, evaluates: bool = False) -> list[str]:
    """Run one iteration or evaluation; return the losses, bit for bit."""
    size = (task.microbatch_count * MICROBATCH_SIZE, LENGTH + 1)
    tokens = torch.randint(0, VOCABULARY, size, generator=torch.Generator().manual_seed(seed))
    inputs = [tokens[:, :-1]] if stage == 0 else []
    has_losses = stage == (0 if task.schedule in V_SHAPED else task.stage_count - 1)
    losses: list[torch.Tensor] = []
    targets = {"target": tokens[:, 1:], "losses": losses} if has_losses else {}
    (schedule.eval if evaluates else schedule.step)(*inputs, **targets)
    return [loss.item().hex() for loss in losses]


def train(task: TrainerTask, rank: int) -> None:
    """Train one rank through all schedules."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=task.rendezvous, rank=rank, world_size=task.stage_count
    )
    found: dict[str, Any] = {}
    for name, chunk_count in SCHEDULES.items():
        task = replace(task, schedule=name, chunk_count=chunk_count)
        losses: list[list[list[str]]] = []
        notebook = Notebook()
        for is_attached in (False, True):
            schedule, chunks = make_schedule(task, rank, None)
            owners = [schedule, *(getattr(schedule, "_stages", None) or [schedule._stage])]
            before = [dict(vars(owner)) for owner in owners]
            attachment = attach(schedule, job_id="x", connect=notebook.connect) if is_attached else None
            optimizer = torch.optim.SGD([p for chunk in chunks for p in chunk.parameters()], lr=0.1)
            losses.append([])
            for iteration in range(ITERATIONS):
                losses[-1].append(step(schedule, task, rank, iteration))
                optimizer.step()
                optimizer.zero_grad()
            if name not in V_SHAPED:  # torch can't evaluate these
                losses[-1].append(step(schedule, task, rank, ITERATIONS, evaluates=True))
            if attachment is not None:
                attachment.detach()
                wrapped = {"step", "forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"}
                for owner, old in zip(owners, before, strict=True):
                    assert not wrapped & vars(owner).keys() - old.keys()
                step(schedule, task, rank, ITERATIONS)  # training still works
        assert notebook.is_finished
        found[name] = {
            "registration": notebook.registration,
            "iterations": notebook.iterations,
            "losses": losses,
        }
    Path(task.losses_dir, f"rank-{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(train))
