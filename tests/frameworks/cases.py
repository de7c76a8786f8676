"""Training jobs of every framework's tests, and the checks of their results."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perseus import solver
from perseus.agent.link.computation import Kind
from perseus.demo.cluster import Cluster
from perseus.demo.workload import Workload
from perseus.emulation.physics import A100_SXM, Work
from perseus.service.api.translate_problems import problem_from_proto
from perseus.v1 import job_pb2
from tests.frameworks.case_table import CaseResult
from tests.frameworks.real_run import Figures, Identity, RealRun, Whole, is_no_slower, real_run
from tests.frameworks.trainers import TrainerTask
from tests.frameworks.versions import beside

MICROBATCHES = 4
"""Microbatches of most cases: enough to show the order of a stage's computations and accumulation."""
STEADY_MICROBATCHES = 6
"""With four stages: enough that the first stage alternates, too."""
WATCHED = 15
GPU = A100_SXM.with_clocks(4)
UNEVEN = (0.8, 0.9, 0.85, 1.0)
# Predictions don't include messages on a CPU. If all stages but one are so light that they keep some slack
# under any plan, their times hardly add up.
LIGHT = (0.6, 0.65, 0.6, 1.0)
HALF_LIGHT = (0.6, 1.0)
_IDLE = Work(compute_s=1.0, memory_s=0.0)


@dataclass(frozen=True, slots=True)
class Case:
    """A schedule, its layout and the cost of its computations on the heaviest stage at the highest clock.

    `trainer` is the module of this folder that trains it.
    """

    trainer: str
    schedule: str
    stage_weights: Sequence[float]
    chunk_count: int
    forward_s: float
    backward_s: float
    """Half of it is for the input's gradient and half for the weights', if they are computed separately."""
    pipeline_count: int = 1
    beside: Sequence[str] = ()
    """Folders of the environment with versions other than those installed."""
    microbatch_count: int = MICROBATCHES
    tensor_count: int = 1
    break_for: str = ""
    """Between iterations, from time to time (`torch_trainer`)."""
    logs_one_loss: bool = False
    """Per iteration, not per microbatch."""

    @property
    def losses_per_iteration(self) -> int:
        """Losses that the rank with the losses writes per iteration."""
        return 1 if self.logs_one_loss else self.microbatch_count

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

    def alone(self, folder: Path, iteration_count: int) -> TrainerTask:
        """Return its training without Perseus."""
        folder.mkdir()
        return TrainerTask(
            run_dir=str(folder),
            losses_dir=str(folder),
            job_id=self.workload.job_id,
            schedule=self.schedule,
            pipeline_count=self.pipeline_count,
            stage_count=len(self.stage_weights),
            chunk_count=self.chunk_count,
            microbatch_count=self.microbatch_count,
            iteration_count=iteration_count,
            tensor_count=self.tensor_count,
            break_for=self.break_for,
        )

    def command(self, *tasks: TrainerTask) -> list[str]:
        """Return Python's arguments to train tasks."""
        return [
            *beside(*self.beside),
            f"tests.frameworks.{self.trainer}",
            *(task.to_json() for task in tasks),
        ]


def start(case: Case, tmp_path: Path) -> Callable[[Cluster, Path], None]:
    """Return a function that starts the case's attached trainer in a cluster."""
    alone = case.alone(tmp_path / "attached", 0)

    def start_trainers(cluster: Cluster, run_dir: Path) -> None:
        stages = range(case.nodes.stage_count)
        pipelines = range(case.pipeline_count)
        task = replace(
            alone,
            run_dir=str(run_dir),
            sockets=[str(cluster.socket(pipeline)) for pipeline in pipelines],
            gpu_files=[
                [str(cluster.gpu_file(pipeline, stage)) for stage in stages] for pipeline in pipelines
            ],
            works=case.works,
        )
        cluster.start_trainer("trainers", *case.command(task))

    return start_trainers


async def check_case(
    case: Case, name: str, position: int, title: str, tmp_path: Path, *, budget_percent: float = 0.0
) -> None:
    """Check that a case reaches a plan that saves, and ends at stock with equal losses."""
    async with real_run(case.workload, tmp_path / "logs", start(case, tmp_path), nodes=case.nodes) as run:
        await run.until_planned()
        found = plan = await run.plan_beside_stock(WATCHED)
        if budget_percent:
            await run.set_policy(job_pb2.OperatingPolicy(max_slowdown_percent=budget_percent))
            found = await run.watch(WATCHED)
            assert is_no_slower(found, plan, 1.02 * (1 + budget_percent / 100))
        assert run.stock is not None
        assert found.energy_j < 0.97 * run.stock.energy_j
        await check_identities(run, run.registered())
    check_losses(case, tmp_path)
    keep(case, name, position, title, run.stock, found, budget_percent=budget_percent)


def keep(
    case: Case, name: str, position: int, title: str, compared: Figures | None, found: Figures, **more: Any
) -> None:
    """Write the result of a case whose checks have passed, including those of losses."""
    assert compared is not None
    CaseResult(
        name,
        position,
        title,
        f"{case.pipeline_count} × {len(case.stage_weights)}"
        + (f" × {case.tensor_count}" if case.tensor_count > 1 else ""),
        compared.time_s,
        found.time_s,
        compared.energy_j,
        found.energy_j,
        found.iteration_count,
        losses_are_equal=True,
        energy_errors_percent=found.energy_errors_percent,
        **more,
    ).keep()


def check_losses(case: Case, tmp_path: Path) -> None:
    """Train as many iterations without Perseus, and compare."""
    found = losses_in(tmp_path / "attached")
    assert len(found) == case.pipeline_count
    per_iteration = case.losses_per_iteration
    task = case.alone(tmp_path / "alone", iteration_count=len(found[0]) // per_iteration)
    subprocess.run([sys.executable, *case.command(task)], check=True, timeout=300)
    assert losses_in(tmp_path / "alone") == found
    assert found[0][:per_iteration] != found[0][-per_iteration:], "it did train"


def losses_in(folder: Path) -> list[list[str]]:
    """Return every pipeline's losses, bit for bit."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("losses-*.json"))]


async def check_identities(run: RealRun, expected: Sequence[Sequence[Identity]]) -> None:
    """Check that iterations consisted of the expected computations, in order.

    Agents compare what trainers mark with the registered order, and a difference makes an iteration
    irregular: all of them, or those of one kind. A few are so for other reasons: they had begun when ranks
    joined, no energy was known yet, or a mark was lost on a busy machine.
    """
    assert run.registered() == [list(order) for order in expected]
    periods = (await run.report()).periods
    counts = [(period.irregular_count, period.iteration_count) for period in periods]
    irregular_count, iteration_count = map(sum, zip(*counts, strict=True))
    assert iteration_count > WATCHED, counts
    assert irregular_count <= 0.1 * iteration_count, counts


MAX_ENERGY_ERROR_PERCENT = 1.0
"""Of predictions; below 0.5 on a quiet machine. Late marks and messages on a CPU cost energy, too."""


async def check_plan(run: RealRun) -> Figures:
    """Check the predictions of the plan in force: at most 2 % slower than stock, energy, time; return it.

    A pause of the machine is in one of few iterations, and no prediction holds for it: then stock and plan
    are measured again. A prediction that is wrong is so every time.
    """
    plan = await run.plan_beside_stock(WATCHED)
    found = await _predictions(run, plan)
    for _ in range(2):
        if found.hold:
            break
        plan = await run.measure_again(WATCHED)
        found = await _predictions(run, plan)
    assert found.hold, found
    return replace(plan, energy_errors_percent=found.energy_errors_percent)


@dataclass(frozen=True, slots=True)
class _Predictions:
    """A plan's predictions beside what was measured; `energy_errors_percent` at stock, and of the plan."""

    time_s: float
    measured_time_s: float
    saved_percent: float
    measured_saved_percent: float
    energy_errors_percent: tuple[float, float]

    @property
    def hold(self) -> bool:
        errors_percent = (self.saved_percent - self.measured_saved_percent, *self.energy_errors_percent)
        return (
            self.saved_percent > 3
            and abs(self.measured_time_s - self.time_s) <= 0.03 * self.time_s
            and max(map(abs, errors_percent)) <= MAX_ENERGY_ERROR_PERCENT
        )


async def _predictions(run: RealRun, plan: Figures) -> _Predictions:
    """Compare the predictions with the latest stock baseline and the plan's iterations since.

    Predictions exclude the time between computations, at stock's blocking power. It is the same under the
    plan as at stock.
    """
    assert run.stock is not None
    frontier = await run.frontier()
    point, stock = frontier.points[0], frontier.baseline
    problem = problem_from_proto(frontier.problem)
    clocks_mhz = await run.planned_mhz(point.iteration_time_s)
    # With the time to set clocks, which costs energy.
    late = solver.replay_with_latency(problem, solver.replay(problem, clocks_mhz), frontier.set_latency_s)
    waiting_w = solver.fastest_clock_plan(problem).blocking_power_w
    whole_stock, whole_plan = await run.whole(at_stock=True), await run.whole(at_stock=False)
    # A pause that only one of the two had is no saving.
    paused_j = run.workload.pipeline_count * waiting_w * (whole_plan.time_s - whole_stock.time_s)

    def error_percent(time_s: float, energy_j: float, whole: Whole) -> float:
        pipeline_j = energy_j + waiting_w * (whole.time_s - time_s)
        return 100 * (run.workload.pipeline_count * pipeline_j / whole.energy_j - 1)

    found = _Predictions(
        point.iteration_time_s + run.stock.time_s - stock.iteration_time_s,
        plan.time_s,
        100 * (1 - late.energy_j / stock.energy_j),
        100 * (1 - (whole_plan.energy_j - paused_j) / whole_stock.energy_j),
        (
            error_percent(stock.iteration_time_s, stock.energy_j, whole_stock),
            error_percent(late.iteration_time_s, late.energy_j, whole_plan),
        ),
    )
    print(f"\n{run.workload.job_id}: {found}, at stock {run.stock.time_s:.4f} s, {whole_stock}, {whole_plan}")
    return found


def identities(schedule: solver.Schedule) -> list[list[Identity]]:
    """Return the solver's own version of a schedule, as identities."""
    return [[(int(Kind[c.kind.name]), c.microbatch, c.chunk) for c in order] for order in schedule.orders]
