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

STRAGGLER, SLOWDOWN = 1, 2.0
BUDGET_PERCENT = 100.0
"""Slower than any plan: where a frontier's points lie depends on how busy the machine was."""


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


def of(case: Case, *others: object, is_nightly: bool = True) -> Any:
    """Return a row that is named after its case."""
    ranks = f"{case.pipeline_count} x {len(case.stage_weights)} x {case.tensor_count} ranks"
    names = (case.trainer, case.schedule, ranks, "evaluated" * bool(case.evaluate_every), *case.beside)
    marks = of_another_layout if is_nightly else ()
    return pytest.param(case, *others, marks=marks, id=", ".join(filter(None, names)))


in_ci = partial(of, is_nightly=False)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        in_ci(on_two("torch", "1F1B"), two),
        in_ci(briefly_on_two("megatron", "1f1b-timers"), two),
        in_ci(briefly_on_two("deepspeed", "1f1b"), two),
        in_ci(briefly_on_two("torchtitan", "1F1B", forward_s=0.03, backward_s=0.06), two),
        of(on_four("torch", "1F1B", pipeline_count=4), four),
        of(on_four("megatron", "1f1b-timers"), four),
        of(on_four("deepspeed", "1f1b"), four),
        of(on_two("torch", "Interleaved1F1B", chunk_count=2), TWO_CHUNKS),
        of(on_two("torch", "ZBVZeroBubble", chunk_count=2), None),
        of(on_two("torch", "DualPipeV", chunk_count=2), None),
        of(on_two("torch", "1F1B", pipeline_count=2, tensor_count=2), two),
        of(on_two("torch", "1F1B", evaluate_every=10), two),
        of(on_two("megatron", "interleaved", chunk_count=2), TWO_CHUNKS),
        of(on_two("torchtitan", "1F1B", forward_s=0.08, backward_s=0.16, beside=[NEWEST_TORCH]), two),
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
        in_ci(replace(DATA_PARALLEL, forward_s=0.005, backward_s=0.01, pipeline_count=2)),
        in_ci(replace(FULLY_SHARDED, forward_s=0.005, backward_s=0.01)),
        of(replace(FULLY_SHARDED, schedule="hsdp", pipeline_count=4)),
    ],
)
async def test_replicas_are_planned_within_a_slowdown_budget(case: Case, tmp_path: Path) -> None:
    """With an evaluation after every iteration."""
    async with real_run(case, tmp_path) as run:
        await run.until_planned()
        await run.check_plan()
        await run.check_identities(whole_model(case.microbatch_count))
        await run.set_budget(BUDGET_PERCENT)
        job, frontier = await run.planned()
        cheapest_s = frontier.points[frontier.t_star_index].iteration_time_s
        for planned_s in job.planned_iteration_time_s:
            assert 0.9999 * cheapest_s <= planned_s <= 1.0001 * frontier.t_star_s
    check_losses(case, run.task)


@pytest.mark.parametrize("case", [*map(of, (REPLICATED, DATA_PARALLEL, FULLY_SHARDED))])
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
        job, _ = await run.planned()
        assert job.planned_iteration_time_s[0] > job.t_min_s, "the others take the time that there is"
    check_losses(case, run.task)
