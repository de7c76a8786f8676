"""Compare the table of versions with those that the attached tests really trained with.

Every rank of `trainers` writes them to a file, whose content is attached to the report of its test, so that
the main process gets those of all workers. The table must have them, and only them if all files of this
folder have run and passed; with $WRITE_VERSIONS it is then written.
"""

import json
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from perseus.agent.probe.tested_versions import RUNS, Run
from tests.frameworks.versions import in_order, write

_FOLDER = Path(__file__).parent
_RAN, _IS_PART = "ran", "is a part"

_is_part = pytest.StashKey[bool]()


class _Table:
    """The versions that the session's tests have trained with, by the reports from all workers."""

    def __init__(self) -> None:
        self._ran: set[Run] = set()
        self._is_part = False
        self._files: set[str] = set()

    @property
    def _is_whole(self) -> bool:
        """Whether all tests of this folder have run, and passed."""
        return not self._is_part and self._files >= {path.name for path in _FOLDER.glob("test_*.py")}

    @property
    def _differs(self) -> bool:
        """Whether the table lacks one of them, or after all tests has others."""
        return self._ran != set(RUNS) if self._is_whole else not self._ran <= set(RUNS)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path = Path(report.nodeid.partition("::")[0])
        if _FOLDER.name not in path.parts:
            return
        self._files.add(path.name)
        reported: dict[str, Any] = dict(report.user_properties)
        is_as_expected = report.passed or hasattr(report, "wasxfail")
        self._is_part |= not is_as_expected or bool(reported.get(_IS_PART))
        self._ran.update((hook, version, torch) for hook, version, torch in reported.get(_RAN, ()))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        if "WRITE_VERSIONS" in os.environ:
            if self._is_whole:
                write(in_order([*self._ran]))
        elif self._differs:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if "WRITE_VERSIONS" in os.environ:
            message = "is written" if self._is_whole else "is not written: not all tests have run and passed"
            terminalreporter.write_line(f"the table of versions {message}")
        elif self._differs:
            verb, ran = "be" if self._is_whole else "have", in_order([*self._ran])
            text = f"expected the table of versions to {verb} {ran}, found {in_order([*RUNS])}"
            terminalreporter.write_line(f"FAILED {text}: `make framework-versions` writes it", red=True)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of this process."""
    from torch import distributed

    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    yield
    distributed.destroy_process_group()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_is_part] = False
    config.pluginmanager.register(_Table())


def pytest_deselected(items: list[pytest.Item]) -> None:
    if items:
        items[0].config.stash[_is_part] = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call":
        folder: Path | None = getattr(item, "funcargs", {}).get("tmp_path")
        files = folder.rglob("rank-*.json") if report.passed and folder is not None else ()
        ran = [run for file in files for run in json.loads(file.read_text())["ran"]]
        report.user_properties += [(_RAN, ran), (_IS_PART, item.config.stash[_is_part])]
    return report
