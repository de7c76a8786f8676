"""Every example, run as documented: on emulated GPUs, from stock to its plan."""

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed; `make test-frameworks` has it", allow_module_level=True)

from perseus.demo.example import show

pytestmark = pytest.mark.slow("trains for real, with the framework")

EXAMPLES = Path(__file__).parents[2] / "examples"

PIPELINES, REPLICAS = ("torch_pipeline", "megatron", "deepspeed"), ("transformers", "accelerate")
of_a_trained_framework = pytest.mark.nightly("CI plans a training of the same framework")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    ["lightning", *(pytest.param(name, marks=of_a_trained_framework) for name in PIPELINES + REPLICAS)],
)
async def test_an_example_reaches_its_plan(name: str, tmp_path: Path) -> None:
    """`perseus demo` judges whether that is as fast, and saves as much, as it should."""
    framework = name.removesuffix("_pipeline")
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed; `make test-frameworks` has it")
    output: list[str] = []
    outcome = await show(EXAMPLES / name / "train.py", tmp_path, output.append)
    ranks = "1 pipelines × 4 stages" if name in PIPELINES else "2 pipelines × 1 stages"
    assert f"registered with {ranks} × 1 tensor-parallel ranks" in output
    assert [phase.name for phase in outcome.measurements.phases] == ["stock", "plan"]
