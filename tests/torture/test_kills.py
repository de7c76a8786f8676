"""A killed coordinator loses nothing that it has acknowledged. `make torture-coordinator` kills more."""

from pathlib import Path

import pytest

from tests.torture.coordinator import torture_sqlite

KILLS = 2


@pytest.mark.slow("a coordinator is killed and started again while dozens of agents train")
@pytest.mark.timeout(300)
def test_nothing_acknowledged_is_lost_and_no_version_is_reused(tmp_path: Path) -> None:
    outcome = torture_sqlite(tmp_path, KILLS, 0)
    assert outcome.problems == []
    assert outcome.kill_count == KILLS
    assert outcome.states == ["JOB_STATE_PLANNED"]
    assert outcome.batch_count > 0
    assert outcome.version_count > 0
