"""Compute spans: the compiled replay compared with a plain one, and spans from telemetry."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.specification import Coordinates, Parallelism
from perseus.service.job.stragglers.spans import IterationSpans, SpanCollector, SpanGraph
from perseus.solver import Computation, Kind, Schedule, gpipe, one_forward_one_backward
from tests.service.service_fakes import batch

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


def order_rows(
    stage: int, forward_s: float = 1.0, backward_s: float = 2.0
) -> list[tuple[Computation, float]]:
    return [(c, forward_s if c.kind is F else backward_s) for c in SCHEDULE.orders[stage]]


class Bench:
    """A collector, and the ranks' reports of an iteration."""

    def __init__(self, pipelines: int = 2, tensors: int = 1) -> None:
        self.collector = SpanCollector(SCHEDULE, Parallelism(pipelines, 2, tensors))
        self.pipelines = pipelines

    def fill(self, iteration: int = 0) -> "Bench":
        for pipeline in range(self.pipelines):
            for stage in (0, 1):
                self.add(pipeline, stage, order_rows(stage), iteration)
        return self

    def add(
        self,
        pipeline: int,
        stage: int,
        rows: Sequence[tuple[Computation, float]] = (),
        iteration: int = 0,
        *,
        tensor: int = 0,
        reasons: int = 0,
        work: Sequence[float] = (),
    ) -> None:
        reported = batch(1, [iteration], 0, 1.0, order=[computation for computation, _ in rows])
        computations = reported.computations._replace(duration_s=[time_s for _, time_s in rows])
        iterations = reported.iterations._replace(clock_event_reasons=[reasons], relative_work=work)
        reported = reported._replace(iterations=iterations, computations=computations)
        self.collector.add(Coordinates(pipeline, stage, tensor), reported)

    def take(self, *versions: int, iteration: int = 0) -> IterationSpans:
        spans = self.collector.take(iteration, versions or (0,) * self.pipelines)
        assert spans is not None
        return spans


UNIFORM_S = plain_span_s(SCHEDULE, {c: 1.0 if c.kind is F else 2.0 for c in SCHEDULE.computations})


def test_spans_come_from_durations_alone() -> None:
    bench = Bench().fill()
    spans = bench.take()
    assert spans.spans_s.tolist() == [UNIFORM_S, UNIFORM_S]
    assert np.isnan(spans.planned_s).all()
    assert spans.clock_event_reasons.tolist() == [0, 0]
    assert bench.collector.take(0, (0, 0)) is None, "taken"


def test_a_pipelines_work_is_the_largest_report_of_its_ranks_and_1_without_one() -> None:
    bench = Bench(pipelines=3).fill()
    for pipeline, stage, work in ((0, 0, [0.8]), (0, 1, [1.25]), (0, 1, []), (1, 0, [0.0])):
        bench.add(pipeline, stage, work=work)
    spans = bench.take()
    assert np.array(spans.relative_work).tolist() == [1.25, 1.0, 1.0]
    assert spans.spans_s.tolist() == [UNIFORM_S] * 3, "spans stay as measured"


def test_work_belongs_to_the_iteration_that_it_was_reported_for() -> None:
    bench = Bench()
    for iteration, work in enumerate((2.0, 0.0)):
        bench.fill(iteration)
        bench.add(0, 0, iteration=iteration, work=[work])
    for iteration, work in enumerate((2.0, 1.0)):
        assert np.array(bench.take(iteration=iteration).relative_work).tolist() == [work, 1.0]


FORWARDS = [c for c in SCHEDULE.orders[1] if c.kind is F]
LAST_BACKWARD = [c for c in SCHEDULE.orders[0] if c.kind is B][-1]
SLOW_S = plain_span_s(
    SCHEDULE, {c: 4.0 if c in FORWARDS else 1.0 if c.kind is F else 2.0 for c in SCHEDULE.computations}
)


@pytest.mark.parametrize(
    ("pipeline", "stage", "rows", "span_s"),
    [
        pytest.param(1, 0, [(LAST_BACKWARD, 50.0)], UNIFORM_S, id="the backward with the reduction"),
        pytest.param(0, 1, [(FORWARDS[0], 9.0)], UNIFORM_S, id="a single computation"),
        pytest.param(0, 1, [(c, 4.0) for c in FORWARDS[:2]], SLOW_S, id="most computations"),
        pytest.param(
            0,
            0,
            [
                (Computation(0, F, 3), 99.0),
                (Computation(0, F, 0, 9), 99.0),
                (Computation(0, Kind.RECOMPUTATION, 0), 99.0),
            ],
            UNIFORM_S,
            id="none outside the order",
        ),
    ],
)
def test_a_computation_counts_with_the_median_of_its_peers(
    pipeline: int, stage: int, rows: list[tuple[Computation, float]], span_s: float
) -> None:
    bench = Bench().fill()
    bench.add(pipeline, stage, rows)
    spans_s = bench.take().spans_s.tolist()
    assert (spans_s[pipeline], spans_s[1 - pipeline]) == (span_s, UNIFORM_S)


def test_under_a_plan_peers_share_their_slowness_not_their_time() -> None:
    bench = Bench(pipelines=1)
    planned_s = {c: 1.0 + 0.1 * c.microbatch for c in SCHEDULE.computations}
    bench.collector.expect(7, planned_s)
    for stage, order in enumerate(SCHEDULE.orders):
        bench.add(0, stage, [(c, 1.2 * planned_s[c]) for c in order])
    bench.add(0, 0, [(SCHEDULE.orders[0][0], 9.0)])
    spans = bench.take(7)
    assert spans.spans_s == pytest.approx(1.2 * spans.planned_s)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_stage_is_as_slow_as_its_slowest_rank(slow: int) -> None:
    bench = Bench(pipelines=1, tensors=2)
    for stage, tensor in product((0, 1), repeat=2):
        forward_s = 2.0 if tensor == slow else 1.0
        bench.add(0, stage, order_rows(stage, forward_s, 2 * forward_s), tensor=tensor)
    assert bench.take().spans_s.tolist() == [2 * UNIFORM_S]


def test_a_computation_that_is_missing_leaves_only_its_pipeline_unknown() -> None:
    bench = Bench()
    for pipeline, stage in ((0, 1), (1, 0), (1, 1)):
        bench.add(pipeline, stage, order_rows(stage))
    bench.add(0, 0, order_rows(0)[1:])
    assert np.isnan(bench.take().spans_s).tolist() == [True, False]


def test_a_plan_is_compared_by_the_version_that_the_iteration_ran_under_and_old_ones_are_forgotten() -> None:
    bench = Bench(pipelines=3).fill()
    planned_s = {c: 1.5 if c.kind is F else 2.0 for c in SCHEDULE.computations}
    for version in range(1, 100):
        bench.collector.expect(version, planned_s)
    known_s, unknown_s, forgotten_s = bench.take(99, 100, 1).planned_s
    assert known_s == plain_span_s(SCHEDULE, planned_s)
    assert np.isnan([unknown_s, forgotten_s]).all()


@pytest.mark.parametrize("version", [0, 7])
def test_the_stage_that_fell_behind_is_named(version: int) -> None:
    bench = Bench(pipelines=3).fill()
    bench.collector.expect(7, {c: 1.0 if c.kind is F else 2.0 for c in SCHEDULE.computations})
    bench.add(2, 1, order_rows(1, 1.25, 2.5), reasons=0x40)
    spans = bench.take(version, version, version)
    assert (spans.slowest_stages[2], spans.stage_ratios[2]) == (1, pytest.approx(1.25))
    assert spans.clock_event_reasons.tolist() == [0, 0, 0x40]


def test_a_few_iterations_may_be_open_at_a_time() -> None:
    bench = Bench()
    for iteration in range(6):
        bench.add(0, 0, order_rows(0), iteration)
    assert bench.collector.take(5, (0, 0)) is None, "the newest made way"
    for iteration in range(6):
        bench.add(0, 0, order_rows(0), iteration)
    bench.take(iteration=3)
    assert bench.collector.take(2, (0, 0)) is None, "a later one was taken"
    bench.add(0, 0, order_rows(0), 6)
    bench.collector.restart()
    assert bench.collector.take(6, (0, 0)) is None
