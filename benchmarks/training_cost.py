"""What being measured costs a real training: its time with and without a hook, by turns.

Small models train on one core, and the agent, with an emulated GPU and no coordinator, has the other. Blocks
of steps with and without the hook alternate, so that the machine's drift hits both alike. `make
test-frameworks` makes the environment with torch:

    .venv-frameworks/bin/python -m benchmarks.training_cost
"""

import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.adapters import connect
from benchmarks.harness import Cell, Column, Table, main
from benchmarks.probe import TRAINER_CORE, running_agent
from perseus.agent.link.address import SOCKET_VARIABLE
from perseus.agent.torch import attach, attach_model

_BLOCK_COUNT = 28
"""Pairs of blocks; the first few, while caches fill, are dropped."""
_DROPPED = 4
_BLOCK_S = 0.5
_MICROBATCHES = 8


@dataclass(frozen=True, slots=True)
class Training:
    """A training: one step, what attaches the hook to it, and how many computations a step has."""

    step: Callable[[], object]
    attach: Callable[[], Any]
    computation_count: int


def run() -> list[Table]:
    """Measure all trainings."""
    import torch
    from torch import distributed

    os.sched_setaffinity(0, {TRAINER_CORE})
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory(prefix="perseus-") as folder, running_agent(Path(folder)):
        os.environ[SOCKET_VARIABLE] = str(Path(folder, "agent.sock"))
        distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
        for width in (256, 1024):
            rows.append(_row(f"`attach_model`, layers of {width}", _model(width)))
            rows.append(_row(f"pipelining, layers of {width}", _pipeline(width)))
        distributed.destroy_process_group()
    columns = (
        Column("training"),
        Column("computation, ms", ".2f"),
        Column("slower with the hook, %", ".2f"),
        Column("± 95 %", ".2f"),
        Column("µs per computation", ".1f"),
    )
    note = f"{_BLOCK_COUNT - _DROPPED} pairs of blocks of {_BLOCK_S:g} s, whose order changes each time."
    return [Table("Time of a real training with its hook, against without", columns, tuple(rows), note)]


def _row(name: str, training: Training) -> tuple[Cell, ...]:
    step_count = max(1, round(_BLOCK_S / _time_s(training, 3)))
    slower: list[float] = []
    without_s: list[float] = []
    for pair in range(_BLOCK_COUNT):
        times_s = {}
        for is_attached in (True, False) if pair % 2 else (False, True):
            if is_attached:
                attachment = training.attach()
                _time_s(training, 3)  # the first iteration registers, the next ones rest
                times_s[True] = _time_s(training, step_count)
                attachment.detach()
            else:
                _time_s(training, 3)
                times_s[False] = _time_s(training, step_count)
        if pair >= _DROPPED:
            slower.append(times_s[True] / times_s[False] - 1)
            without_s.append(times_s[False])
    computation_s = fmean(without_s) / training.computation_count
    margin = 2 * stdev(slower) / len(slower) ** 0.5
    return name, 1e3 * computation_s, 100 * fmean(slower), 100 * margin, 1e6 * fmean(slower) * computation_s


def _time_s(training: Training, step_count: int) -> float:
    """Return the time of a step."""
    begun_s = time.perf_counter()
    for _ in range(step_count):
        training.step()
    return (time.perf_counter() - begun_s) / step_count


def _layers(width: int) -> Any:
    from torch import nn

    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())))


def _model(width: int) -> Training:
    import torch

    model, inputs = _layers(width), torch.randn(64, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(_MICROBATCHES):
            model(inputs).square().mean().backward()
        optimizer.step()

    return Training(
        step, lambda: attach_model(model, optimizer, job_id="job", connect=connect), 2 * _MICROBATCHES
    )


def _pipeline(width: int) -> Training:
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stage = PipelineStage(_layers(width), 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, _MICROBATCHES, loss_fn=nn.MSELoss())
    inputs = torch.randn(64 * _MICROBATCHES, width)

    def step() -> None:
        schedule.step(inputs, target=inputs)

    return Training(step, lambda: attach(schedule, job_id="job", connect=connect), 2 * _MICROBATCHES)


if __name__ == "__main__":
    if importlib.util.find_spec("torch") is None:
        print("training_cost: skipped, torch is not installed", file=sys.stderr)
    else:
        main("training_cost", run)
