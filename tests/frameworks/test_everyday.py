"""Trainings by Transformers, Lightning and Accelerate, really trained on CPUs in data parallel."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("transformers") is None:
    pytest.skip("Transformers is not installed; `make test-frameworks` has it", allow_module_level=True)

from perseus.v1 import job_pb2
from tests.frameworks.cases import Case, start
from tests.frameworks.real_run import STEP_TIMEOUT_S, real_run
from tests.frameworks.trainers import CAUGHT_FILE, FAIL_FILE

pytestmark = pytest.mark.slow("trains for real, with the framework")

ACCUMULATED, ITERATIONS, SAVED_AFTER = 2, 4, 2  # as in everyday_trainer, which imports the frameworks
ORDER = [[kind, microbatch, 0] for microbatch in range(ACCUMULATED) for kind in (1, 2)]
CASES = [
    f"{framework} {wrapping}"
    for framework in ("transformers", "lightning", "accelerate")
    for wrapping in ("ddp", "fsdp2")
] + ["pytorch_lightning ddp"]


@pytest.mark.timeout(300)
def test_trainings_compute_as_before_and_leave_nothing_behind(tmp_path: Path) -> None:
    """With accumulation, evaluation, checkpoints, bfloat16, from a checkpoint, and through an exception."""
    cases = {name: Case("everyday_trainer", name, (1.0,), 1, 0.0, 0.0, pipeline_count=2) for name in CASES}
    tasks = [
        replace(case.alone(tmp_path / name.replace(" ", "-"), 0), job_id="job")
        for name, case in cases.items()
    ]
    command = cases[CASES[0]].command(*tasks)
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr
    for task in tasks:
        for rank in (0, 1):
            found = json.loads(Path(task.losses_dir, f"rank-{rank}.json").read_text())
            alone, attached = found["losses"]
            assert attached == alone, task.schedule
            assert len({*alone}) > ITERATIONS, "it trained"
            assert found["registration"]["orders"] == [ORDER], task.schedule
            is_resumed = task.schedule in (
                "transformers ddp",
                "accelerate ddp",
            )  # Lightning's ends when it saves
            count = ITERATIONS + (ITERATIONS - SAVED_AFTER) * is_resumed
            assert found["iterations"] == count * [ORDER], task.schedule
            assert found["left"] == [False, True], "a failed rank has not finished its training"


@pytest.mark.timeout(200)
async def test_a_caught_failure_leaves_the_gpu_at_stock_and_training_begins_again(tmp_path: Path) -> None:
    """The trainer checks its GPU and its own log, which contains what the plan saves."""
    case = Case("everyday_trainer", "job", (1.0,), 1, 0.02, 0.04, pipeline_count=2)
    async with real_run(case.workload, tmp_path / "logs", start(case, tmp_path)) as run:
        await run.until_planned()
        (run.run_dir / FAIL_FILE).touch()
        observer = run.observer
        await observer.until("the failure", lambda: (run.run_dir / CAUGHT_FILE).exists(), STEP_TIMEOUT_S)
        first = observer.next_whole_iteration
        await observer.until(
            "iterations after the failure",
            lambda: observer.next_whole_iteration > first + 5,
            STEP_TIMEOUT_S,
        )
        assert observer.state == job_pb2.JOB_STATE_PLANNED
    log = (tmp_path / "logs" / "trainers.log").read_text()
    assert "perseus_energy_saved_percent" in log
