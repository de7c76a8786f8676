"""What `tests/frameworks/test_restarts.py` does, for longer."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed here; `make test-frameworks-long` has it")

from tests.frameworks.restarts import check_launches, keep_launches


@pytest.mark.timeout(7200)
async def test_many_launches_with_random_changes_are_no_slower_than_stock(tmp_path: Path) -> None:
    keep_launches(await check_launches(30, seed=30, folder=tmp_path), "restarts-30", 41)
