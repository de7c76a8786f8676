"""The page and the hooks have the same table of versions. `conftest` compares it with the tested ones."""

from perseus.agent.probe.tested_versions import RUNS
from tests.frameworks.versions import MODULE, PAGE, literal, table, written


def test_the_page_and_the_hooks_have_one_table() -> None:
    assert written(PAGE) == table(RUNS)
    assert written(MODULE) == literal(RUNS)
