"""Every recorded run repeats: the same offers, refusals, events, reports and views at every step."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from perseus.service.storage.sql_store import SqlStore
from tests.differences import differences
from tests.service.job.recorded.runs import FILES, RecordedRun, load

_EXPLAINED = ".look.power."
"""Not compared for an ended run: budgets no longer request its power, and no machine is kept to answer."""

NAMES = sorted(path.name.removesuffix(".jsonl.gz") for path in FILES.glob("*.jsonl.gz"))


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.0.0",
    reason="recorded with NumPy 2: margins go by steps, and the last digits of NumPy 1 lead to other ones",
)
@pytest.mark.parametrize("name", NAMES)
async def test_a_recorded_run_repeats(name: str, tmp_path: Path) -> None:
    steps, expected = load(name)
    store = await SqlStore.open(tmp_path / "store.db")
    try:
        recorded_run = RecordedRun(store)
        for number, step in enumerate(steps):
            went = await recorded_run.take(step)
            found = list(islice(_unexplained(recorded_run, expected[number], went), 5))
            assert not found, f"step {number}, {type(step.what).__name__}: " + "\n".join(found)
        assert list(islice(_unexplained(recorded_run, expected[-1], await recorded_run.end()), 5)) == []
    finally:
        await store.close()


def _unexplained(recorded_run: RecordedRun, expected: list[object], found: list[object]) -> Iterator[str]:
    for difference in differences(expected, found):
        if not (recorded_run.has_ended and _EXPLAINED in difference):
            yield difference


def test_there_are_thirty_runs_of_all_kinds() -> None:
    assert len(NAMES) >= 30
