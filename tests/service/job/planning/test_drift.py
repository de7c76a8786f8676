"""Drift that shows that a stage's work itself has changed."""

import pytest

from perseus.service.domain.measured import Timeline
from perseus.service.domain.telemetry import KINDS, ComputationColumns
from perseus.service.job.planning.drift import changed_work
from perseus.solver import Kind, Measurement, Pipeline, one_forward_one_backward

MICROBATCHES = 3
TIMES_S = {Kind.FORWARD: 0.02, Kind.BACKWARD: 0.04}
SCHEDULE = one_forward_one_backward(2, MICROBATCHES)
PROBLEM = Pipeline(
    SCHEDULE,
    {
        (stage, 0, kind): (Measurement(1400, time_s, 10.0), Measurement(1000, 1.3 * time_s, 8.0))
        for stage in range(2)
        for kind, time_s in TIMES_S.items()
    },
    (60.0, 60.0),
)


def timeline(*ratios: float) -> Timeline:
    """Return an iteration at the highest clock whose stages take so much longer than planned."""
    stages = tuple(
        ComputationColumns(
            iteration=[7] * len(order),
            kind=[KINDS.index(each.kind) for each in order],
            microbatch=[each.microbatch for each in order],
            chunk=[0] * len(order),
            begin_s=[0.0] * len(order),
            duration_s=[ratio * TIMES_S[each.kind] for each in order],
            clock_mhz=[1400] * len(order),
        )
        for ratio, order in zip(ratios, SCHEDULE.orders, strict=True)
    )
    return Timeline(7, 1.0, stages)


def test_slowness_of_every_pipeline_is_changed_work() -> None:
    found = changed_work(PROBLEM, [timeline(1.0, 2.0), timeline(1.0, 1.9)])
    assert found is not None
    stage, ratio = found
    assert stage == 1
    assert ratio == pytest.approx(1.9)


@pytest.mark.parametrize("pipeline_count", [2, 3, 8])
def test_slowness_of_one_pipeline_is_a_straggler(pipeline_count: int) -> None:
    others = [timeline(1.0, 1.0)] * (pipeline_count - 1)
    assert changed_work(PROBLEM, [timeline(1.2, 1.5), *others]) is None


def test_without_timelines_no_change_is_found() -> None:
    assert changed_work(PROBLEM, []) is None
