"""Warnings of hooks about versions that were not tested."""

import logging

import pytest

from perseus.agent.probe import tested_versions
from perseus.agent.probe.tested_versions import warn_if_untested
from tests.frameworks.versions import MODULE, PAGE, literal, table, written

REAL_RUNS = tested_versions.RUNS
RUNS = [("megatron", "0.9.2", "2.9.0"), ("megatron", "0.16.1", "2.13.0"), ("torch", "2.15.0", "2.15.0")]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(tested_versions, "RUNS", RUNS)
    monkeypatch.setattr(tested_versions, "met", {})
    caplog.set_level(logging.INFO)


@pytest.mark.parametrize(
    ("hook", "version", "torch", "levels", "message"),
    [
        ("megatron", "0.16.1", "2.13.0+cu130", [], ""),
        ("megatron", "0.16.3", "2.13.0", [logging.INFO], "Megatron-Core 0.16.3: "),
        ("megatron", "0.19.2", "2.13.0", [logging.WARNING], "tested versions (0.9.2, 0.16.1;"),
        ("megatron", "0.16.1", "2.15.0", [logging.WARNING], "torch 2.15.0: "),
        ("torch", "2.16.0", "2.16.0", [logging.WARNING], "torch 2.16.0: "),
        (
            "torchtitan",
            "0.3.0",
            "2.15.0",
            2 * [logging.WARNING],
            "torchtitan 0.3.0: not among its hook's tested versions (none;",
        ),
    ],
)
def test_a_version_is_logged_once(
    hook: str, version: str, torch: str, levels: list[int], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        warn_if_untested(hook, version, torch)
    assert [record.levelno for record in caplog.records] == levels
    assert message in caplog.text


def test_the_page_and_the_hooks_have_one_table() -> None:
    """`tests/frameworks` compares it with the versions that are really trained with."""
    assert written(PAGE) == table(REAL_RUNS)
    assert written(MODULE) == literal(REAL_RUNS)
