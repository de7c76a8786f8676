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

REGISTERED = "registered with {} × 1 tensor-parallel ranks"
A_PIPELINE = REGISTERED.format("1 pipelines × 4 stages"), 5, 3
REPLICAS = REGISTERED.format("2 pipelines × 1 stages"), 3, 13
"""What is registered, the least saving and the most slowdown, percent: replicas have a budget of 10."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "framework", "expected"),
    [
        ("torch_pipeline", "torch", A_PIPELINE),
        ("megatron", "megatron", A_PIPELINE),
        ("deepspeed", "deepspeed", A_PIPELINE),
        ("transformers", "transformers", REPLICAS),
        ("lightning", "lightning", REPLICAS),
        ("accelerate", "accelerate", REPLICAS),
    ],
)
async def test_an_example_shows_its_plan_s_saving(
    name: str, framework: str, expected: tuple[str, float, float], tmp_path: Path
) -> None:
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed; `make test-frameworks` has it")
    registered, least_saving_percent, most_slowdown_percent = expected
    output: list[str] = []

    def send(message: str) -> None:
        if message == registered:  # its ranks have imported everything by now
            for rank in descendants("perseus.demo.example_rank"):
                make_punctual(rank)
        output.append(message)

    outcome = await show(EXAMPLES / name / "train.py", tmp_path, send)
    assert registered in output
    plan = outcome.measurements.phase("plan")
    assert plan.saving_percent > least_saving_percent
    assert plan.slowdown_percent < most_slowdown_percent
