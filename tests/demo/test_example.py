"""Scripts that the demo can run, and their hooks."""

import re
from pathlib import Path

import pytest

from perseus.demo.example import ScriptError, hook_of, show
from perseus.demo.example_rank import HOOKS_OF_PIPELINES, HOOKS_OF_REPLICAS

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
