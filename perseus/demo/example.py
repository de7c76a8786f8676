"""A training script on emulated GPUs, from stock to its plan, on a machine that needs no GPU.

The script can be any torchrun script that attaches to Perseus and trains a pipeline of four stages with one
chunk each, or two replicas of a whole model, like those in examples/. It needs no change: every rank runs it
in `perseus.demo.example_rank`, where computations take as long as on an emulated GPU. The demo ends the ranks
once it has measured the plan.
"""

import ast
import asyncio
import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perseus.demo import nvml_stub
from perseus.demo.cluster import Cluster
from perseus.demo.example_rank import HOOKS_OF_PIPELINES, HOOKS_OF_REPLICAS, RankOfScript
from perseus.demo.observation import Observer, registered_job
from perseus.demo.summary import Measurements, problems
from perseus.demo.workload import Workload
from perseus.emulation.physics import A100_SXM, Work
from perseus.regular_file import read_bounded
from perseus.v1 import event_pb2, job_pb2

_REGISTRATION_TIMEOUT_S = 120.0
_PLAN_TIMEOUT_S = 300.0
_WATCHED_ITERATIONS = 10
_WATCH_TIMEOUT_S = 60.0

# The last stage is the heaviest. The script sets the job's name and its number of microbatches.
_NODE = Workload(
    job_id="",
    pipeline_count=1,
    stage_weights=(0.8, 0.9, 0.85, 1.0),
    microbatch_count=0,
    forward=Work(compute_s=0.024, memory_s=0.006, activity=0.9),
    backward=Work(compute_s=0.048, memory_s=0.012, activity=0.9),
    optimizer_s=0.0,
    gpu=A100_SXM.with_clocks(6),
)

# Replicas of a whole model: no stage waits for another, so only a slowdown saves much.
_REPLICAS = replace(_NODE, pipeline_count=2, stage_weights=(1.0,))


class ScriptError(Exception):
    """The script can't be run in the demo."""


@dataclass(frozen=True, slots=True)
class ScriptOutcome:
    """What was measured: the phases "stock" and "plan".

    `max_slowdown_percent`: what the script allows. `withdrawals`: why the plan was withdrawn while it was
    measured; empty if it stayed.
    """

    measurements: Measurements
    max_slowdown_percent: float
    withdrawals: Sequence[str]


async def show(
    script: Path, out_dir: Path, log: Callable[[str], None], *, through_nvml: bool = False
) -> ScriptOutcome:
    """Train with `script` until its plan has been measured.

    The job's events are printed as they come; the processes' logs remain in `out_dir`. `through_nvml`: the
    agent uses the stand-in for NVML over the emulated GPUs.

    Raises:
        ScriptError: the script does not attach, or torch is not installed.
        StubError: the stand-in for NVML can't be built.
        ClusterError: a process did not start, or died.
        ObservationError: something did not happen in time.
        OSError: the script can't be read, or `out_dir` can't be written.
    """
    hook = hook_of(script)
    workload = _NODE if hook in HOOKS_OF_PIPELINES else _REPLICAS
    if importlib.util.find_spec("torch") is None:
        raise ScriptError(f"{script}: expected torch to be installed, found none")
    with (
        tempfile.TemporaryDirectory(prefix="perseus-") as run_dir,
        Cluster(
            workload,
            Path(run_dir),
            out_dir / "logs",
            nvml_library=nvml_stub.build(Path(run_dir)) if through_nvml else None,
            serves_page=True,
        ) as cluster,
    ):
        address = await asyncio.to_thread(cluster.start_coordinator)
        for line in cluster.page_lines(address):
            log(line)
        await asyncio.to_thread(cluster.start_agents, address)
        _start_ranks(cluster, workload, hook, script)
        async with cluster.security.channels(address).open() as channel, asyncio.TaskGroup() as tasks:
            watchers = [tasks.create_task(_keep_watch(cluster))]
            job_id = await registered_job(channel, _REGISTRATION_TIMEOUT_S)
            logged_count = 0

            def log_new() -> None:
                nonlocal logged_count
                for event in observer.events[logged_count:]:
                    log(event.message)
                logged_count = len(observer.events)

            observer = Observer(channel, job_id, Measurements(workload.pipeline_count), log_new)
            watchers.append(tasks.create_task(observer.follow()))
            outcome = await _watch(observer)
            for watcher in watchers:
                watcher.cancel()
        await asyncio.to_thread(cluster.end_training)
        await asyncio.to_thread(cluster.stop_services)
    return outcome


def judge_script(outcome: ScriptOutcome) -> list[str]:
    """Return the problems of an outcome; none if the plan stayed, is fast enough and saves energy."""
    withdrawn = [f"plan: expected it to stay in force, found {why}" for why in outcome.withdrawals]
    factor = 1 + outcome.max_slowdown_percent / 100
    return withdrawn + problems(outcome.measurements.phases, {"plan": ("stock", factor)})


def hook_of(script: Path) -> str:
    """Return the hook that a script imports. ScriptError if it imports none, or isn't Python."""
    try:
        tree = ast.parse(read_bounded(script), filename=str(script))
    except (OSError, SyntaxError, ValueError) as error:
        raise ScriptError(f"{script}: expected a Python script: {error}") from error
    imported = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    hooks = (*HOOKS_OF_PIPELINES, *HOOKS_OF_REPLICAS)
    for hook in hooks:
        if hook in imported:
            return hook
    raise ScriptError(f"{script}: expected `from … import …` of one of {', '.join(hooks)}, found none")


def _start_ranks(cluster: Cluster, workload: Workload, hook: str, script: Path) -> None:
    pipelines, stages = range(workload.pipeline_count), range(workload.stage_count)
    task = RankOfScript(
        script=str(script),
        hook=hook,
        agent_sockets=[str(cluster.socket(pipeline)) for pipeline in pipelines],
        gpu_files=[[str(cluster.gpu_file(pipeline, stage)) for stage in stages] for pipeline in pipelines],
        works=[
            [(work.compute_s, work.memory_s, work.activity) for work in workload.stage_work(stage)]
            for stage in stages
        ],
    )
    cluster.start_trainer(
        "trainers",
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={len(workload.ranks)}",
        "-m",
        "perseus.demo.example_rank",
        task.to_json(),
    )


async def _watch(observer: Observer) -> ScriptOutcome:
    await observer.until(
        "a plan in force",
        lambda: observer.state == job_pb2.JOB_STATE_PLANNED and observer.is_in_force(),
        _PLAN_TIMEOUT_S,
    )
    measurements = observer.measurements
    measurements.close_phase("stock", measurements.at_stock())
    before_count = len(observer.events)
    await observer.collect("plan", _WATCHED_ITERATIONS, _WATCH_TIMEOUT_S, compared_with="stock")
    assert observer.job is not None
    withdrawals = [
        event.message
        for event in observer.events[before_count:]
        if event.type == event_pb2.JOB_EVENT_TYPE_STATE_CHANGED
        and event.state_changed.after != job_pb2.JOB_STATE_PLANNED
    ]
    return ScriptOutcome(measurements, observer.job.policy.max_slowdown_percent, withdrawals)


async def _keep_watch(cluster: Cluster) -> None:
    while True:
        cluster.check()
        await asyncio.sleep(0.5)
