"""One rank of the emulated training job: `python -m perseus.demo.trainer TASK`, a `RankTask` as JSON.

It stands in for a framework's training process and knows of Perseus only the probe: it follows its schedule,
waits for its neighbours' activations and gradients, and its computations progress at the pace of the emulated
GPU's clock. It trains until the run's folder holds a file named `stop`.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from perseus.agent.gpu.emulated import EmulatedGpu
from perseus.agent.gpu.physics import Work
from perseus.agent.link.computation import Kind
from perseus.agent.probe.client import NamedSchedule, Probe
from perseus.demo.exchange import Exchange

STOP_FILE = "stop"


@dataclass(frozen=True, slots=True)
class RankTask:
    """What one rank has to do."""

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

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


def train(task: RankTask) -> None:
    """Train until told to stop."""
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
    probe.finish()
    probe.close()
    exchange.close()
    gpu.close()


if __name__ == "__main__":
    train(RankTask(**json.loads(sys.argv[1])))
