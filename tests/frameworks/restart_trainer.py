"""Train the transformer of `torch_trainer`, with a report of each iteration: `-m …restart_trainer TASK`.

Its first iterations run on the emulated GPUs without an agent, at stock; after that it is attached. So a run
has its own measurement of stock, by the same processes on the same machine. Every rank writes one line per
iteration, which survives a kill.

During training, a number in the file `microbatches` of the run's folder starts a ramp: the following
iterations have that number of microbatches, with a new schedule: at first without an agent, and then attached
again.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from perseus.agent.link.address import SOCKET_VARIABLE
from perseus.agent.probe.attachment import Attachment
from perseus.agent.torch import attach
from perseus.emulation.gpu import EmulatedGpu
from tests.frameworks.torch_trainer import LENGTH, MICROBATCH_SIZE, VOCABULARY, make_chunks, schedule_of
from tests.frameworks.trainers import TrainerTask, main

STOCK_ITERATIONS = 12
RAMP_FILE = "microbatches"
_NO_AGENT = "/nonexistent/agent.sock"
_GO_ON, _STOP = 0, -1


def report_file(folder: Path, pipeline: int, stage: int) -> Path:
    """Return the file of a rank's iterations: `[begin_s, end_s, energy_j, microbatch_count, losses]` each."""
    return folder / f"report-{pipeline}-{stage}.jsonl"


class Rank:
    """One rank's training."""

    def __init__(self, task: TrainerTask, rank: int, reported: Callable[[int, int], TextIO]) -> None:
        sizes = (task.pipeline_count, task.stage_count)
        self._mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "pp"))
        self._task = task
        self._is_first = rank == 0
        self.pipeline, self.stage = self._mesh.get_coordinate()
        self._chunks = make_chunks(task, self.stage)
        self._schedule = schedule_of(task, self.stage, self._chunks, self._mesh.get_group("pp"))
        self._parameters = [parameter for chunk in self._chunks for parameter in chunk.parameters()]
        self._optimizer = torch.optim.SGD(self._parameters, lr=0.1)
        self._iteration = 0
        self._reported = reported(self.pipeline, self.stage)
        self._gpu = EmulatedGpu(Path(task.gpu_files[self.pipeline][self.stage])) if task.gpu_files else None

    def train_attached(self) -> None:
        """Train at stock without an agent, and then with one until a request to stop."""
        message = self._task.microbatch_count
        while message != _STOP:
            if message != self._task.microbatch_count:
                self._take(message)
            until = self._iteration + STOCK_ITERATIONS
            with self._attach(_NO_AGENT):
                while self._iteration < until:
                    self._train(lambda: _STOP)
            with self._attach(self._task.sockets[self.pipeline]):
                message = self._train(self._heard)

    def train_alone(self, microbatch_counts: list[int]) -> None:
        """Train iterations with these numbers of microbatches."""
        for count in microbatch_counts:
            if count != self._task.microbatch_count:
                self._take(count)
            self._train(lambda: _STOP)

    def _heard(self) -> int:
        if self._task.is_over(self._iteration):
            return _STOP
        ramp = Path(self._task.run_dir, RAMP_FILE)
        count = int(ramp.read_text()) if ramp.exists() else self._task.microbatch_count
        return count if count != self._task.microbatch_count else _GO_ON

    def _take(self, microbatch_count: int) -> None:
        self._task = replace(self._task, microbatch_count=microbatch_count)
        self._schedule = schedule_of(self._task, self.stage, self._chunks, self._mesh.get_group("pp"))

    def _attach(self, socket: str) -> Attachment:
        arguments = self._task.attach_arguments(self.pipeline, self.stage)
        os.environ[SOCKET_VARIABLE] = socket
        attachment: Attachment = attach(self._schedule, device_mesh=self._mesh, **arguments)
        return attachment

    def _train(self, hear: Callable[[], int]) -> int:
        """Train until rank 0 receives a request, and return it on all ranks."""
        message = _GO_ON
        while message == _GO_ON:
            begin_s = time.monotonic()
            losses = self._compute()
            word = torch.tensor([float(hear() if self._is_first else _GO_ON)])
            distributed.all_reduce(word)
            message = int(word.item())
            self._optimizer.step()
            self._optimizer.zero_grad()
            energy_j = self._gpu.total_energy_j() if self._gpu is not None else 0.0
            reported = [begin_s, time.monotonic(), energy_j, self._task.microbatch_count, losses]
            self._reported.write(json.dumps(reported) + "\n")
            self._reported.flush()
        return message

    def _compute(self) -> list[str]:
        generator = torch.Generator().manual_seed(1000 * self.pipeline + self._iteration)
        size = (self._task.microbatch_count * MICROBATCH_SIZE, LENGTH + 1)
        tokens = torch.randint(0, VOCABULARY, size, generator=generator)
        inputs = [tokens[:, :-1]] if self.stage == 0 else []
        found: list[torch.Tensor] = []
        is_last = self.stage == self._task.stage_count - 1
        self._schedule.step(*inputs, **({"target": tokens[:, 1:], "losses": found} if is_last else {}))
        for parameter in self._parameters:
            distributed.all_reduce(parameter.grad, group=self._mesh.get_group("dp"))
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._iteration += 1
        return [loss.item().hex() for loss in found]


def train(task: TrainerTask, rank: int) -> None:
    """Train one rank."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=task.rendezvous, rank=rank, world_size=task.rank_count)
    folder = Path(task.losses_dir)
    one = Rank(task, rank, lambda pipeline, stage: report_file(folder, pipeline, stage).open("w"))
    if task.is_attached:
        one.train_attached()
    else:
        one.train_alone(json.loads((folder / RAMP_FILE).read_text()))
    distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(train))
