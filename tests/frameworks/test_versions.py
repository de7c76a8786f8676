"""The table of versions: what the tests before this one, in the same session, really trained with."""

import os
from pathlib import Path

import pytest

from perseus.agent.probe.tested_versions import RUNS
from tests.frameworks.versions import IS_PART, MODULE, PAGE, RAN, in_order, literal, table, write, written


def test_the_page_and_the_hooks_have_one_table() -> None:
    assert written(PAGE) == table(RUNS)
    assert written(MODULE) == literal(RUNS)


def test_the_table_is_what_was_run(request: pytest.FixtureRequest) -> None:
    """`make framework-versions` writes it, where all tests pass."""
    session = request.session
    files = {item.path for item in session.items}
    if session.config.stash[IS_PART] or not files >= set(Path(__file__).parent.glob("test_*.py")):
        pytest.skip("not all tests of this folder have run here, and passed")
    ran = in_order([*session.config.stash[RAN]])
    if "WRITE_VERSIONS" in os.environ:
        write(ran)
    else:
        assert ran == list(RUNS), "make framework-versions writes it"
