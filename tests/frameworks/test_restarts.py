"""A training that is started again and again, each time with a random change, and one that changes itself."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed here; `make test-frameworks` has it")

from tests.frameworks.restarts import check_launches, check_ramp, keep_launches, keep_ramp


@pytest.mark.timeout(600)
async def test_launches_with_random_changes_are_no_slower_than_stock(tmp_path: Path) -> None:
    keep_launches(await check_launches(4, seed=4, folder=tmp_path), "restarts-4", 40)


@pytest.mark.timeout(600)
async def test_a_ramp_of_microbatches_is_followed(tmp_path: Path) -> None:
    keep_ramp(await check_ramp((3, 6), tmp_path), "ramp", 42)
