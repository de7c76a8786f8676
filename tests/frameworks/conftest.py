"""Takes note of what the tests trained with, attached: every rank of `trainers` leaves that in a file."""

import json
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.frameworks.versions import IS_PART, RAN


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RAN] = set()
    config.stash[IS_PART] = False


def pytest_deselected(items: list[pytest.Item]) -> None:
    if items:
        items[0].config.stash[IS_PART] = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call":
        if not report.passed:
            item.config.stash[IS_PART] = True
        folder: Path | None = getattr(item, "funcargs", {}).get("tmp_path")
        for file in folder.rglob("ran-*.json") if report.passed and folder is not None else ():
            item.config.stash[RAN].update(tuple(run) for run in json.loads(file.read_text()))
    return report
