"""What `tests/frameworks/test_restarts.py` does, for longer."""

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed; `make test-frameworks-long` has it", allow_module_level=True)

from tests.frameworks.restarts import check_launches, keep_launches

pytestmark = pytest.mark.slow("trains for real, with the framework")


@pytest.mark.timeout(7200)
async def test_many_launches_with_random_changes_are_no_slower_than_stock(tmp_path: Path) -> None:
    keep_launches(await check_launches(30, seed=30, folder=tmp_path), "restarts-30", 41)
