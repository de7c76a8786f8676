"""Every recorded run repeats: the same offers, refusals, events, reports and views at every step.

Batches of telemetry were recorded one by one, with whole rows. Here, those of the same time arrive together
in random groups, and some of them with short rows.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from random import Random

import numpy as np
import pytest

from perseus.service.domain.inputs import TelemetryArrived
from perseus.service.storage.sql_store import SqlStore
from tests.differences import differences
from tests.service.job.recorded.runs import FILES, RecordedRun, Step, load

_EXPLAINED = ".look.power."
"""Not compared for an ended run: budgets no longer request its power, and no machine is kept to answer."""


@pytest.fixture(autouse=True)
def no_stock_beside_plans() -> None:
    """Blocks at stock come as they were recorded."""


NAMES = sorted(path.name.removesuffix(".jsonl.gz") for path in FILES.glob("*.jsonl.gz"))
assert len(NAMES) >= 30


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.0.0",
    reason="recorded with NumPy 2: margins go by steps, and the last digits of NumPy 1 lead to other ones",
)
@pytest.mark.parametrize("name", NAMES)
async def test_a_recorded_run_repeats(name: str, tmp_path: Path) -> None:
    steps, expected = load(name)
    *outputs, last = expected
    dice = Random(name)
    store = await SqlStore.open(tmp_path / "store.db")
    try:
        recorded_run = RecordedRun(store)
        number = 0
        for group in _groups(steps, dice):
            if isinstance(group[0].what, TelemetryArrived):
                went = recorded_run.take_telemetry([_shortened(step, dice) for step in group])
            else:
                went = [await recorded_run.take(group[0])]
            for step, output in zip(group, went, strict=True):
                found = list(islice(_unexplained(recorded_run, outputs[number], output), 5))
                assert not found, f"step {number}, {type(step.what).__name__}: " + "\n".join(found)
                number += 1
        assert list(islice(_unexplained(recorded_run, last, await recorded_run.end()), 5)) == []
    finally:
        await store.close()


def _groups(steps: list[Step], dice: Random) -> Iterator[list[Step]]:
    """Return the steps in groups: telemetry of the same time may arrive together."""
    for (is_telemetry, _), some in groupby(
        steps, lambda step: (isinstance(step.what, TelemetryArrived), step.now_s)
    ):
        rest = list(some)
        while rest:
            count = dice.randint(1, len(rest)) if is_telemetry else 1
            yield rest[:count]
            rest = rest[count:]


def _shortened(step: Step, dice: Random) -> Step:
    """Leave out what follows from the order of computations, where an agent may, half of the time."""
    assert isinstance(step.what, TelemetryArrived)
    batch = step.what.batch
    rows = batch.computations
    if [*batch.iterations.is_regular] != [True] or len(set(rows.iteration)) != 1 or dice.random() < 0.5:
        return step
    short = batch._replace(computations=rows._replace(iteration=(), kind=(), microbatch=(), chunk=()))
    short.check()
    assert short.computations.is_short
    return replace(step, what=replace(step.what, batch=short))


def _unexplained(recorded_run: RecordedRun, expected: list[object], found: list[object]) -> Iterator[str]:
    for difference in differences(expected, found):
        if not (recorded_run.has_ended and _EXPLAINED in difference):
            yield difference
