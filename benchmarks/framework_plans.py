"""What plans cost real trainings in time and save in energy, by framework, on emulated GPUs.

Each training runs at stock and then under its plan, with a real coordinator and agents; the tests of the
frameworks start the same trainings. `make test-frameworks` makes the environment:

    .venv-frameworks/bin/python -m benchmarks.framework_plans
"""

import asyncio
import importlib.util
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import Cell, Column, Table, main
from tests.frameworks.cases import STEADY_MICROBATCHES, UNEVEN, Case
from tests.frameworks.real_run import STEP_TIMEOUT_S, real_run

_ITERATIONS = 15
_BUDGET_PERCENT = 20.0


def _pipeline(framework: str, schedule: str) -> Case:
    return Case(framework, schedule, UNEVEN, 1, 0.04, 0.08, microbatch_count=STEADY_MICROBATCHES)


CASES = {
    "torch, 1F1B": _pipeline("torch", "1F1B"),
    "Megatron-Core, 1F1B by timers": _pipeline("megatron", "1f1b-timers"),
    "DeepSpeed, 1F1B": _pipeline("deepspeed", "1f1b"),
    "torchtitan, 1F1B": Case("torchtitan", "1F1B", (0.6, 1.0), 1, 0.08, 0.16),
    "torch, DistributedDataParallel": Case("replica", "ddp", (1.0,), 1, 0.04, 0.1, pipeline_count=2),
    "torch, FSDP2": Case("replica", "fsdp2", (1.0,), 1, 0.08, 0.16, pipeline_count=2, microbatch_count=1),
}


def run() -> list[Table]:
    """Measure all trainings."""
    columns = (
        Column("training"),
        Column("ranks"),
        Column("iteration at stock, s", ".3f"),
        Column("under its plan, s", ".3f"),
        Column("slower, %", ".1f"),
        Column("saved, %", ".1f"),
        Column("saving predicted, %", ".1f"),
    )
    rows = tuple(asyncio.run(_measured(name, case)) for name, case in CASES.items())
    note = (
        f"Means of {_ITERATIONS} iterations under a plan, and of all before it at stock. Replicas without "
        f"pipelines have a budget of {_BUDGET_PERCENT:.0f} %. Energies are of the ranks' own iterations."
    )
    return [Table("Real trainings under their plans", columns, rows, note)]


async def _measured(name: str, case: Case) -> tuple[Cell, ...]:
    with tempfile.TemporaryDirectory() as folder:
        async with real_run(case, Path(folder)) as training:
            await training.until_planned()
            observer = training.observer
            stock = observer.measurements.close_phase("stock", observer.measurements.at_stock())
            if case.trainer == "replica":
                await training.set_budget(_BUDGET_PERCENT)
                await training.planned()
            await observer.collect("plan", _ITERATIONS, STEP_TIMEOUT_S, "stock")
            plan = observer.measurements.phase("plan")
            job, frontier = await training.planned()
            (planned_s, *_) = job.planned_iteration_time_s
            point = min(frontier.points, key=lambda each: abs(each.iteration_time_s - planned_s))
    return (
        name,
        f"{case.pipeline_count} × {len(case.stage_weights)}",
        stock.iteration_time_s,
        plan.iteration_time_s,
        plan.slowdown_percent,
        plan.saving_percent,
        100 * (1 - point.energy_j / frontier.baseline.energy_j),
    )


if __name__ == "__main__":
    if importlib.util.find_spec("torch") is None:
        print("framework_plans: skipped, torch is not installed", file=sys.stderr)
    else:
        main("framework_plans", run)
