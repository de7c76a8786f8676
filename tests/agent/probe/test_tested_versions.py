"""Warnings of hooks about versions that were not tested."""

import logging

import pytest

from perseus.agent.probe import tested_versions
from perseus.agent.probe.tested_versions import warn_if_untested

RUNS = [("megatron", "0.9.2", "2.9.0"), ("megatron", "0.16.1", "2.13.0"), ("torch", "2.15.0", "2.15.0")]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(tested_versions, "RUNS", RUNS)
    monkeypatch.setattr(tested_versions, "met", {})
    caplog.set_level(logging.INFO)


@pytest.mark.parametrize(
    ("version", "torch", "level", "message"),
    [
        ("0.16.1", "2.13.0+cu130", None, ""),
        ("0.16.3", "2.13.0", logging.INFO, "Megatron-Core 0.16.3: "),
        ("0.19.2", "2.13.0", logging.WARNING, "Megatron-Core 0.19.2: "),
        ("0.16.1", "2.15.0", logging.WARNING, "torch 2.15.0: "),
    ],
)
def test_a_version_is_logged_once(
    version: str, torch: str, level: int | None, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        warn_if_untested("megatron", version, torch)
    assert [record.levelno for record in caplog.records] == ([] if level is None else [level])
    assert message in caplog.text
    if message.startswith("Megatron"):
        assert "tested versions (0.9.2, 0.16.1;" in caplog.text


def test_the_torch_hook_names_torch_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_if_untested("torch", "2.16.0", "2.16.0")
    assert len(caplog.records) == 1


def test_a_hook_without_tested_versions_warns(caplog: pytest.LogCaptureFixture) -> None:
    warn_if_untested("torchtitan", "0.3.0", "2.15.0")
    assert "torchtitan 0.3.0: not among its hook's tested versions (none;" in caplog.text
