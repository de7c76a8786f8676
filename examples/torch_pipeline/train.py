"""A tiny transformer in a pipeline of four, under Perseus.

    python examples/torch_pipeline/train.py

needs no GPU: it starts a coordinator and an agent on this machine, trains on CPUs with every computation
taking as long as an emulated A100 says, and tells what the plan saved. On GPUs, with an agent on every node
($PERSEUS_AGENT_SOCKET), the same file is started as always:

    torchrun --nproc-per-node 4 examples/torch_pipeline/train.py

What Perseus needs of it is the one line with `attach`.
"""

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from perseus.agent.computation import Kind
from perseus.agent.gpu.physics import A100_SXM, Work
from perseus.agent.torch import attach
from perseus.demo.cluster import Cluster
from perseus.demo.workload import Workload

STAGES, MICROBATCHES, ITERATIONS = 4, 8, 1000
VOCABULARY, WIDTH, LENGTH, BATCH = 64, 32, 16, 16
# The last stage is the heaviest, and the others can't be cut evenly.
EMULATED = Workload(
    job_id="tiny-transformer",
    pipeline_count=1,
    stage_weights=(0.8, 0.9, 0.85, 1.0),
    microbatch_count=MICROBATCHES,
    forward=Work(compute_s=0.024, memory_s=0.006, activity=0.9),
    backward=Work(compute_s=0.048, memory_s=0.012, activity=0.9),
    optimizer_s=0.0,
    gpu=A100_SXM.with_clocks(6),
)
RUN_DIR = "PERSEUS_EXAMPLE_RUN_DIR"


class Part(nn.Module):  # type: ignore[misc]
    """One stage's part of the model."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if stage == 0 else nn.Identity()
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY) if stage == STAGES - 1 else nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Tokens or activations in, activations or logits out."""
        return self.head(self.block(self.embedding(hidden)))


def train() -> None:
    """One rank, started by torchrun."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else "cpu"
    distributed.init_process_group()
    rank = distributed.get_rank()
    part = Part(rank).to(device)
    stage = PipelineStage(part, rank, STAGES, torch.device(device))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    with attach(schedule, job_id=EMULATED.job_id, **emulated(rank)):
        for _ in range(ITERATIONS):
            tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), device=device)
            inputs = [tokens[:, :-1]] if stage.is_first else []
            schedule.step(*inputs, **({"target": tokens[:, 1:]} if stage.is_last else {}))
            optimizer.step()
            optimizer.zero_grad()
            if is_over():
                break
    distributed.destroy_process_group()


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next token."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


# --- What lets it run without a GPU; a training script of yours has none of this ----------------------------


def emulated(stage: int) -> dict[str, Any]:
    """Arguments of `attach` that make computations take an emulated GPU's time; none on real GPUs."""
    from perseus.demo.emulated_probe import emulated_connect

    if RUN_DIR not in os.environ:
        return {}
    cluster = Cluster(EMULATED, Path(os.environ[RUN_DIR]), Path("."))
    os.environ["PERSEUS_AGENT_SOCKET"] = str(cluster.socket(0))
    forward, backward = EMULATED.stage_work(stage)
    works = {(Kind.FORWARD, 0): forward, (Kind.BACKWARD, 0): backward}
    return {"connect": emulated_connect(cluster.gpu_file(0, stage), works)}


def is_over() -> bool:
    """Whether all ranks stop here: they ask each other, which also keeps them together."""
    is_told = RUN_DIR in os.environ and Path(os.environ[RUN_DIR], "stop").exists()
    votes = torch.tensor(float(is_told), device="cuda" if torch.cuda.is_available() else "cpu")
    distributed.all_reduce(votes)
    return bool(votes.item() > 0)


async def show() -> None:
    """Coordinator, agent and trainers on this machine, until the plan has shown what it saves."""
    import grpc.aio

    from perseus.demo.observation import Observer
    from perseus.demo.summary import Measurements
    from perseus.v1 import job_pb2

    with tempfile.TemporaryDirectory(prefix="perseus-") as folder:
        os.environ[RUN_DIR] = folder
        with Cluster(EMULATED, Path(folder), Path(folder, "logs")) as cluster:
            address = await asyncio.to_thread(cluster.start_coordinator)
            await asyncio.to_thread(cluster.start_agents, address)
            count = f"--nproc-per-node={STAGES}"
            cluster.start_trainer("trainers", "-m", "torch.distributed.run", "--standalone", count, __file__)
            async with grpc.aio.insecure_channel(address) as channel:
                measurements = Measurements(pipeline_count=1)
                told = 0

                def tell() -> None:
                    nonlocal told
                    for event in observer.events[told:]:
                        print(f"  {event.message}")
                    told = len(observer.events)

                observer = Observer(channel, EMULATED.job_id, measurements, tell)
                following = asyncio.create_task(observer.follow())
                await observer.until(
                    "a plan in force",
                    lambda: observer.state == job_pb2.JOB_STATE_PLANNED and observer.is_in_force(),
                    timeout_s=300,
                )
                measurements.close_phase("stock", measurements.at_stock())
                await observer.collect("plan", 10, timeout_s=60, compared_with="stock")
                await asyncio.to_thread(cluster.stop_training)
                following.cancel()
            await asyncio.to_thread(cluster.stop_services)
    for phase in measurements.phases:
        print(
            f"{phase.name}: {phase.iteration_time_s:.3f} s, {phase.energy_j_per_iteration:.0f} J an iteration"
        )
    plan = measurements.phase("plan")
    print(f"saved {plan.saving_percent:.1f} % of the energy, {plan.slowdown_percent:+.1f} % time")


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        sys.exit(asyncio.run(show()))
