"""The common part of the frameworks' trainers: the task on the command line, and a process for every rank.

Attached, computations take as long as on emulated GPUs, and the ranks train until the run's folder holds a
file named `stop`; alone, they train a number of iterations, as fast as they can. In both cases the rank of
every pipeline that has the losses writes them, bit for bit, to a file.
"""

import ctypes
import json
import os
import pkgutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perseus.agent.link.address import SOCKET_VARIABLE
from perseus.agent.link.computation import Kind
from perseus.agent.probe.client import Probe
from perseus.agent.probe.tested_versions import met
from perseus.demo.emulated_probe import Works, emulated_connect
from perseus.demo.trainer import STOP_FILE
from perseus.emulation.physics import Work
from tests.frameworks.punctual import make_punctual

FAIL_FILE, CAUGHT_FILE = "fail", "caught"
"""Files of the run's folder: training has to raise an exception; it was caught."""

_PR_SET_PDEATHSIG = 1  # of prctl(2)


@dataclass(frozen=True, slots=True)
class TrainerTask:
    """A training task. `sockets[p]` is the agent of a pipeline; none: alone."""

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
    tensor_count: int = 1
    """Tensor-parallel ranks of each stage, with GPUs beside each other."""
    break_for: str = ""
    """What interrupts the training between iterations from time to time, by name; none: nothing."""
    layers: Sequence[int] = ()
    """Layers of each stage; none: one each."""
    planted: str = ""
    """A function of Perseus that raises on `planted_ranks`, or the first "step"; without an agent."""
    planted_ranks: Sequence[int] = ()

    def to_json(self) -> str:
        """Return the task as text for the command line."""
        return json.dumps(asdict(self))

    @property
    def is_attached(self) -> bool:
        """Whether there is something to attach to."""
        return bool(self.sockets or self.planted)

    @property
    def rendezvous(self) -> str:
        """The ranks' rendezvous, in torch.distributed's format."""
        return f"file://{self.losses_dir}/rendezvous"

    @property
    def rank_count(self) -> int:
        """Number of ranks of the whole job."""
        return self.pipeline_count * self.stage_count * self.tensor_count

    def attach_arguments(self, pipeline: int, stage: int, tensor: int = 0) -> dict[str, Any]:
        """Return arguments for every framework's `attach`; put the agent's socket into the environment."""
        if not self.sockets:
            os.environ[SOCKET_VARIABLE] = f"{self.losses_dir}/no-agent.sock"
            return {"job_id": self.job_id, "connect": Probe.connect}
        os.environ[SOCKET_VARIABLE] = self.sockets[pipeline]
        works: Works = {(Kind(kind), chunk): Work(*work) for kind, chunk, *work in self.works[stage]}
        return {
            "job_id": self.job_id,
            "connect": emulated_connect(
                Path(self.gpu_files[pipeline][stage * self.tensor_count + tensor]), works
            ),
        }

    def is_over(self, iteration_count: int) -> bool:
        """Whether to stop after this many iterations; one rank checks and informs the others."""
        if self.sockets:
            return Path(self.run_dir, STOP_FILE).exists()
        return iteration_count == self.iteration_count

    def leave_losses(self, pipeline: int, losses: Sequence[float]) -> None:
        """Write a pipeline's losses, bit for bit."""
        text = json.dumps([loss.hex() for loss in losses])
        Path(self.losses_dir, f"losses-{pipeline}.json").write_text(text)


def main(
    train: Callable[[TrainerTask, int], None], prepare: Callable[[TrainerTask], None] | None = None
) -> int:
    """Fork a process for every rank of the command line's tasks, one task after another; return 0 on success.

    `prepare` runs before: its imports happen once for all ranks, and don't delay any of them.
    """
    tasks = [TrainerTask(**json.loads(text)) for text in sys.argv[1:]]
    if prepare is not None:
        prepare(tasks[0])
    if tasks[0].sockets:
        make_punctual(os.getpid())
    status = 0
    for task in tasks:
        ranks = [_fork(train, task, rank) for rank in range(task.rank_count)]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        status = max(status, *map(abs, statuses))
    return status


def _fork(train: Callable[[TrainerTask, int], None], task: TrainerTask, rank: int) -> int:
    process = os.fork()
    if process != 0:
        return process
    # The ranks die with their parent.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    status = 1
    try:
        if task.planted:
            log = os.open(f"{task.losses_dir}/log-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            for output in (1, 2):  # torchtitan logs to the first
                os.dup2(log, output)
            if rank in task.planted_ranks and task.planted != "step":
                _plant(task.planted)
        train(task, rank)
        Path(task.losses_dir, f"ran-{rank}.json").write_text(json.dumps(list(met.values())))
        status = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _plant(name: str) -> None:
    def planted(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    owner, _, function = name.rpartition(".")
    setattr(pkgutil.resolve_name(owner), function, planted)
