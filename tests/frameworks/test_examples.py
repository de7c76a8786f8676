"""Every example, run as documented: on emulated GPUs, from stock to its plan."""

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed; `make test-frameworks` has it", allow_module_level=True)

from perseus.demo.example import show
from tests.frameworks.punctual import descendants, make_punctual

pytestmark = pytest.mark.slow("trains for real, with the framework")

EXAMPLES = Path(__file__).parents[2] / "examples"

REGISTERED = "registered with 1 pipelines × 4 stages × 1 tensor-parallel ranks"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "framework"), [("torch_pipeline", "torch"), ("megatron", "megatron"), ("deepspeed", "deepspeed")]
)
async def test_an_example_shows_its_plan_s_saving(name: str, framework: str, tmp_path: Path) -> None:
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed; `make test-frameworks` has it")
    output: list[str] = []

    def send(message: str) -> None:
        if message == REGISTERED:  # its ranks have imported everything by now
            for rank in descendants("perseus.demo.example_rank"):
                make_punctual(rank)
        output.append(message)

    measurements = await show(EXAMPLES / name / "train.py", tmp_path, send)
    assert REGISTERED in output
    plan = measurements.phase("plan")
    assert plan.saving_percent > 5
    assert plan.slowdown_percent < 3
