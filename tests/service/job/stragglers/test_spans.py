"""Compute spans: the compiled replay compared with a plain one, and spans from telemetry."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.specification import Coordinates, Parallelism
from perseus.service.domain.telemetry import KINDS, ComputationColumns, IterationColumns, TelemetryBatch
from perseus.service.job.stragglers.spans import SpanCollector, SpanGraph
from perseus.solver import Computation, Kind, Schedule, gpipe, one_forward_one_backward

F, B = Kind.FORWARD, Kind.BACKWARD

INTERLEAVED = Schedule(
    tuple(
        tuple(Computation(stage, F, m, chunk) for chunk in (0, 1) for m in (0, 1))
        + tuple(Computation(stage, B, m, chunk) for chunk in (1, 0) for m in (0, 1))
        + (Computation(stage, Kind.FIXED, 0),)
        for stage in (0, 1)
    )
)


def plain_span_s(schedule: Schedule, durations_s: dict[Computation, float]) -> float:
    """Return the span by definition: every computation starts when all its dependencies have ended."""
    ends_s: dict[Computation, float] = {}

    def end_s(computation: Computation) -> float:
        if computation not in ends_s:
            order = schedule.orders[computation.stage]
            place = order.index(computation)
            awaited = [*order[place - 1 : place]] if place else []
            awaited += [earlier for earlier, later in schedule.dependencies if later == computation]
            ends_s[computation] = max(map(end_s, awaited), default=0.0) + durations_s[computation]
        return ends_s[computation]

    return max(map(end_s, schedule.computations))


@given(
    schedule=st.one_of(
        st.builds(one_forward_one_backward, st.integers(1, 4), st.integers(1, 5)),
        st.builds(gpipe, st.integers(1, 3), st.integers(1, 4)),
        st.just(INTERLEAVED),
    ),
    data=st.data(),
)
def test_the_compiled_replay_equals_the_plain_one(schedule: Schedule, data: st.DataObject) -> None:
    graph = SpanGraph(schedule)
    count = len(graph.columns)
    times_s = st.lists(st.floats(0, 10), min_size=count, max_size=count)
    pipelines = [data.draw(times_s) for _ in range(2)]
    found_s = graph.spans_s(np.array(pipelines).T)
    for durations_s, span_s in zip(pipelines, found_s, strict=True):
        by_computation = {c: durations_s[column] for c, column in graph.columns.items()}
        assert span_s == pytest.approx(plain_span_s(schedule, by_computation))


SCHEDULE = one_forward_one_backward(2, 3)


def batch(
    rows: Sequence[tuple[Computation, float]], iteration: int = 0, clock_event_reasons: int = 0
) -> TelemetryBatch:
    count = len(rows)
    return TelemetryBatch(
        sequence=1,
        iterations=IterationColumns(
            [iteration],
            [0],
            [1.0],
            [1.0],
            [True],
            [clock_event_reasons],
        ),
        computations=ComputationColumns(
            [iteration] * count,
            [KINDS.index(c.kind) for c, _ in rows],
            [c.microbatch for c, _ in rows],
            [c.chunk for c, _ in rows],
            [0.0] * count,
            [time_s for _, time_s in rows],
            [0] * count,
        ),
        energy=None,
        dropped_batch_count=0,
    )


def order_rows(
    stage: int, forward_s: float = 1.0, backward_s: float = 2.0
) -> list[tuple[Computation, float]]:
    return [(c, forward_s if c.kind is F else backward_s) for c in SCHEDULE.orders[stage]]


def collector(pipelines: int = 2, tensors: int = 1) -> SpanCollector:
    return SpanCollector(SCHEDULE, Parallelism(pipelines, 2, tensors))


def fill(found: SpanCollector, iteration: int = 0, pipelines: int = 2) -> None:
    for pipeline in range(pipelines):
        for stage in (0, 1):
            found.add(Coordinates(pipeline, stage, 0), batch(order_rows(stage), iteration))


UNIFORM_S = plain_span_s(SCHEDULE, {c: 1.0 if c.kind is F else 2.0 for c in SCHEDULE.computations})


def test_spans_come_from_durations_alone() -> None:
    some = collector()
    fill(some)
    spans = some.take(0, (0, 0))
    assert spans is not None
    assert spans.spans_s.tolist() == [UNIFORM_S, UNIFORM_S]
    assert np.isnan(spans.planned_s).all()
    assert spans.clock_event_reasons.tolist() == [0, 0]
    assert some.take(0, (0, 0)) is None, "taken"


def with_work(reported: TelemetryBatch, relative_work: list[float]) -> TelemetryBatch:
    return reported._replace(iterations=reported.iterations._replace(relative_work=relative_work))


def test_a_pipelines_work_is_the_largest_report_of_its_ranks_and_1_without_one() -> None:
    some = collector(pipelines=3)
    fill(some, pipelines=3)
    some.add(Coordinates(0, 0, 0), with_work(batch([]), [0.8]))
    some.add(Coordinates(0, 1, 0), with_work(batch([]), [1.25]))
    some.add(Coordinates(0, 1, 0), with_work(batch([]), []))
    some.add(Coordinates(1, 0, 0), with_work(batch([]), [0.0]))
    spans = some.take(0, (0, 0, 0))
    assert spans is not None
    assert isinstance(spans.relative_work, np.ndarray)
    assert spans.relative_work.tolist() == [1.25, 1.0, 1.0]
    assert spans.spans_s.tolist() == [UNIFORM_S] * 3, "spans stay as measured"


def test_work_belongs_to_the_iteration_that_it_was_reported_for() -> None:
    some = collector()
    for iteration, work in enumerate((2.0, 0.0)):
        fill(some, iteration)
        some.add(Coordinates(0, 0, 0), with_work(batch([], iteration), [work]))
    for iteration, work in enumerate((2.0, 1.0)):
        spans = some.take(iteration, (0, 0))
        assert spans is not None
        assert isinstance(spans.relative_work, np.ndarray)
        assert spans.relative_work.tolist() == [work, 1.0]


def test_the_backward_with_the_reduction_counts_with_the_median_of_its_peers() -> None:
    some = collector()
    fill(some)
    last = [c for c in SCHEDULE.orders[0] if c.kind is B][-1]
    some.add(Coordinates(1, 0, 0), batch([(last, 50.0)]))
    spans = some.take(0, (0, 0))
    assert spans is not None
    assert spans.spans_s.tolist() == [UNIFORM_S, UNIFORM_S]


def test_the_median_of_its_peers_decides_how_long_a_computation_takes() -> None:
    some = collector()
    fill(some)
    forwards = [c for c in SCHEDULE.orders[1] if c.kind is F]
    some.add(Coordinates(0, 1, 0), batch([(forwards[0], 9.0)]))
    some.add(Coordinates(1, 1, 0), batch([(c, 4.0) for c in forwards[:2]]))
    spans = some.take(0, (0, 0))
    assert spans is not None
    slow_s = {c: 4.0 if c in forwards else 1.0 if c.kind is F else 2.0 for c in SCHEDULE.computations}
    assert spans.spans_s.tolist() == [UNIFORM_S, plain_span_s(SCHEDULE, slow_s)]


def test_under_a_plan_peers_share_their_slowness_not_their_time() -> None:
    some = collector(pipelines=1)
    planned_s = {c: 1.0 + 0.1 * c.microbatch for c in SCHEDULE.computations}
    some.expect(7, planned_s)
    for stage, order in enumerate(SCHEDULE.orders):
        some.add(Coordinates(0, stage, 0), batch([(c, 1.2 * planned_s[c]) for c in order]))
    some.add(Coordinates(0, 0, 0), batch([(SCHEDULE.orders[0][0], 9.0)]))
    spans = some.take(0, (7,))
    assert spans is not None
    assert spans.spans_s == pytest.approx(1.2 * spans.planned_s)


def test_a_stage_is_as_slow_as_its_slowest_rank() -> None:
    some = collector(pipelines=1, tensors=2)
    for stage in (0, 1):
        some.add(Coordinates(0, stage, 0), batch(order_rows(stage, 2.0, 4.0)))
        some.add(Coordinates(0, stage, 1), batch(order_rows(stage)))
    spans = some.take(0, (0,))
    assert spans is not None
    assert spans.spans_s.tolist() == [2 * UNIFORM_S]


def test_a_computation_that_is_missing_leaves_only_its_pipeline_unknown() -> None:
    some = collector()
    some.add(Coordinates(0, 0, 0), batch(order_rows(0)[1:]))
    some.add(Coordinates(0, 1, 0), batch(order_rows(1)))
    for stage in (0, 1):
        some.add(Coordinates(1, stage, 0), batch(order_rows(stage)))
    spans = some.take(0, (0, 0))
    assert spans is not None
    assert np.isnan(spans.spans_s).tolist() == [True, False]


def test_computations_outside_the_order_are_ignored() -> None:
    some = collector()
    fill(some)
    strange = [Computation(0, F, 3), Computation(0, F, 0, 9), Computation(0, Kind.RECOMPUTATION, 0)]
    some.add(Coordinates(0, 0, 0), batch([(c, 99.0) for c in strange]))
    spans = some.take(0, (0, 0))
    assert spans is not None
    assert spans.spans_s.tolist() == [UNIFORM_S, UNIFORM_S]


def test_a_plan_is_compared_by_the_version_that_the_iteration_ran_under() -> None:
    some = collector()
    planned_s = {c: 1.5 if c.kind is F else 2.0 for c in SCHEDULE.computations}
    some.expect(7, planned_s)
    fill(some)
    spans = some.take(0, (7, 8))
    assert spans is not None
    assert spans.planned_s[0] == plain_span_s(SCHEDULE, planned_s)
    assert np.isnan(spans.planned_s[1])


def test_old_plans_are_forgotten() -> None:
    some = collector()
    for version in range(1, 100):
        some.expect(version, dict.fromkeys(SCHEDULE.computations, 1.0))
    fill(some)
    spans = some.take(0, (99, 1))
    assert spans is not None
    assert np.isnan(spans.planned_s).tolist() == [False, True]


@pytest.mark.parametrize("version", [0, 7])
def test_the_stage_that_fell_behind_is_named(version: int) -> None:
    some = collector(pipelines=3)
    some.expect(7, {c: 1.0 if c.kind is F else 2.0 for c in SCHEDULE.computations})
    fill(some, pipelines=2)
    some.add(Coordinates(2, 0, 0), batch(order_rows(0)))
    some.add(Coordinates(2, 1, 0), batch(order_rows(1, 1.25, 2.5), clock_event_reasons=0x40))
    spans = some.take(0, (version,) * 3)
    assert spans is not None
    assert spans.slowest_stages[2] == 1
    assert spans.stage_ratios[2] == pytest.approx(1.25)
    assert spans.clock_event_reasons.tolist() == [0, 0, 0x40]


def test_a_few_iterations_may_be_open_at_a_time() -> None:
    some = collector()
    for iteration in range(6):
        some.add(Coordinates(0, 0, 0), batch(order_rows(0), iteration))
    assert some.take(5, (0, 0)) is None, "the newest made way"
    for iteration in range(6):
        some.add(Coordinates(0, 0, 0), batch(order_rows(0), iteration))
    assert some.take(3, (0, 0)) is not None
    assert some.take(2, (0, 0)) is None, "a later one was taken"
    some.add(Coordinates(0, 0, 0), batch(order_rows(0), 6))
    some.restart()
    assert some.take(6, (0, 0)) is None
