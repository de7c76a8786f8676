"""Scripts that the demo can run, and their hooks."""

import re
from collections.abc import Callable
from pathlib import Path

import grpc.aio
import pytest

from perseus.demo import example
from perseus.demo.example import ScriptError, ScriptOutcome, hook_of, judge_script, show
from perseus.demo.example_rank import HOOKS_OF_PIPELINES, HOOKS_OF_REPLICAS
from perseus.demo.observation import ObservationError, Observer
from perseus.demo.summary import Iteration, Measurements
from perseus.v1 import event_pb2, job_pb2, job_service_pb2
from tests.cli.prepared import PreparedCoordinator

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_every_example_has_its_hook_and_each_hook_its_example() -> None:
    scripts = sorted(EXAMPLES.glob("*/train.py"))
    assert sorted(map(hook_of, scripts)) == sorted(HOOKS_OF_PIPELINES + HOOKS_OF_REPLICAS)


def test_examples_contain_nothing_of_the_demo() -> None:
    for script in EXAMPLES.rglob("*.py"):
        code = script.read_text()
        assert "perseus.demo" not in code, script
        assert len(re.findall(r"\b(attach|attach_model|PerseusCallback)\(", code)) == 1, script


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import torch\n", "found none"),
        ("def main(:\n", "expected a Python script: invalid syntax"),
        ("\0", "expected a Python script: "),
    ],
)
async def test_an_unusable_script_is_refused_before_anything_starts(
    code: str, found: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(code)
    with pytest.raises(ScriptError, match=found) as refusal:
        await show(script, tmp_path / "out", lambda _: None)
    assert str(script) in str(refusal.value)
    assert not (tmp_path / "out").exists()


def trained(
    time_s: float, energy_j: float, *withdrawals: str, max_slowdown_percent: float = 0.0
) -> ScriptOutcome:
    measurements = Measurements(pipeline_count=1)
    measurements.add(Iteration(0, 1, 0, 1.0, 100.0))
    measurements.add(Iteration(0, 2, 7, time_s, energy_j))
    measurements.close_phase("stock", [1])
    measurements.close_phase("plan", [2], "stock")
    return ScriptOutcome(measurements, max_slowdown_percent, withdrawals)


def test_a_script_s_plan_is_judged_as_the_demo_s() -> None:
    assert judge_script(trained(1.01, 80.0)) == []
    assert judge_script(trained(1.11, 80.0, max_slowdown_percent=10.0)) == []
    (slow,) = judge_script(trained(1.322, 80.0))
    assert slow == "plan: expected an iteration time of at most 1.020 s (1 × stock + 2.0 %), found 1.322 s"
    (withdrawn,) = judge_script(trained(1.0, 80.0, "planned → solving: predictions violated"))
    assert withdrawn == "plan: expected it to stay in force, found planned → solving: predictions violated"


def changed_to(state: job_pb2.JobState.ValueType) -> event_pb2.JobEvent:
    return event_pb2.JobEvent(
        type=event_pb2.JOB_EVENT_TYPE_STATE_CHANGED,
        state_changed=event_pb2.StateChanged(after=state),
        message=f"now {job_pb2.JobState.Name(state)}",
    )


SOLVED = [changed_to(job_pb2.JOB_STATE_SOLVING), changed_to(job_pb2.JOB_STATE_PLANNED)]


class PlannedOnce(Observer):
    """A job that is planned with a slowdown of 10 %, and leaves its plan while that is measured."""

    def __init__(self) -> None:
        self.measurements = trained(1.1, 80.0).measurements
        self.measurements.phases.clear()
        self.events = [*SOLVED]
        self.job = job_pb2.Job(policy=job_pb2.OperatingPolicy(max_slowdown_percent=10.0))

    async def until(self, what: str, is_true: Callable[[], bool], timeout_s: float) -> None:
        pass

    async def collect(
        self, name: str, count: int, timeout_s: float, compared_with: str | None = None
    ) -> None:
        self.events += SOLVED
        self.measurements.close_phase(name, [2], compared_with)


async def test_a_plan_that_is_withdrawn_while_it_is_measured_is_noticed() -> None:
    outcome = await example._watch(PlannedOnce())
    assert outcome.max_slowdown_percent == 10.0
    assert outcome.withdrawals == ["now JOB_STATE_SOLVING"]


async def test_waiting_ends_when_a_job_goes_back_to_stock() -> None:
    job = job_pb2.Job(job_id="job", state=job_pb2.JOB_STATE_STOCK, state_reason="made up")
    with PreparedCoordinator() as prepared:
        prepared.answers = {"GetJob": job_service_pb2.GetJobResponse(job=job), "WatchJob": []}
        async with grpc.aio.insecure_channel(prepared.address) as channel:
            observer = Observer(channel, "job", Measurements(1), lambda: None)
            await observer.follow()
            with pytest.raises(ObservationError) as caught:
                await observer.until("a plan", lambda: False, timeout_s=600)
    assert str(caught.value) == "expected a plan, found the job at JOB_STATE_STOCK: made up"
