"""A training that restarts repeatedly, each time with a random change, and one that changes itself."""

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torch") is None:
    pytest.skip("torch is not installed; `make test-frameworks` has it", allow_module_level=True)

from tests.frameworks.restarts import check_launches, check_ramp, keep_launches, keep_ramp

pytestmark = pytest.mark.slow("trains for real, with the framework")


@pytest.mark.timeout(600)
async def test_launches_with_random_changes_are_no_slower_than_stock(tmp_path: Path) -> None:
    keep_launches(await check_launches(4, seed=4, folder=tmp_path), "restarts-4", 40)


@pytest.mark.timeout(600)
async def test_a_ramp_of_microbatches_is_followed(tmp_path: Path) -> None:
    keep_ramp(await check_ramp((3, 6), tmp_path), "ramp", 42)
