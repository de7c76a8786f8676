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

_ran: set[Run] = set()


def _is_whole(session: pytest.Session) -> bool:
    """Whether all tests of this folder have run, and passed; not known of those in other processes."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    assert reporter is not None
    others = {"failed", "error", "skipped", "deselected"}
    files = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    return (
        bool(_ran)
        and not others & reporter.stats.keys()
        and files <= {each.path.name for each in session.items}
    )


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of this process."""
    from torch import distributed

    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    yield
    distributed.destroy_process_group()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    folder: Path | None = getattr(item, "funcargs", {}).get("tmp_path")
    for file in folder.rglob("rank-*.json") if call.when == "call" and report.passed and folder else ():
        _ran.update(tuple(run) for run in json.loads(file.read_text())["ran"])
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    is_whole = _is_whole(session)
    if "WRITE_VERSIONS" in os.environ:
        message = "is not written: not all tests have run and passed"
        if is_whole:
            write(in_order([*_ran]))
            message = "is written"
        print(f"\nthe table of versions {message}")
    elif _ran != set(RUNS) if is_whole else not _ran <= set(RUNS):
        verb, ran = "be" if is_whole else "have", in_order([*_ran])
        text = f"expected the table of versions to {verb} {ran}, found {in_order([*RUNS])}"
        print(f"\nFAILED {text}: `make framework-versions` writes it")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
