"""The common part of the frameworks' trainers: tasks on the command line, and a process for every rank.

Attached to agents, computations take as long as on emulated GPUs, and the ranks train until the run's folder
holds a file named `stop`; otherwise, they train a number of iterations, as fast as they can: alone, attached
to a notebook, or with a failure planted in the hook.
"""

import ctypes
import json
import logging
import os
import pkgutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from perseus.agent.link.address import SOCKET_VARIABLE
from perseus.agent.link.computation import Kind
from perseus.agent.probe.client import Probe
from perseus.agent.probe.tested_versions import met
from perseus.demo.emulated_probe import Works, emulated_connect
from perseus.demo.trainer import STOP_FILE
from perseus.emulation.physics import Work
from tests.frameworks.notebook import Notebook

_PR_SET_PDEATHSIG = 1  # of prctl(2)


@dataclass(frozen=True, slots=True)
class TrainerTask:
    """A training task, which leaves its files in `folder`. `sockets[p]` is the agent of a pipeline."""

    run_dir: str
    folder: str
    job_id: str
    schedule: str
    pipeline_count: int
    stage_count: int
    chunk_count: int
    microbatch_count: int
    iteration_count: int = 0
    sockets: Sequence[str] = ()
    gpu_files: Sequence[Sequence[str]] = ()
    works: Sequence[Sequence[tuple[int, int, float, float, float]]] = ()
    """For every stage: kind, chunk, and the work's compute-bound and memory-bound seconds and activity."""
    tensor_count: int = 1
    """Tensor-parallel ranks of each stage, with GPUs beside each other."""
    evaluate_every: int = 0
    """Iterations between evaluations; 0: there are none."""
    layers: Sequence[int] = ()
    """Layers of each stage; none: one each."""
    is_noted: bool = False
    """Attached to a notebook in place of an agent."""
    planted: str = ""
    """A function of Perseus that raises on `planted_ranks`; without an agent."""
    planted_ranks: Sequence[int] = ()

    def to_json(self) -> str:
        """Return the task as text for the command line."""
        return json.dumps(asdict(self))

    @property
    def is_attached(self) -> bool:
        """Whether there is something to attach to."""
        return bool(self.sockets or self.is_noted or self.planted)

    @property
    def rank_count(self) -> int:
        """Number of ranks of the whole job."""
        return self.pipeline_count * self.stage_count * self.tensor_count


class Rank:
    """One rank of a task: what it attaches to, how long it trains, and what it leaves behind."""

    def __init__(self, task: TrainerTask, number: int) -> None:
        self.task = task
        self.number = number
        self.notebook = Notebook()

    def attached(
        self, attach: Callable[..., AbstractContextManager[Any]], pipeline: int, stage: int, tensor: int = 0
    ) -> AbstractContextManager[Any]:
        """Attach at a place, until the end of the block; without something to attach to, do nothing."""
        if not self.task.is_attached:
            return nullcontext()
        return attach(**self.attach_arguments(pipeline, stage, tensor))

    def attach_arguments(self, pipeline: int, stage: int, tensor: int = 0) -> dict[str, Any]:
        """Return arguments for every framework's `attach`; put the agent's socket into the environment."""
        task = self.task
        if task.is_noted:
            return {"job_id": task.job_id, "connect": self.notebook.connect}
        if not task.sockets:
            os.environ[SOCKET_VARIABLE] = f"{task.folder}/no-agent.sock"
            return {"job_id": task.job_id, "connect": Probe.connect}
        os.environ[SOCKET_VARIABLE] = task.sockets[pipeline]
        works: Works = {(Kind(kind), chunk): Work(*work) for kind, chunk, *work in task.works[stage]}
        gpu_file = task.gpu_files[pipeline][stage * task.tensor_count + tensor]
        return {"job_id": task.job_id, "connect": emulated_connect(Path(gpu_file), works)}

    def iterations(self, iteration_count: int) -> Iterator[int]:
        """Number iterations until the end: the first rank sees it, and the others hear of it after each."""
        import torch
        from torch import distributed

        for iteration in count():
            yield iteration
            stops = Path(self.task.run_dir, STOP_FILE).exists()
            is_last = torch.tensor(float(stops if self.task.sockets else iteration + 1 == iteration_count))
            distributed.broadcast(is_last, 0)
            if is_last:
                break

    def leave_losses(self, pipeline: int, losses: Sequence[float]) -> None:
        """Append an iteration's losses to a pipeline's file, bit for bit."""
        with Path(self.task.folder, f"losses-{pipeline}").open("a") as file:
            file.write(" ".join(loss.hex() for loss in losses) + "\n")


def main(train: Callable[[Rank], None], prepare: Callable[[TrainerTask], None] | None = None) -> int:
    """Fork a process for every rank of the command line's tasks, one task after another; return 0 on success.

    `prepare` runs before: its imports happen once for all ranks, and don't delay any of them.
    """
    logging.basicConfig()
    logging.getLogger("perseus.attachment").setLevel(logging.DEBUG)  # with differences from tables
    tasks = [TrainerTask(**json.loads(text)) for text in sys.argv[1:]]
    if prepare is not None:
        prepare(tasks[0])
    if tasks[0].sockets:
        _be_punctual()
    status = 0
    for task in tasks:
        ranks = [_fork(train, Rank(task, number)) for number in range(task.rank_count)]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        status = max(status, *map(abs, statuses))
    return status


def _be_punctual() -> None:
    """Give this process and its children priority over all others, if permitted.

    An emulated GPU is as punctual as its process, so it must not wait for other work on this machine's cores.
    Ranks sleep nearly all the time, so they hardly disturb other processes.
    """
    for thread in os.listdir("/proc/self/task"):
        with suppress(PermissionError, ProcessLookupError):
            os.sched_setscheduler(int(thread), os.SCHED_FIFO, os.sched_param(1))


def _fork(train: Callable[[Rank], None], rank: Rank) -> int:
    process = os.fork()
    if process != 0:
        return process
    # The ranks die with their parent.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    task, status = rank.task, 1
    try:
        if task.planted:
            log = os.open(f"{task.folder}/log-{rank.number}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            for output in (1, 2):  # torchtitan logs to the first
                os.dup2(log, output)
            if rank.number in task.planted_ranks:
                _plant(task.planted)
        _train_in_group(train, rank)
        left = {"ran": list(met.values()), **rank.notebook.notes()}
        Path(task.folder, f"rank-{rank.number}.json").write_text(json.dumps(left))
        status = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _train_in_group(train: Callable[[Rank], None], rank: Rank) -> None:
    """Train as a process that torchrun started, in a group of all ranks.

    The group outlives what `train` has made: if a model were its last owner, its deletion would deadlock with
    a thread of gloo.
    """
    import torch
    from torch import distributed

    count = rank.task.rank_count
    names = {"RANK": rank.number, "LOCAL_RANK": rank.number, "WORLD_SIZE": count, "GROUP_RANK": 0}
    launched = {"LOCAL_WORLD_SIZE": count, "TORCHELASTIC_RUN_ID": "run", "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in (names | launched).items()})
    os.environ.update(CUDA_VISIBLE_DEVICES="", MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{rank.task.folder}/rendezvous", rank=rank.number, world_size=count
    )
    train(rank)
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _plant(name: str) -> None:
    def planted(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    owner, _, function = name.rpartition(".")
    setattr(pkgutil.resolve_name(owner), function, planted)
