"""What the frameworks' trainers share: the task on their command line, and a process for every rank of it.

Attached, computations take as long as emulated GPUs say, and the ranks train until the run's folder holds a
file named `stop`; alone, they train a number of iterations, as fast as they can. Either way the rank of every
pipeline that has the losses leaves them, bit for bit, in a file.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perseus.agent.gpu.physics import Work
from perseus.agent.link.address import SOCKET_VARIABLE
from perseus.agent.link.computation import Kind
from perseus.agent.probe.tested_versions import met
from perseus.demo.emulated_probe import Works, emulated_connect
from perseus.demo.trainer import STOP_FILE

_PR_SET_PDEATHSIG = 1  # of prctl(2)


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
    layers: Sequence[int] = ()
    """How many layers each stage has; none: one each."""

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    @property
    def is_attached(self) -> bool:
        """Whether there is somebody to attach to."""
        return bool(self.sockets)

    @property
    def rendezvous(self) -> str:
        """Where the ranks find each other, as torch.distributed takes it."""
        return f"file://{self.losses_dir}/rendezvous"

    @property
    def rank_count(self) -> int:
        """Ranks of the whole job."""
        return self.pipeline_count * self.stage_count

    def attach_arguments(self, pipeline: int, stage: int) -> dict[str, Any]:
        """Keyword arguments of every framework's `attach`; the agent's socket goes into the environment."""
        os.environ[SOCKET_VARIABLE] = self.sockets[pipeline]
        works: Works = {(Kind(kind), chunk): Work(*work) for kind, chunk, *work in self.works[stage]}
        return {
            "job_id": self.job_id,
            "connect": emulated_connect(Path(self.gpu_files[pipeline][stage]), works),
        }

    def is_over(self, iteration_count: int) -> bool:
        """Whether to stop after so many iterations; one rank asks and tells the others."""
        if self.is_attached:
            return Path(self.run_dir, STOP_FILE).exists()
        return iteration_count == self.iteration_count

    def leave_losses(self, pipeline: int, losses: Sequence[float]) -> None:
        """Write a pipeline's losses, bit for bit."""
        text = json.dumps([loss.hex() for loss in losses])
        Path(self.losses_dir, f"losses-{pipeline}.json").write_text(text)


def main(train: Callable[[TrainerTask, int], None]) -> int:
    """Fork a process for every rank of the command line's task, and wait for all; 0 if all went well."""
    task = TrainerTask(**json.loads(sys.argv[1]))
    if task.is_attached:
        # An emulated GPU is as punctual as its process: other work on this machine's cores must not be its
        # wait. Such ranks sleep nearly all the time, so whatever else runs hardly notices.
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    ranks = [_fork(train, task, rank) for rank in range(task.rank_count)]
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])) for rank in ranks)


def _fork(train: Callable[[TrainerTask, int], None], task: TrainerTask, rank: int) -> int:
    process = os.fork()
    if process != 0:
        return process
    # Whoever ends the parent ends its ranks.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    status = 1
    try:
        train(task, rank)
        Path(task.losses_dir, f"ran-{rank}.json").write_text(json.dumps(list(met.values())))
        status = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
