"""Which versions hooks meet that were not tested."""

import pytest

from perseus.agent.probe import tested_versions
from perseus.agent.probe.tested_versions import note_versions
from tests.frameworks.versions import MODULE, PAGE, literal, table, written

REAL_RUNS = tested_versions.RUNS
RUNS = [("megatron", "0.9.2", "2.9.0"), ("megatron", "0.16.1", "2.13.0"), ("torch", "2.15.0", "2.15.0")]


@pytest.mark.parametrize(
    ("hook", "version", "torch", "untested"),
    [
        ("megatron", "0.16.1", "2.13.0+cu130", []),
        ("megatron", "0.16.3", "2.13.0", []),
        ("megatron", "0.19.2", "2.13.0", ["Megatron-Core 0.19.2"]),
        ("megatron", "0.16.1", "2.15.0", ["torch 2.15.0"]),
        ("torch", "2.16.0", "2.16.0", ["torch 2.16.0"]),
        ("torchtitan", "0.3.0", "2.15.0", ["torchtitan 0.3.0", "torch 2.15.0"]),
    ],
)
def test_an_untested_version_is_noted_once(
    hook: str, version: str, torch: str, untested: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RUNS", RUNS), ("met", {}), ("untested", [])):
        monkeypatch.setattr(tested_versions, name, value)
    for _ in range(2):
        note_versions(hook, version, torch)
    assert tested_versions.untested == untested


def test_the_page_and_the_hooks_have_one_table() -> None:
    """`tests/frameworks` compares it with the versions that are really trained with."""
    assert written(PAGE) == table(REAL_RUNS)
    assert written(MODULE) == literal(REAL_RUNS)
