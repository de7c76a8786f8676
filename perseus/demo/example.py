"""What lets an example of a framework run without a GPU, and tells what the plan saved.

`show` starts a coordinator, an agent and the example's own file under torchrun, on this machine. There,
computations take as long as emulated GPUs say (`attach_arguments`), until the plan has been watched
(`is_told_to_stop`). Where the file is started by torchrun alone, on GPUs, these two do nothing.
"""

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

import grpc.aio

from perseus.agent.gpu.physics import A100_SXM, Work
from perseus.agent.link.address import SOCKET_VARIABLE
from perseus.agent.link.computation import Kind
from perseus.demo.cluster import Cluster
from perseus.demo.emulated_probe import Works, emulated_connect
from perseus.demo.observation import Observer
from perseus.demo.summary import Measurements
from perseus.demo.trainer import STOP_FILE
from perseus.demo.workload import Workload
from perseus.v1 import job_pb2

_RUN_DIR = "PERSEUS_EXAMPLE_RUN_DIR"
_PLAN_TIMEOUT_S = 300.0
_WATCHED_ITERATIONS = 10
_WATCH_TIMEOUT_S = 60.0


def tiny_transformer(job_id: str, microbatch_count: int) -> Workload:
    """A pipeline of four, one chunk per stage, whose last stage is the heaviest."""
    return Workload(
        job_id=job_id,
        pipeline_count=1,
        stage_weights=(0.8, 0.9, 0.85, 1.0),
        microbatch_count=microbatch_count,
        forward=Work(compute_s=0.024, memory_s=0.006, activity=0.9),
        backward=Work(compute_s=0.048, memory_s=0.012, activity=0.9),
        optimizer_s=0.0,
        gpu=A100_SXM.with_clocks(6),
    )


def attach_arguments(workload: Workload, stage: int) -> dict[str, Any]:
    """Arguments of `attach` that make computations take an emulated GPU's time; none on real GPUs."""
    if _RUN_DIR not in os.environ:
        return {}
    cluster = Cluster(workload, Path(os.environ[_RUN_DIR]), Path(os.environ[_RUN_DIR]))
    os.environ[SOCKET_VARIABLE] = str(cluster.socket(0))
    forward, backward = workload.stage_work(stage)
    works: Works = {(Kind.FORWARD, 0): forward, (Kind.BACKWARD, 0): backward}
    return {"connect": emulated_connect(cluster.gpu_file(0, stage), works)}


def is_told_to_stop() -> bool:
    """Whether enough has been seen."""
    return _RUN_DIR in os.environ and Path(os.environ[_RUN_DIR], STOP_FILE).exists()


def show(workload: Workload, script: str) -> None:
    """Train with `script` on this machine until the plan has been watched; print what happens and its effect.

    Raises:
        ClusterError: a process did not start or died.
        ObservationError: something did not happen in time.
    """
    asyncio.run(_show(workload, script))


async def _show(workload: Workload, script: str) -> None:
    measurements = Measurements(workload.pipeline_count)
    with tempfile.TemporaryDirectory(prefix="perseus-") as folder:
        os.environ[_RUN_DIR] = folder
        with Cluster(workload, Path(folder), Path("demo-out", workload.job_id)) as cluster:
            address = await asyncio.to_thread(cluster.start_coordinator)
            await asyncio.to_thread(cluster.start_agents, address)
            count = f"--nproc-per-node={workload.stage_count}"
            cluster.start_trainer("trainers", "-m", "torch.distributed.run", "--standalone", count, script)
            async with grpc.aio.insecure_channel(address) as channel:
                told = 0

                def tell() -> None:
                    nonlocal told
                    for event in observer.events[told:]:
                        print(f"  {event.message}", flush=True)
                    told = len(observer.events)

                observer = Observer(channel, workload.job_id, measurements, tell)
                async with asyncio.TaskGroup() as tasks:
                    watchers = [tasks.create_task(observer.follow()), tasks.create_task(_keep_watch(cluster))]
                    await _watch(observer)
                    for watcher in watchers:
                        watcher.cancel()
                await asyncio.to_thread(cluster.stop_training)
            await asyncio.to_thread(cluster.stop_services)
    for phase in measurements.phases:
        print(
            f"{phase.name}: {phase.iteration_time_s:.3f} s, {phase.energy_j_per_iteration:.0f} J an iteration"
        )
    plan = measurements.phase("plan")
    print(f"saved {plan.saving_percent:.1f} % of the energy, {plan.slowdown_percent:+.1f} % time")


async def _watch(observer: Observer) -> None:
    await observer.until(
        "a plan in force",
        lambda: observer.state == job_pb2.JOB_STATE_PLANNED and observer.is_in_force(),
        _PLAN_TIMEOUT_S,
    )
    measurements = observer.measurements
    measurements.close_phase("stock", measurements.at_stock())
    await observer.collect("plan", _WATCHED_ITERATIONS, _WATCH_TIMEOUT_S, compared_with="stock")


async def _keep_watch(cluster: Cluster) -> None:
    while True:
        cluster.check()
        await asyncio.sleep(0.5)
