"""Timelines: the iterations kept of a job, and how little memory they take."""

import sys
from array import array

from perseus.service.domain.specification import Coordinates, Parallelism
from perseus.service.domain.telemetry import ComputationColumns, Order
from perseus.service.job.iterations.timeline_memory import TimelineMemory
from perseus.solver import one_forward_one_backward
from perseus.v1.job_pb2 import IterationSummary

ORDER = one_forward_one_backward(2, 10).orders[0]


def of_whole_order(iteration: int) -> ComputationColumns:
    count = len(ORDER)
    return ComputationColumns(
        iteration=[iteration] * count,
        kind=[0, 1] * (count // 2),
        microbatch=list(range(count)),
        chunk=[0] * count,
        begin_s=[0.1 * row for row in range(count)],
        duration_s=[0.05] * count,
        clock_mhz=[1200 + row for row in range(count)],
    )


def finish(
    memory: TimelineMemory, iteration: int, pipeline: int = 0, columns: ComputationColumns | None = None
) -> None:
    """Let both stages report their columns, and the pipeline's iteration end."""
    for stage in range(2):
        memory.add(Coordinates(pipeline, stage, 0), columns or of_whole_order(iteration))
    memory.finish(
        IterationSummary(pipeline=pipeline, iteration=iteration, iteration_time_s=4.0, energy_j=1.0)
    )


def test_the_latest_iteration_that_all_stages_reported_is_found() -> None:
    memory = TimelineMemory(Parallelism(1, 2, 1))
    for iteration in range(5):
        finish(memory, iteration)
    memory.add(Coordinates(0, 0, 0), at(5, [1200, 1000]))
    for _ in range(2):
        latest = memory.latest(0)
        assert latest is not None
        assert (latest.iteration, len(latest.stages)) == (4, 2)
        memory.end()
    assert memory.mean_clock_mhz(0, 0) == memory.mean_clock_mhz(0, 1), "the incomplete one is forgotten"


def test_a_job_that_ends_without_a_complete_iteration_keeps_none() -> None:
    memory = TimelineMemory(Parallelism(1, 2, 1))
    memory.add(Coordinates(0, 0, 0), of_whole_order(0))
    memory.end()
    assert memory.latest(0) is None
    assert memory.mean_clock_mhz(0, 0) is None, "nothing is left of it"


def test_a_regular_iteration_is_kept_compact_and_unchanged() -> None:
    order = Order(ORDER)
    first, second = (order.compact(of_whole_order(iteration)) for iteration in (1, 2))
    assert first.kind is second.kind
    assert first.microbatch is second.microbatch
    assert first.chunk is second.chunk
    for kept, reported in zip(first[4:], of_whole_order(1)[4:], strict=True):
        assert list(kept) == reported
        assert isinstance(kept, array)
        assert sys.getsizeof(kept) < 1.5 * kept.itemsize * len(kept) + 64


def at(iteration: int, clocks_mhz: list[int]) -> ComputationColumns:
    """A forward of 1 s and a backward of 3 s."""
    return ComputationColumns([iteration] * 2, [0, 1], [0, 0], [0, 0], [0.0, 1.0], [1.0, 3.0], clocks_mhz)


def test_an_iteration_of_the_baseline_outlives_those_under_plans_and_the_jobs_end() -> None:
    memory = TimelineMemory(Parallelism(2, 2, 1))
    finish(memory, 3, 1, at(3, [0, 0]))
    memory.keep_baseline()
    assert memory.baseline is not None
    pipeline, timeline = memory.baseline
    assert (pipeline, timeline.iteration) == (1, 3), "the first pipeline with a complete one"

    for iteration in range(4, 12):
        finish(memory, iteration, 1, at(iteration, [1200, 1000]))
    memory.end()
    assert memory.baseline == (1, timeline)
    latest = memory.latest(1)
    assert latest is not None
    assert latest.iteration == 11

    memory.keep_baseline()
    assert memory.baseline is None, "iterations at other clocks are no baseline"


def test_the_mean_clock_is_weighted_by_time() -> None:
    memory = TimelineMemory(Parallelism(1, 2, 1))
    memory.add(Coordinates(0, 0, 0), at(3, [1200, 1000]))
    assert memory.mean_clock_mhz(0, 0) == 1050
    assert memory.mean_clock_mhz(0, 1) is None
    memory.add(Coordinates(0, 0, 0), at(4, [0, 0]))
    assert memory.mean_clock_mhz(0, 0) == 0
