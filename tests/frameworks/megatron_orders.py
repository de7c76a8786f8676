"""Train a little under Megatron-Core's schedules, attached to a notebook only: `-m …megatron_orders TASK`.

Two ranks. What stage 0 registered, and what each rank marked, is left in one file for each rank.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from perseus.demo.megatron_on_cpu import do_without_cuda
from tests.frameworks.megatron_trainer import CountingTimers, make_chunks, step
from tests.frameworks.notebook import Notebook
from tests.frameworks.trainers import TrainerTask, main

SCHEDULES = {"1f1b": 1, "1f1b-timers": 1, "interleaved": 2}
"""Chunks on each rank, by schedule."""

ITERATIONS = 3


def train(task: TrainerTask, rank: int) -> None:
    """One rank, through all schedules."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=task.rendezvous, rank=rank, world_size=task.rank_count)
    do_without_cuda()
    from megatron.core import __version__, parallel_state
    from megatron.core.pipeline_parallel import schedules

    from perseus.agent.megatron import attach

    found: dict[str, Any] = {"version": __version__}
    untouched = dict(vars(schedules))
    for name, chunk_count in SCHEDULES.items():
        task = replace(task, schedule=name, chunk_count=chunk_count)
        losses: list[list[list[float]]] = []
        notebook = Notebook()
        for is_attached in (False, True):
            config, chunks = make_chunks(task)
            config.timers = timers = CountingTimers()
            attachment = None
            if is_attached:
                arguments: dict[str, Any] = {"seam": "timers"} if name == "1f1b-timers" else {}
                attachment = attach(config, job_id="x", connect=notebook.connect, **arguments)
            optimizer = torch.optim.SGD([p for chunk in chunks for p in chunk.parameters()], lr=0.1)
            losses.append([])
            for iteration in range(ITERATIONS):
                losses[-1].append(step(task, chunks, seed=iteration))
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    losses[-1].append(step(task, chunks, seed=-1 - iteration, forward_only=True))
            if attachment is not None:
                attachment.detach()
                assert vars(schedules) == untouched
                step(task, chunks, seed=ITERATIONS)  # it still trains
            assert config.timers is timers
            forwards = (2 * ITERATIONS + is_attached) * task.microbatch_count * chunk_count
            assert timers.counts["forward-compute"] == 2 * forwards, "each start, each stop"
            parallel_state.destroy_model_parallel()
        assert notebook.is_finished
        found[name] = {
            "registration": notebook.registration,
            "iterations": notebook.iterations,
            "losses": [[[loss.hex() for loss in each] for each in run] for run in losses],
        }
    Path(task.losses_dir, f"rank-{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(train))
