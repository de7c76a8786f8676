"""Every framework, really training on CPUs under a real coordinator and real agents, from stock to its plan.

Each case is attached, measured and planned: every computation arrives under its identity, several clocks are
profiled, the plan is in force on every rank and is to save energy, losses are equal bit for bit, and in the
end all GPUs are at stock. What the plans really save, `benchmarks/framework_plans.py` measures.
"""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed; `make test-frameworks` has it", allow_module_level=True)

from tests.frameworks.cases import (
    STEADY_MICROBATCHES,
    TWO_CHUNKS,
    TWO_STAGES,
    UNEVEN,
    Case,
    Orders,
    check_losses,
    one_chunk,
    whole_model,
)
from tests.frameworks.real_run import real_run
from tests.frameworks.versions import NEWEST_TORCH, skip_unless_there

pytestmark = [pytest.mark.slow("trains for real, with the framework"), pytest.mark.timeout(900)]

STRAGGLER, SLOWDOWN = 1, 1.3
BUDGET_PERCENT = 20.0


of_another_layout = pytest.mark.nightly("another layout of a framework that CI trains once")

on_two = partial(Case, stage_weights=TWO_STAGES, forward_s=0.04, backward_s=0.08)
on_four = partial(on_two, stage_weights=UNEVEN, microbatch_count=STEADY_MICROBATCHES)
briefly_on_two = partial(Case, stage_weights=TWO_STAGES)
four = one_chunk(4, STEADY_MICROBATCHES)
two = one_chunk(2)

REPLICATED = on_two("torch", "1F1B", pipeline_count=2)
DATA_PARALLEL = Case("replica", "ddp", forward_s=0.02, backward_s=0.05, pipeline_count=4)
# FSDP2 waits between parts: three of each forward, four or five of each backward take these times. All ranks
# synchronise after each part, and then compute a little: so each has its own core, and parts are few.
FULLY_SHARDED = Case(
    "replica", "fsdp2", forward_s=0.04, backward_s=0.08, pipeline_count=2, microbatch_count=1
)


def nightly(case: Case, *others: object, name: str) -> Any:
    return pytest.param(case, *others, marks=of_another_layout, id=name)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        pytest.param(on_two("torch", "1F1B"), two, id="torch, 1F1B"),
        pytest.param(briefly_on_two("megatron", "1f1b-timers"), two, id="Megatron-Core, 1F1B by timers"),
        pytest.param(briefly_on_two("deepspeed", "1f1b"), two, id="DeepSpeed, 1F1B"),
        pytest.param(
            briefly_on_two("torchtitan", "1F1B", forward_s=0.03, backward_s=0.06), two, id="torchtitan, 1F1B"
        ),
        nightly(on_four("torch", "1F1B", pipeline_count=4), four, name="torch, 1F1B, 16 ranks"),
        nightly(on_four("megatron", "1f1b-timers"), four, name="Megatron-Core, 1F1B by timers, 4 ranks"),
        nightly(on_four("deepspeed", "1f1b"), four, name="DeepSpeed, 1F1B, 4 ranks"),
        nightly(
            on_two("torch", "Interleaved1F1B", chunk_count=2), TWO_CHUNKS, name="torch, interleaved 1F1B"
        ),
        nightly(on_two("torch", "ZBVZeroBubble", chunk_count=2), None, name="torch, ZBV"),
        nightly(on_two("torch", "DualPipeV", chunk_count=2), None, name="torch, DualPipeV"),
        nightly(
            on_two("torch", "1F1B", pipeline_count=2, tensor_count=2),
            two,
            name="torch, data and tensor parallel",
        ),
        nightly(on_two("torch", "1F1B", break_for="evaluation"), two, name="torch, evaluations"),
        nightly(
            on_two("megatron", "interleaved", chunk_count=2),
            TWO_CHUNKS,
            name="Megatron-Core, interleaved 1F1B",
        ),
        nightly(
            on_two("torchtitan", "1F1B", forward_s=0.08, backward_s=0.16, beside=[NEWEST_TORCH]),
            two,
            name="the newest torchtitan, 1F1B",
        ),
    ],
)
async def test_a_pipeline_is_planned(case: Case, expected: Orders | None, tmp_path: Path) -> None:
    skip_unless_there(*case.beside)
    async with real_run(case, tmp_path) as run:
        await run.until_planned()
        await run.check_plan()
        await run.check_identities(expected or run.registered())
    check_losses(case, run.task)


@pytest.mark.parametrize(
    "case",
    [
        # 5 and 10 ms, between updates of a counter every 100 ms
        pytest.param(replace(DATA_PARALLEL, forward_s=0.005, backward_s=0.01, pipeline_count=2), id="DDP"),
        pytest.param(replace(FULLY_SHARDED, forward_s=0.005, backward_s=0.01), id="FSDP2"),
        nightly(replace(FULLY_SHARDED, schedule="hsdp", pipeline_count=4), name="HSDP"),
    ],
)
async def test_replicas_are_planned_within_a_slowdown_budget(case: Case, tmp_path: Path) -> None:
    """With an evaluation after every iteration."""
    async with real_run(case, tmp_path) as run:
        await run.until_planned()
        await run.check_plan()
        await run.check_identities(whole_model(case.microbatch_count))
        frontier = await run.observer.frontier()
        assert frontier.points[-1].energy_j < 0.9 * frontier.baseline.energy_j
        await run.set_budget(BUDGET_PERCENT)
        (planned_s, *_) = (await run.planned_job()).planned_iteration_time_s
        assert (
            frontier.t_min_s
            < planned_s
            <= 1.01 * (1 + BUDGET_PERCENT / 100) * frontier.baseline.iteration_time_s
        )
        energies_j = {each.energy_j for each in frontier.points if each.iteration_time_s <= planned_s}
        assert min(energies_j) < 0.97 * frontier.points[0].energy_j
    check_losses(case, run.task)


@of_another_layout
@pytest.mark.parametrize(
    "case", [REPLICATED, DATA_PARALLEL, FULLY_SHARDED], ids=["pipelines", "DDP", "FSDP2"]
)
async def test_a_straggling_replica_is_detected_and_answered(case: Case, tmp_path: Path) -> None:
    """The fast replicas' wait for a slow one is not part of their computations."""
    async with real_run(case, tmp_path) as run:
        await run.until_planned()
        await run.check_plan()
        before = run.observer.in_force_since()
        run.cluster.degrade(STRAGGLER, SLOWDOWN)
        await run.until_newer_plan(
            "the straggler detected, and its answer", before, lambda: run.observer.stragglers == {STRAGGLER}
        )
        job = await run.planned_job()
        assert job.planned_iteration_time_s[0] > 1.15 * job.t_min_s, "the others take the time that there is"
    check_losses(case, run.task)
