"""A tiny transformer, really trained with `torch.distributed.pipelining` on CPUs: `torch_trainer.py TASK`.

One process forks all ranks of the job. Attached, their computations take as long as emulated GPUs say, and
they train until the run's folder holds a file named `stop`; alone, they train a number of iterations, as fast
as they can. Either way every last stage leaves its losses, bit for bit, in a file.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.nn import functional

from perseus.agent.computation import Kind
from perseus.agent.gpu.physics import Work
from perseus.agent.torch import attach
from perseus.demo.emulated_probe import Works, emulated_connect
from perseus.demo.trainer import STOP_FILE

_PR_SET_PDEATHSIG = 1  # of prctl(2)

VOCABULARY, WIDTH, LENGTH, MICROBATCH_SIZE = 64, 32, 16, 2


@dataclass(frozen=True, slots=True)
class TrainerTask:
    """What to train, and how. `sockets[p]` is the agent of a pipeline; none: alone."""

    run_dir: str
    losses_dir: str
    job_id: str
    schedule: str
    pipeline_count: int
    stage_count: int
    chunk_count: int
    microbatch_count: int
    iteration_count: int
    sockets: Sequence[str] = ()
    gpu_files: Sequence[Sequence[str]] = ()
    works: Sequence[Sequence[tuple[int, int, float, float, float]]] = ()
    """For every stage: kind, chunk, and the work's compute-bound and memory-bound seconds and activity."""

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


class Chunk(nn.Module):  # type: ignore[misc]
    """A block of the transformer; the first one has the embedding, the last one the head."""

    def __init__(self, position: int, count: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if position == 0 else None
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY) if position == count - 1 else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        hidden = self.block(hidden)
        return self.head(hidden) if self.head is not None else hidden


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.reshape(-1, VOCABULARY), target.reshape(-1))


def make_schedule(task: TrainerTask, stage: int, group: Any) -> tuple[Any, list[nn.Module]]:
    """This rank's schedule, and the chunks of the model that it trains."""
    count = task.stage_count * task.chunk_count
    schedule_class = get_schedule_class(task.schedule)
    is_v_shaped = task.schedule in ("ZBVZeroBubble", "DualPipeV")
    positions = [stage + chunk * task.stage_count for chunk in range(task.chunk_count)]
    if is_v_shaped:
        positions = [stage, count - 1 - stage]
    stages, chunks = [], []
    for position in positions:
        torch.manual_seed(position)
        chunk = Chunk(position, count)
        chunks.append(chunk)
        stages.append(PipelineStage(chunk, position, count, torch.device("cpu"), group=group))
    of_stages = stages if issubclass(schedule_class, PipelineScheduleMulti) else stages[0]
    return schedule_class(of_stages, task.microbatch_count, loss_fn=loss_of), chunks


def train(task: TrainerTask, rank: int) -> None:
    """Train one rank."""
    torch.set_num_threads(1)
    world = task.pipeline_count * task.stage_count
    distributed.init_process_group(
        "gloo", init_method=f"file://{task.losses_dir}/rendezvous", rank=rank, world_size=world
    )
    mesh = init_device_mesh("cpu", (task.pipeline_count, task.stage_count), mesh_dim_names=("dp", "pp"))
    pipeline, stage = divmod(rank, task.stage_count)
    schedule, chunks = make_schedule(task, stage, mesh.get_group("pp"))
    attachment = None
    if task.sockets:
        os.environ["PERSEUS_AGENT_SOCKET"] = task.sockets[pipeline]
        works: Works = {(Kind(k), chunk): Work(*work) for k, chunk, *work in task.works[stage]}
        attachment = attach(
            schedule,
            job_id=task.job_id,
            device_mesh=mesh,
            connect=emulated_connect(Path(task.gpu_files[pipeline][stage]), works),
        )
    optimizer = torch.optim.SGD([p for chunk in chunks for p in chunk.parameters()], lr=0.1)
    # The model's last chunk says what the losses are: in a V it is on the first stage.
    has_losses = any(chunk.head is not None for chunk in chunks)
    losses: list[str] = []
    iteration, goes_on = 0, True
    while goes_on:
        generator = torch.Generator().manual_seed(1000 * pipeline + iteration)
        size = (task.microbatch_count * MICROBATCH_SIZE, LENGTH + 1)
        tokens = torch.randint(0, VOCABULARY, size, generator=generator)
        inputs = [tokens[:, :-1]] if chunks[0].embedding is not None else []
        found: list[torch.Tensor] = []
        schedule.step(*inputs, **({"target": tokens[:, 1:], "losses": found} if has_losses else {}))
        losses += [loss.item().hex() for loss in found]
        for chunk in chunks:
            for parameter in chunk.parameters():
                distributed.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        # The norm of all gradients, as for clipping: here all ranks wait for each other.
        norm = torch.stack([p.grad.square().sum() for chunk in chunks for p in chunk.parameters()]).sum()
        iteration += 1
        is_last = (
            Path(task.run_dir, STOP_FILE).exists() if task.sockets else iteration == task.iteration_count
        )
        state = torch.stack([norm, torch.tensor(float(rank == 0 and is_last))])
        distributed.all_reduce(state)
        goes_on = state[1].item() == 0
        optimizer.step()
        optimizer.zero_grad()
    if attachment is not None:
        attachment.detach()
    if has_losses:
        Path(task.losses_dir, f"losses-{pipeline}.json").write_text(json.dumps(losses))
    distributed.destroy_process_group()


def main(task: TrainerTask) -> int:
    """Fork every rank, and wait for all."""
    # An emulated GPU is as punctual as its process: other work on this machine's cores must not be its wait.
    with suppress(PermissionError):
        os.nice(-10)
    ranks = []
    for rank in range(task.pipeline_count * task.stage_count):
        process = os.fork()
        if process == 0:
            status = 1
            # Whoever ends the parent ends its ranks.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            try:
                train(task, rank)
                status = 0
            except BaseException as error:
                sys.excepthook(type(error), error, error.__traceback__)
            finally:
                sys.stderr.flush()
                os._exit(status)
        ranks.append(process)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks]
    return max(map(abs, statuses))


if __name__ == "__main__":
    sys.exit(main(TrainerTask(**json.loads(sys.argv[1]))))
