"""Training jobs of every framework's tests: how each is started, alone, noted or in a cluster."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perseus import solver
from perseus.agent.link.computation import Kind
from perseus.demo.cluster import Cluster
from perseus.demo.workload import Workload
from perseus.emulation.physics import A100_SXM, Work
from tests.frameworks.notebook import Identity
from tests.frameworks.trainers import TrainerTask
from tests.frameworks.versions import beside

MICROBATCHES = 4
"""Microbatches of most cases: enough to show the order of a stage's computations and accumulation."""
STEADY_MICROBATCHES = 6
"""With four stages: enough that the first stage alternates, too."""
TWO_STAGES = (0.6, 1.0)
"""The light one keeps some slack under any plan."""
UNEVEN = (0.8, 0.9, 0.85, 1.0)
GPU = A100_SXM.with_clocks(4)
_IDLE = Work(compute_s=1.0, memory_s=0.0)
_TIMEOUT_S = 300

Orders = list[list[Identity]]
"""Every stage's computations."""


@dataclass(frozen=True, slots=True)
class Case:
    """A schedule, its layout and the cost of its computations on the heaviest stage at the highest clock.

    `trainer` is the module of this folder, without its ending, that trains it.
    """

    trainer: str
    schedule: str
    stage_weights: Sequence[float] = (1.0,)
    chunk_count: int = 1
    forward_s: float = 0.01
    backward_s: float = 0.02
    """Half of it is for the input's gradient and half for the weights', if they are computed separately."""
    pipeline_count: int = 1
    microbatch_count: int = MICROBATCHES
    tensor_count: int = 1
    beside: Sequence[str] = ()
    """Folders of the environment with versions other than those installed."""
    evaluate_every: int = 0
    """Iterations between evaluations; 0: there are none."""

    @property
    def has_slack(self) -> bool:
        """Whether a plan at stock's speed saves: short computations end before a clock is set."""
        return len(self.stage_weights) > 1 and self.forward_s >= 0.04

    @property
    def workload(self) -> Workload:
        return Workload(
            job_id=self.schedule.lower(),
            pipeline_count=self.pipeline_count,
            stage_weights=self.stage_weights,
            microbatch_count=self.microbatch_count,
            forward=_IDLE,
            backward=_IDLE,
            optimizer_s=0.0,
            gpu=GPU,
        )

    @property
    def nodes(self) -> Workload:
        """The workload with a GPU for each tensor-parallel rank: GPUs, not stages, are on nodes."""
        gpus = [weight for weight in self.stage_weights for _ in range(self.tensor_count)]
        return replace(self.workload, stage_weights=gpus)

    @property
    def works(self) -> list[list[tuple[int, int, float, float, float]]]:
        """Every stage's work in the trainer's format: a fifth of each is bound by memory."""
        times_s = {
            Kind.FORWARD: self.forward_s,
            Kind.BACKWARD: self.backward_s,
            Kind.BACKWARD_INPUT: self.backward_s / 2,
            Kind.BACKWARD_WEIGHT: self.backward_s / 2,
        }
        return [
            [
                (int(kind), chunk, 0.8 * time_s * weight, 0.2 * time_s * weight, 0.9)
                for kind, time_s in times_s.items()
                for chunk in range(self.chunk_count)
            ]
            for weight in self.stage_weights
        ]

    def task(self, folder: Path, **more: Any) -> TrainerTask:
        """Return its training without agents, in a new folder."""
        folder.mkdir(parents=True)
        task = TrainerTask(
            run_dir=str(folder),
            folder=str(folder),
            job_id=self.workload.job_id,
            schedule=self.schedule,
            pipeline_count=self.pipeline_count,
            stage_count=len(self.stage_weights),
            chunk_count=self.chunk_count,
            microbatch_count=self.microbatch_count,
            tensor_count=self.tensor_count,
            evaluate_every=self.evaluate_every,
        )
        return replace(task, **more)

    def under(self, cluster: Cluster, run_dir: Path, folder: Path, **more: Any) -> TrainerTask:
        """Return its training under a cluster's agents."""
        pipelines, gpus = range(self.pipeline_count), range(self.nodes.stage_count)
        return self.task(
            folder,
            run_dir=str(run_dir),
            sockets=[str(cluster.socket(pipeline)) for pipeline in pipelines],
            gpu_files=[[str(cluster.gpu_file(pipeline, gpu)) for gpu in gpus] for pipeline in pipelines],
            works=self.works,
            **more,
        )

    def command(self, *tasks: TrainerTask) -> list[str]:
        """Return Python's arguments to train tasks."""
        module = f"tests.frameworks.{self.trainer}_trainer"
        return [*beside(*self.beside), module, *(task.to_json() for task in tasks)]

    def train(self, *tasks: TrainerTask) -> str:
        """Train tasks without agents; return what they logged."""
        done = subprocess.run(
            [sys.executable, *self.command(*tasks)],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stderr


def losses_in(folder: Path) -> list[list[str]]:
    """Return every pipeline's losses, bit for bit: a line for each iteration."""
    return [path.read_text().splitlines() for path in sorted(folder.glob("losses-*"))]


def check_losses(case: Case, attached: TrainerTask) -> None:
    """Train as many iterations without Perseus, and compare the losses bit for bit.

    A kill may come before one pipeline's losses of the last iteration are written, and after another's.
    """
    folder = Path(attached.folder)
    losses = losses_in(folder)
    assert len(losses) == case.pipeline_count
    count = min(map(len, losses))
    assert max(map(len, losses)) <= count + 1
    assert losses[0][0] != losses[0][count - 1], "it did train"
    alone = folder.with_name(f"{folder.name}-alone")
    case.train(case.task(alone, iteration_count=count, layers=attached.layers))
    assert losses_in(alone) == [each[:count] for each in losses]


def notes_in(folder: Path) -> list[dict[str, Any]]:
    """Return what every rank noted; orders have identities as on the wire."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


def identities(schedule: solver.Schedule) -> Orders:
    """Return the solver's own version of a schedule, as identities."""
    return [[(int(Kind[c.kind.name]), c.microbatch, c.chunk) for c in order] for order in schedule.orders]


def one_chunk(stage_count: int, microbatch_count: int = MICROBATCHES) -> Orders:
    """Return the orders of 1F1B."""
    return identities(solver.one_forward_one_backward(stage_count, microbatch_count))


TWO_CHUNKS = identities(solver.interleaved_one_forward_one_backward(2, MICROBATCHES, 2))
"""The orders of interleaved 1F1B on two stages."""


def whole_model(microbatch_count: int = MICROBATCHES) -> Orders:
    """Return the order of replicas without pipelines."""
    return [
        [(int(kind), each, 0) for each in range(microbatch_count) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    ]
