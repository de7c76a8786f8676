"""Train a little under Megatron-Core's schedules, attached only to a notebook: `-m …megatron_orders TASK`.

Two ranks. Each rank writes a file with its marks, and stage 0's registration.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import distributed

from tests.frameworks.megatron_trainer import CountingTimers, make_chunks, prepare, step
from tests.frameworks.notebook import Notebook
from tests.frameworks.trainers import TrainerTask, main

SCHEDULES = {"1f1b": 1, "1f1b-timers": 1, "interleaved": 2, "interleaved-loop": 2}
"""Chunks on each rank, by schedule; `loop`: as Megatron-LM trains."""

LOOP = "megatron.training.training"

ITERATIONS = 3


def iterate(task: TrainerTask, chunks: list[Any], optimizer: Any) -> list[list[float]]:
    """Train one schedule; return the losses of its iterations and evaluations."""
    losses = []
    for iteration in range(ITERATIONS):
        losses.append(step(task, chunks, seed=iteration))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(step(task, chunks, seed=-1 - iteration, forward_only=True))
    return losses


def loop_of(task: TrainerTask, timers: CountingTimers) -> Any:
    """Return a stand-in for the module of Megatron-LM's loop, whose `train` is called like theirs."""

    class Loop(ModuleType):
        def pretrain(self, chunks: list[Any], optimizer: Any, config: Any) -> list[list[float]]:
            found: list[list[float]] = self.train(
                None, chunks, optimizer, None, None, None, None, config, {}, None
            )
            return found

        @staticmethod
        def train(
            forward_step_func: Any, model: Any, optimizer: Any, opt_param_scheduler: Any,
            train_data_iterator: Any, valid_data_iterator: Any, process_non_loss_data_func: Any, config: Any,
            checkpointing_context: Any, non_loss_data_func: Any, inference_model: Any = None,
        ) -> list[list[float]]:  # fmt: skip
            config.timers = timers
            return iterate(task, model, optimizer)

    sys.modules[LOOP] = Loop(LOOP)
    return sys.modules[LOOP]


def check_refusals_in_the_loop(config: Any, notebook: Notebook) -> None:
    """Check that attaching works once per process, and never by timers, which the loop sets itself."""
    from perseus.agent.megatron import attach

    with pytest.raises(ValueError, match=r"expected 'schedules', as Megatron-LM's own loop"):
        attach(config, job_id="x", seam="timers", connect=notebook.connect)
    first = attach(config, job_id="x", connect=Notebook().connect)
    assert attach(config, job_id="x", connect=notebook.connect) is first, "once for every virtual stage"
    first.detach()


def train(task: TrainerTask, rank: int) -> None:
    """Train one rank through all schedules."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=task.rendezvous, rank=rank, world_size=task.rank_count)
    from megatron.core import __version__, parallel_state
    from megatron.core.pipeline_parallel import schedules

    from perseus.agent.megatron import attach, wrap_training

    found: dict[str, Any] = {"version": __version__}
    untouched = dict(vars(schedules))
    for name, chunk_count in SCHEDULES.items():
        task = replace(task, schedule=name, chunk_count=chunk_count)
        losses: list[list[list[float]]] = []
        notebook = Notebook()
        for is_attached in (False, True):
            config, chunks = make_chunks(task)
            config.timers = timers = CountingTimers()
            optimizer = torch.optim.SGD([p for chunk in chunks for p in chunk.parameters()], lr=0.1)
            if name == "interleaved-loop":
                loop = loop_of(task, timers)
                if is_attached:
                    check_refusals_in_the_loop(config, notebook)
                    wrap_training(job_id="x", connect=notebook.connect)
                losses.append(loop.pretrain(chunks, optimizer, config))
            else:
                attachment = None
                if is_attached:
                    arguments: dict[str, Any] = {"seam": "timers"} if name == "1f1b-timers" else {}
                    attachment = attach(config, job_id="x", connect=notebook.connect, **arguments)
                losses.append(iterate(task, chunks, optimizer))
                if attachment is not None:
                    attachment.detach()
            if is_attached:
                assert vars(schedules) == untouched
                step(task, chunks, seed=ITERATIONS)  # training still works
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
    sys.exit(main(train, prepare))
