"""Tasks of the ranks of an emulated training job: the order of 1F1B, and each stage's work."""

from collections.abc import Callable, Iterator
from pathlib import Path

from perseus import solver
from perseus.agent.link.computation import Kind
from perseus.demo.trainer import RankTask
from perseus.demo.workload import Workload


def rank_tasks(
    workload: Workload, run_dir: Path, socket: Callable[[int], Path], gpu_file: Callable[[int, int], Path]
) -> Iterator[RankTask]:
    """Yield the ranks' tasks; `socket` returns a pipeline's agent socket, `gpu_file` a rank's GPU."""
    orders = solver.one_forward_one_backward(workload.stage_count, workload.microbatch_count).orders
    kinds = {solver.Kind.FORWARD: Kind.FORWARD, solver.Kind.BACKWARD: Kind.BACKWARD}
    for pipeline, stage in workload.ranks:
        forward, backward = workload.stage_work(stage)
        yield RankTask(
            run_dir=str(run_dir),
            agent_socket=str(socket(pipeline)),
            gpu_file=str(gpu_file(pipeline, stage)),
            job_id=workload.job_id,
            pipeline=pipeline,
            pipeline_count=workload.pipeline_count,
            stage=stage,
            stage_count=workload.stage_count,
            microbatch_count=workload.microbatch_count,
            order=[(kinds[computation.kind], computation.microbatch) for computation in orders[stage]],
            forward=(forward.compute_s, forward.memory_s, forward.activity),
            backward=(backward.compute_s, backward.memory_s, backward.activity),
            optimizer_s=workload.optimizer_s,
            evaluation_s=workload.evaluation_s,
            evaluation_interval=workload.evaluation_interval,
        )
