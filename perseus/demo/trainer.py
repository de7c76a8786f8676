"""One rank of the emulated training job: `python -m perseus.demo.trainer TASK`, a `RankTask` as JSON.

It replaces a framework's training process and uses only the probe of Perseus: it follows its schedule, waits
for its neighbours' activations and gradients, and its computations progress with the emulated GPU's clock. It
trains until the run's folder holds a file named `stop`.

Between iterations it evaluates from time to time, on every rank by itself, and records the duration.
Evaluations are not marked, so Perseus sees only a gap.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from perseus.agent.link.computation import Kind
from perseus.agent.probe.client import Probe
from perseus.agent.probe.job_spec import NamedSchedule
from perseus.demo.exchange import Exchange
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import Work

STOP_FILE = "stop"


@dataclass(frozen=True, slots=True)
class RankTask:
    """The task of one rank."""

    run_dir: str
    agent_socket: str
    gpu_file: str
    job_id: str
    pipeline: int
    pipeline_count: int
    stage: int
    stage_count: int
    microbatch_count: int
    order: Sequence[tuple[int, int]]
    """(kind, microbatch) of every computation, in the order of 1F1B."""
    forward: tuple[float, float, float]
    """Compute-bound seconds, memory-bound seconds, activity."""
    backward: tuple[float, float, float]
    optimizer_s: float
    evaluation_s: float = 0.0
    """Duration of an evaluation at the highest clock."""
    evaluation_interval: int = 0
    """Iterations between evaluations; 0 for none."""

    def to_json(self) -> str:
        """Return the task as text for the command line."""
        return json.dumps(asdict(self))


def train(task: RankTask) -> None:
    """Train until the stop file appears."""
    works = {Kind.FORWARD: Work(*task.forward), Kind.BACKWARD: Work(*task.backward)}
    gpu = EmulatedGpu(Path(task.gpu_file))
    probe = Probe.connect(
        socket_path=task.agent_socket,
        job_id=task.job_id,
        pipeline=task.pipeline,
        stage=task.stage,
        tensor=0,
        gpu_uuid=gpu.uuid,
    )
    probe.register(
        pipeline_count=task.pipeline_count,
        stage_count=task.stage_count,
        schedule=NamedSchedule("1f1b", task.microbatch_count),
    )
    order = [(Kind(kind), microbatch) for kind, microbatch in task.order]
    run_dir = Path(task.run_dir)
    exchange = Exchange.connect(run_dir, (task.pipeline, task.stage), task.pipeline_count, task.stage_count)
    stop_file = run_dir / STOP_FILE
    evaluations = Evaluations(task, works[Kind.FORWARD])
    goes_on = True
    while goes_on:
        with probe.iteration():
            for kind, microbatch in order:
                if kind is Kind.FORWARD:
                    exchange.receive_activations(microbatch)
                else:
                    exchange.receive_gradients(microbatch)
                with probe.computation(kind, microbatch):
                    gpu.execute(works[kind])
                if kind is Kind.FORWARD:
                    exchange.send_activations(microbatch)
                else:
                    exchange.send_gradients(microbatch)
            goes_on = exchange.synchronise(lambda: not stop_file.exists())
            time.sleep(task.optimizer_s)
        if evaluations.iteration_ended(gpu):
            exchange.synchronise(lambda: True)  # all ranks' results are combined
    probe.finish()
    probe.close()
    exchange.close()
    gpu.close()


class Evaluations:
    """A rank's evaluations during its training; `evaluations_file` records them all."""

    def __init__(self, task: RankTask, forward: Work) -> None:
        self._task = task
        self._file = evaluations_file(Path(task.run_dir), task.pipeline, task.stage)
        self._iteration = -1
        self._found: list[tuple[int, float]] = []
        self._forward = forward

    def iteration_ended(self, gpu: EmulatedGpu) -> bool:
        """Evaluate if it is due; return whether it was."""
        self._iteration += 1
        interval = self._task.evaluation_interval
        if not interval or (self._iteration + 1) % interval:
            return False
        # As compute-bound as the forward computations that it consists of.
        forward = self._forward
        count = self._task.evaluation_s / (forward.compute_s + forward.memory_s)
        begun_s = time.monotonic()
        gpu.execute(Work(forward.compute_s * count, forward.memory_s * count, forward.activity))
        self._found.append((self._iteration, time.monotonic() - begun_s))
        draft = self._file.with_suffix(".draft")
        draft.write_text(json.dumps(self._found))
        draft.rename(self._file)
        return True


def evaluations_file(run_dir: Path, pipeline: int, stage: int) -> Path:
    """Return the file where a rank records its evaluations: iteration before it, and duration in seconds."""
    return run_dir / f"evaluations-{pipeline}-{stage}.json"


if __name__ == "__main__":
    train(RankTask(**json.loads(sys.argv[1])))
