"""Megatron-Core, really training on CPUs under a real coordinator and real agents."""

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("megatron") is None:
    pytest.skip("Megatron-Core is not installed; `make test-frameworks` has it", allow_module_level=True)

from perseus import solver
from tests.frameworks.cases import (
    HALF_LIGHT,
    LIGHT,
    MICROBATCHES,
    STEADY_MICROBATCHES,
    Case,
    check_identities,
    check_losses,
    check_plan,
    identities,
    keep,
    start,
)
from tests.frameworks.real_run import real_run

pytestmark = pytest.mark.slow("trains for real, with the framework")

MEGATRON = ("megatron-core", "torch")
BY_TIMERS = Case(
    "megatron_trainer", "1f1b-timers", LIGHT, 1, 0.045, 0.09, microbatch_count=STEADY_MICROBATCHES
)
INTERLEAVED = Case("megatron_trainer", "interleaved", HALF_LIGHT, 2, 0.045, 0.09)


@pytest.mark.timeout(600)
async def test_1f1b_seen_by_timers(tmp_path: Path) -> None:
    async with real_run(BY_TIMERS.workload, tmp_path / "logs", start(BY_TIMERS, tmp_path)) as run:
        await run.until_planned()
        plan = await check_plan(run)
        await check_identities(run, identities(solver.one_forward_one_backward(4, STEADY_MICROBATCHES)))
    check_losses(BY_TIMERS, tmp_path)
    keep(BY_TIMERS, "megatron-1f1b", 20, "Megatron-Core, 1F1B by timers", run.stock, plan, packages=MEGATRON)


@pytest.mark.timeout(600)
async def test_interleaved_1f1b(tmp_path: Path) -> None:
    async with real_run(INTERLEAVED.workload, tmp_path / "logs", start(INTERLEAVED, tmp_path)) as run:
        await run.until_planned()
        plan = await check_plan(run)
        await check_identities(
            run, identities(solver.interleaved_one_forward_one_backward(2, MICROBATCHES, 2))
        )
    check_losses(INTERLEAVED, tmp_path)
    keep(
        INTERLEAVED,
        "megatron-interleaved",
        21,
        "Megatron-Core, interleaved 1F1B",
        run.stock,
        plan,
        packages=MEGATRON,
    )
