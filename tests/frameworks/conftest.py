"""Compare the table of versions with those that the attached tests really trained with.

Every rank of `trainers` writes them to a file. The table must have them, and only them if all files of this
folder have run and passed; with $WRITE_VERSIONS it is then written.
"""

import json
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from perseus.agent.probe.tested_versions import RUNS, Run
from tests.frameworks.versions import in_order, write


class _Table:
    """The versions that the session's tests have trained with."""

    def __init__(self) -> None:
        self._ran: set[Run] = set()
        self._files: set[str] = set()
        self.is_part = False

    def add(self, item: pytest.Item, report: pytest.TestReport) -> None:
        self._files.add(item.path.name)
        self.is_part |= not (report.passed or hasattr(report, "wasxfail"))
        folder: Path | None = getattr(item, "funcargs", {}).get("tmp_path")
        for file in folder.rglob("rank-*.json") if report.when == "call" and report.passed and folder else ():
            self._ran.update(
                (hook, version, torch) for hook, version, torch in json.loads(file.read_text())["ran"]
            )

    @property
    def _is_whole(self) -> bool:
        """Whether all tests of this folder have run, and passed."""
        return not self.is_part and self._files >= {
            path.name for path in Path(__file__).parent.glob("test_*.py")
        }

    @property
    def _differs(self) -> bool:
        """Whether the table lacks one of them, or after all tests has others."""
        return self._ran != set(RUNS) if self._is_whole else not self._ran <= set(RUNS)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if "WRITE_VERSIONS" not in os.environ:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED if self._differs else session.exitstatus
        elif self._is_whole:
            write(in_order([*self._ran]))

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


_table = pytest.StashKey[_Table]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_table] = _Table()
    config.pluginmanager.register(config.stash[_table])


def pytest_deselected(items: list[pytest.Item]) -> None:
    if items:
        items[0].config.stash[_table].is_part = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.config.stash[_table].add(item, report)
    return report
