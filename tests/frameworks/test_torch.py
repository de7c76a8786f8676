"""`torch.distributed.pipelining`, really training on CPUs under a real coordinator and real agents."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed here; `make test-frameworks` has it")

from real_run import STEP_TIMEOUT_S, Figures, Identity, RealRun, real_run
from torch_trainer import TrainerTask

from perseus import solver
from perseus.agent.computation import Kind
from perseus.agent.gpu.physics import A100_SXM, Work
from perseus.demo.cluster import Cluster
from perseus.demo.workload import Workload

TRAINER = str(Path(__file__).with_name("torch_trainer.py"))
MICROBATCHES = 8
WATCHED = 15
GPU = A100_SXM.with_clocks(4)
IDLE = Work(compute_s=1.0, memory_s=0.0)


@dataclass(frozen=True, slots=True)
class Case:
    """A schedule, its layout and what its computations cost on the heaviest stage at the top clock."""

    schedule: str
    stage_weights: Sequence[float]
    chunk_count: int
    forward_s: float
    backward_s: float
    """Of which half is the input's and half the weights' gradient where they are computed apart."""
    pipeline_count: int = 1

    @property
    def workload(self) -> Workload:
        return Workload(
            job_id=self.schedule.lower(),
            pipeline_count=self.pipeline_count,
            stage_weights=self.stage_weights,
            microbatch_count=MICROBATCHES,
            forward=IDLE,
            backward=IDLE,
            optimizer_s=0.0,
            gpu=GPU,
        )

    @property
    def works(self) -> list[list[tuple[int, int, float, float, float]]]:
        """Every stage's works, as the trainer takes them: a fifth of each is bound by memory."""
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


def task_of(case: Case, folder: Path) -> TrainerTask:
    """The case's training alone, without anything of ours."""
    folder.mkdir()
    return TrainerTask(
        run_dir=str(folder),
        losses_dir=str(folder),
        job_id=case.workload.job_id,
        schedule=case.schedule,
        pipeline_count=case.pipeline_count,
        stage_count=len(case.stage_weights),
        chunk_count=case.chunk_count,
        microbatch_count=MICROBATCHES,
        iteration_count=0,
    )


def losses_of(folder: Path) -> list[list[str]]:
    """Every pipeline's losses, bit for bit."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("losses-*.json"))]


def check_losses(case: Case, attached: Path, tmp_path: Path) -> None:
    """Train as many iterations without us, and compare."""
    found = losses_of(attached)
    assert len(found) == case.pipeline_count
    iteration_count = len(found[0]) // MICROBATCHES
    task = replace(task_of(case, tmp_path / "alone"), iteration_count=iteration_count)
    subprocess.run([sys.executable, TRAINER, task.to_json()], check=True, timeout=300)
    assert losses_of(tmp_path / "alone") == found
    assert found[0][:MICROBATCHES] != found[0][-MICROBATCHES:], "it did train"


def check_identities(run: RealRun, expected: Sequence[Sequence[Identity]]) -> None:
    """Every computation of every iteration has arrived, under its identity and in its order."""
    assert run.registered() == [list(order) for order in expected]
    for pipeline in range(run.workload.pipeline_count):
        iterations = sorted(number for of, number in run.seen if of == pipeline)
        assert len(iterations) > WATCHED
        assert iterations == list(range(iterations[0], iterations[-1] + 1)), "each of them was seen"
    for (pipeline, iteration), stages in run.seen.items():
        assert stages == run.registered(), f"pipeline {pipeline}, iteration {iteration}"


async def check_plan(run: RealRun, plan: Figures) -> None:
    """The plan keeps its promise: its time within 3 %, no slower than stock by 2 %, and its energy."""
    assert run.stock is not None
    frontier = await run.frontier()
    point, stock = frontier.points[0], frontier.baseline
    promised_percent = 100 * (1 - point.energy_j / stock.energy_j)
    saved_percent = 100 * (1 - plan.energy_j / run.stock.energy_j)
    print(
        f"\n{run.workload.job_id}: iteration predicted {point.iteration_time_s:.4f} s, measured "
        f"{plan.time_s:.4f} s ({100 * (plan.time_s / point.iteration_time_s - 1):+.2f} %), at stock "
        f"{run.stock.time_s:.4f} s ({100 * (plan.time_s / run.stock.time_s - 1):+.2f} %); energy promised "
        f"-{promised_percent:.2f} %, measured -{saved_percent:.2f} %"
    )
    assert plan.time_s == pytest.approx(point.iteration_time_s, rel=0.03)
    assert plan.time_s <= 1.02 * run.stock.time_s
    assert promised_percent > 3
    assert saved_percent == pytest.approx(promised_percent, abs=2)


def identities(schedule: solver.Schedule) -> list[list[Identity]]:
    """The solver's own idea of a schedule, as identities."""
    return [[(int(Kind[c.kind.name]), c.microbatch, c.chunk) for c in order] for order in schedule.orders]


def start(case: Case, tmp_path: Path):  # type: ignore[no-untyped-def]
    """What starts the case's trainer in a cluster."""
    losses_dir = tmp_path / "attached"
    losses_dir.mkdir()

    def start_trainers(cluster: Cluster, run_dir: Path) -> None:
        stages = range(len(case.stage_weights))
        pipelines = range(case.pipeline_count)
        task = replace(
            task_of(case, tmp_path / "task"),
            run_dir=str(run_dir),
            losses_dir=str(losses_dir),
            sockets=[str(cluster.socket(pipeline)) for pipeline in pipelines],
            gpu_files=[
                [str(cluster.gpu_file(pipeline, stage)) for stage in stages] for pipeline in pipelines
            ],
            works=case.works,
        )
        cluster.start_trainer("trainers", TRAINER, task.to_json())

    return start_trainers


UNEVEN = (0.8, 0.9, 0.85, 1.0)
ONE_CHUNK = Case("1F1B", UNEVEN, 1, 0.03, 0.06)
INTERLEAVED = Case("Interleaved1F1B", (0.8, 1.0), 2, 0.03, 0.06)
V_SHAPED = Case("ZBVZeroBubble", (0.8, 1.0), 2, 0.03, 0.06)
REPLICATED = Case("1F1B", (0.8, 1.0), 1, 0.03, 0.06, pipeline_count=2)
STRAGGLER, SLOWDOWN = 1, 1.3


@pytest.mark.timeout(300)
async def test_1f1b(tmp_path: Path) -> None:
    async with real_run(ONE_CHUNK.workload, tmp_path / "logs", start(ONE_CHUNK, tmp_path)) as run:
        await run.until_planned()
        await check_plan(run, await run.watch(WATCHED))
        check_identities(run, identities(solver.one_forward_one_backward(4, MICROBATCHES)))
    check_losses(ONE_CHUNK, tmp_path / "attached", tmp_path)


@pytest.mark.timeout(300)
async def test_interleaved_1f1b(tmp_path: Path) -> None:
    async with real_run(INTERLEAVED.workload, tmp_path / "logs", start(INTERLEAVED, tmp_path)) as run:
        await run.until_planned()
        await check_plan(run, await run.watch(WATCHED))
        expected = solver.interleaved_one_forward_one_backward(2, MICROBATCHES, 2)
        check_identities(run, identities(expected))
    check_losses(INTERLEAVED, tmp_path / "attached", tmp_path)


@pytest.mark.timeout(300)
async def test_zbv(tmp_path: Path) -> None:
    async with real_run(V_SHAPED.workload, tmp_path / "logs", start(V_SHAPED, tmp_path)) as run:
        await run.until_planned()
        await check_plan(run, await run.watch(WATCHED))
        assert run.paths() == [[(0, 0), (1, 0), (1, 1), (0, 1)]]
        for stage, order in enumerate(run.registered()):
            split = {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
            whole = {Kind.FORWARD, Kind.BACKWARD}
            assert sorted(order) == sorted(
                (int(kind), microbatch, chunk)
                for microbatch in range(MICROBATCHES)
                for chunk in range(2)
                for kind in (whole if (stage, chunk) == (0, 0) else split)
            )
        check_identities(run, run.registered())
    check_losses(V_SHAPED, tmp_path / "attached", tmp_path)


@pytest.mark.timeout(300)
async def test_a_straggling_replica_is_found_and_answered(tmp_path: Path) -> None:
    async with real_run(REPLICATED.workload, tmp_path / "logs", start(REPLICATED, tmp_path)) as run:
        await run.until_planned()
        plan = await run.watch(WATCHED)
        await check_plan(run, plan)
        check_identities(run, identities(solver.one_forward_one_backward(2, MICROBATCHES)))

        observer = run.observer
        run.cluster.degrade(STRAGGLER, SLOWDOWN)
        first = observer.next_whole_iteration
        await observer.until(
            "the straggler found, and its answer in force",
            lambda: (
                observer.stragglers == {STRAGGLER}
                and observer.is_in_force()
                and observer.in_force_since() > first
            ),
            STEP_TIMEOUT_S,
        )
        answered_after = observer.in_force_since() - first
        unanswered = run.figures(range(first, observer.in_force_since()))
        answered = await run.watch(WATCHED)
        assert observer.job is not None
        slowed_s, fast_s = observer.job.planned_iteration_time_s[0], observer.job.t_min_s
        print(
            f"\nstraggler: iteration {plan.time_s:.4f} s → {unanswered.time_s:.4f} s, answered after "
            f"{answered_after} iterations by a plan of {slowed_s:.4f} s (T_min {fast_s:.4f} s), then "
            f"{answered.time_s:.4f} s; energy {unanswered.energy_j:.1f} J → {answered.energy_j:.1f} J"
        )
        assert answered_after <= 6
        assert slowed_s > 1.15 * fast_s, "the other replica takes the time that there is"
        assert answered.time_s <= 1.02 * SLOWDOWN * plan.time_s
    check_losses(REPLICATED, tmp_path / "attached", tmp_path)
