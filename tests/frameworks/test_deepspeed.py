"""DeepSpeed's pipeline engine, really training on CPUs under a real coordinator and real agents."""

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed; `make test-frameworks` has it", allow_module_level=True)

from perseus import solver
from tests.frameworks.cases import (
    LIGHT,
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

FOUR_STAGES = Case("deepspeed_trainer", "1f1b", LIGHT, 1, 0.05, 0.1, microbatch_count=STEADY_MICROBATCHES)


@pytest.mark.timeout(600)
async def test_pipeline_engine(tmp_path: Path) -> None:
    async with real_run(FOUR_STAGES.workload, tmp_path / "logs", start(FOUR_STAGES, tmp_path)) as run:
        await run.until_planned()
        plan = await check_plan(run)
        await check_identities(run, identities(solver.one_forward_one_backward(4, STEADY_MICROBATCHES)))
        assert run.observer.job is not None
        works = [work.fingerprint for work in run.observer.job.spec.stage_work]
        assert len(works) == 4
        assert all("parameters, " in work for work in works)
    check_losses(FOUR_STAGES, tmp_path)
    keep(
        FOUR_STAGES, "deepspeed-1f1b", 30, "DeepSpeed, 1F1B", run.stock, plan, packages=("deepspeed", "torch")
    )
    log = (tmp_path / "logs" / "trainers.log").read_text()
    assert "the framework's table has" not in log, "DeepSpeed's own table has the executed computations"
