"""What a framework's hook costs the trainer for each computation, torch's with and without an agent.

A stage object of `torch.distributed.pipelining` whose forward does nothing: its call is timed as it is, with
the hook around it, and after `detach`. `make test-frameworks` makes the environment that has torch:

    .venv-frameworks/bin/python -m benchmarks.adapters
"""

import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.harness import Column, Table, main
from benchmarks.probe import COMPUTATIONS, PACE_S, TRAINER_CORE, UUID, compute, running_agent
from perseus.agent.attachment import Marks
from perseus.agent.probe import SOCKET_VARIABLE, Probe

_MICROBATCHES = 100


def run() -> list[Table]:
    """Measure all conditions."""
    os.sched_setaffinity(0, {TRAINER_CORE})
    rows = []
    for condition in ("not attached", "attached, agent reads", "attached, no agent", "detached again"):
        costs_us = _measure(condition)
        rows.append((condition, median(costs_us), quantiles(costs_us, n=100)[98]))
    columns = (Column("condition"), Column("median, µs", ".2f"), Column("99 %, µs", ".2f"))
    note = "Begin and end together. The empty forward itself and the clock that times it are in every row."
    return [
        Table(
            "One computation of a stage of torch's pipelining, computing nothing", columns, tuple(rows), note
        )
    ]


def _measure(condition: str) -> list[float]:
    from torch import distributed

    from perseus.agent.torch import attach

    with tempfile.TemporaryDirectory(prefix="perseus-") as folder, running_agent(Path(folder)):
        socket = "nobody.sock" if condition == "attached, no agent" else "agent.sock"
        os.environ[SOCKET_VARIABLE] = str(Path(folder, socket))
        distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
        schedule, stage = _schedule()
        if condition != "not attached":
            attachment = attach(schedule, job_id="job", connect=_connect)
            schedule.step(return_outputs=False)  # the first iteration registers
        if condition == "detached again":
            attachment.detach()
        # Only the calls are timed, so the iterations are those of a schedule that does little else.
        costs_us: list[float] = []
        schedule._step_microbatches = lambda *_, **__: _time_forwards(stage, costs_us)
        while len(costs_us) < COMPUTATIONS:
            schedule.step(return_outputs=False)
        if condition.startswith("attached"):
            attachment.detach()
        distributed.destroy_process_group()
    return costs_us


def _schedule() -> tuple[Any, Any]:
    """A pipeline of one stage, and the stage, whose forward and backward do nothing."""
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stage = PipelineStage(nn.Identity(), 0, 1, torch.device("cpu"))
    stage.forward_one_chunk = lambda _microbatch: None
    schedule = ScheduleGPipe(stage, _MICROBATCHES, loss_fn=nn.MSELoss())
    schedule._step_microbatches = lambda *_, **__: stage.forward_one_chunk(0)
    return schedule, stage


def _connect(**arguments: Any) -> Marks:
    return Probe.connect(**{**arguments, "gpu_uuid": UUID})


def _time_forwards(stage: Any, costs_us: list[float]) -> None:
    for microbatch in range(_MICROBATCHES):
        begun_ns = time.perf_counter_ns()
        stage.forward_one_chunk(microbatch)
        costs_us.append((time.perf_counter_ns() - begun_ns) / 1000)
        compute(PACE_S)


if __name__ == "__main__":
    if importlib.util.find_spec("torch") is None:
        print("adapters: skipped, torch is not installed in this environment", file=sys.stderr)
    else:
        main("adapters", run)
