"""torchtitan's own trainer and debug model, really training on CPUs, attached by the hook's one name."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed; `make test-frameworks` has it", allow_module_level=True)

from perseus import solver
from tests.frameworks.cases import (
    HALF_LIGHT,
    MICROBATCHES,
    Case,
    check_identities,
    check_losses,
    check_plan,
    identities,
    start,
)
from tests.frameworks.real_run import real_run
from tests.frameworks.versions import NEWEST_TORCH, skip_unless_there

pytestmark = pytest.mark.slow("trains for real, with the framework")

ITERATIONS = 3


@pytest.mark.timeout(600)
async def test_1f1b(tmp_path: Path) -> None:
    skip_unless_there(NEWEST_TORCH)
    case = Case(
        "torchtitan_trainer", "1F1B", HALF_LIGHT, 1, 0.08, 0.16, beside=[NEWEST_TORCH], logs_one_loss=True
    )
    async with real_run(case.workload, tmp_path / "logs", start(case, tmp_path)) as run:
        await run.until_planned()
        await check_plan(run)
        await check_identities(run, identities(solver.one_forward_one_backward(2, MICROBATCHES)))
    check_losses(case, tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("schedule", "folders"), [("1F1B", []), ("Interleaved1F1B", [NEWEST_TORCH])])
def test_every_configured_schedule_is_attached(schedule: str, folders: list[str], tmp_path: Path) -> None:
    """The executed order is registered, the end detaches, losses are equal. 0.2 is installed, 0.3 beside."""
    skip_unless_there(*folders)
    case = Case("torchtitan_orders", schedule, (1.0, 1.0), 1, 0.0, 0.0, beside=folders)
    for name in ("alone", "attached"):
        task = replace(case.alone(tmp_path / name, ITERATIONS), job_id=name)
        done = subprocess.run(
            [sys.executable, *case.command(task)], capture_output=True, text=True, check=False, timeout=200
        )
        assert done.returncode == 0, done.stderr
        assert "the framework's table has" not in done.stderr
    alone, attached = (
        [json.loads((tmp_path / name / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
        for name in ("alone", "attached")
    )
    two_chunks = solver.interleaved_one_forward_one_backward(2, MICROBATCHES, 2)
    one_chunk = solver.one_forward_one_backward(2, MICROBATCHES)
    expected = identities(two_chunks if schedule == "Interleaved1F1B" else one_chunk)
    registration = attached[0]["registration"]
    assert [[tuple(c) for c in order] for order in registration["orders"]] == expected
    assert all("parameters, " in work for work in registration["stage_work"])
    for rank, order in enumerate(expected):
        executed = [[tuple(c) for c in iteration] for iteration in attached[rank]["iterations"]]
        assert executed == [order] * ITERATIONS
        assert attached[rank]["is_finished"]
    assert attached[1]["losses"] == alone[1]["losses"]
    assert len({*alone[1]["losses"]}) == ITERATIONS, "it did train"
