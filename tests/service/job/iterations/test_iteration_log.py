"""Iterations assembled from their ranks, their report and its savings; the timelines kept of a job."""

import math
import statistics
import sys
from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.measured import MAX_PERIODS, JobIteration, Period, saving
from perseus.service.domain.model import STOCK, HoldClocks, JobState, PipelineOffer
from perseus.service.domain.pairs import Pair
from perseus.service.domain.specification import Coordinates, Parallelism
from perseus.service.domain.telemetry import ComputationColumns, IterationColumns, Order
from perseus.service.job.iterations.iteration_log import OPEN_LIMIT, IterationLog, report
from perseus.service.job.iterations.timeline_memory import TimelineMemory
from perseus.solver import one_forward_one_backward
from perseus.v1.job_pb2 import IterationSummary

RANKS = list(Parallelism(2, 1, 2).all_coordinates())
NOW_S = 1_000_000.0


def rows(
    iterations: Sequence[int],
    version: int = 0,
    time_s: float = 1.0,
    energy_j: float = 5.0,
    is_regular: bool = True,
) -> IterationColumns:
    count = len(iterations)
    return IterationColumns(
        list(iterations),
        [version] * count,
        [time_s] * count,
        [energy_j] * count,
        [is_regular] * count,
        [0] * count,
    )


def add_all(log: IterationLog, iteration: int, **values: float) -> None:
    for rank in RANKS:
        log.add(rank, rows([iteration], **values), NOW_S)  # type: ignore[arg-type]
    log.validate()


def label(log: IterationLog, version: int, start_iteration: int, state: JobState) -> None:
    """Tell the state of the clocks that all pipelines have from an iteration on."""
    for pipeline in range(2):
        clocks = STOCK if state in (JobState.BASELINE, JobState.STOCK) else HoldClocks((1000,))
        log.label(pipeline, PipelineOffer((version,), start_iteration, clocks), state)


def test_a_pipelines_iteration_takes_as_long_as_its_slowest_rank_and_costs_the_sum() -> None:
    log = IterationLog(RANKS)
    assert log.add(RANKS[0], rows([0, 1], time_s=1.0, energy_j=3.0), NOW_S) == ([], [])
    summaries, complete = log.add(RANKS[1], rows([0], time_s=2.0, energy_j=4.0), NOW_S)
    assert complete == []
    ((summary),) = summaries
    assert (summary.pipeline, summary.iteration) == (0, 0)
    assert (summary.iteration_time_s, summary.energy_j) == (2.0, 7.0)


def test_gaps_are_their_ranks_longest_and_all_their_energy() -> None:
    log = IterationLog(RANKS)
    complete = []
    for number, gap_s in enumerate((0.0, 1.0, 2.0, 6.0)):
        for index, rank in enumerate(RANKS):
            reported = rows([number])._replace(
                gap_time_s=[gap_s + index / 10], gap_energy_j=[10.0 * gap_s], gap_slowed_time_s=[gap_s / 100]
            )
            complete += log.add(rank, reported if index else rows([number]), NOW_S)[1]
    assert [each.gap_time_s for each in complete] == pytest.approx([0.3, 1.3, 2.3, 6.3])
    assert [each.gap_energy_j for each in complete] == pytest.approx([0.0, 30.0, 60.0, 180.0])
    (period,) = log.periods
    assert period.iteration_count == 3
    assert period.gap_time_s == pytest.approx((1.3 + 2.3 + 6.3) / 3)
    assert period.gap_energy_j == pytest.approx(90.0)
    assert period.gap_slowed_time_s == pytest.approx(0.03)


def restored(log: IterationLog) -> IterationLog:
    """Return the log as a restarted coordinator continues it."""
    found = IterationLog(RANKS)
    found.restore(log.periods)
    return found


def test_a_restart_leaves_no_iteration_out_of_the_report() -> None:
    log = IterationLog(RANKS)
    for iteration in range(3):
        add_all(log, iteration, energy_j=float(iteration))
    log = restored(log)
    for iteration in range(3, 5):
        add_all(log, iteration, energy_j=float(iteration))
    (period,) = log.periods
    assert (period.first_iteration, period.last_iteration, period.iteration_count) == (1, 4, 4)
    assert period.energy_j * period.iteration_count == len(RANKS) * (1 + 2 + 3 + 4)


def test_after_a_restart_an_iteration_whose_predecessor_is_unknown_counts_as_the_first_of_its_plans() -> None:
    log = IterationLog(RANKS)
    label(log, 7, 2, JobState.STOCK)
    for iteration in range(2):
        add_all(log, iteration)
    add_all(log, 2, version=7)
    log = restored(log)
    add_all(log, 3)  # the first under version 0 again, though the last period's was the same
    assert log.periods[-1].iteration_count == 1
    add_all(log, 4)
    assert log.periods[-1].iteration_count == 2
    assert restored(IterationLog(RANKS)).periods == []


def test_a_plan_is_known_after_any_number_of_blocks_at_stock_beside_it() -> None:
    log = IterationLog(RANKS)
    for block in range(100):
        for version, state in ((7, JobState.PLANNED), (8 + block, JobState.STOCK)):
            label(log, version, 2 * block, state)
            add_all(log, 2 * block + (version > 7), version=version)
            assert log.latest is not None
            assert (log.latest.versions, log.latest.state) == ((version, version), state)


def test_a_block_whose_energy_is_not_known_whole_leaves_the_others_energies() -> None:
    log = IterationLog(RANKS)
    for iteration in range(2):
        add_all(log, iteration)
    period = replace(log.periods[-1], state=JobState.PLANNED)
    for energy_j in (2.0, 0.0, 3.0, 4.0):
        period = period.compared_with(Pair((1.0,), (1.0,), (1.0,), 1.0, energy_j, 0))
    assert period.stock is not None
    assert (period.stock.energy_j, period.stock.iteration_count) == (3.0, 3)


def test_a_row_that_comes_twice_counts_once() -> None:
    log = IterationLog(RANKS)
    for _ in range(2):
        log.add(RANKS[0], rows([0]), NOW_S)
    assert log.add(RANKS[1], rows([0]), NOW_S)[0][0].energy_j == 10.0
    assert log.add(RANKS[1], rows([0]), NOW_S) == ([], [])


def test_the_first_iteration_under_new_plans_and_irregular_ones_are_left_out() -> None:
    log = IterationLog(RANKS)
    label(log, 1, 3, JobState.PROFILING)
    for iteration, version in enumerate([0, 0, 0, 1, 1]):
        add_all(log, iteration, version=version)
    add_all(log, 5, version=1, is_regular=False)
    assert [(p.state, p.first_iteration, p.iteration_count) for p in log.periods] == [
        (JobState.BASELINE, 1, 2),
        (JobState.PROFILING, 4, 1),
    ]


def test_an_iteration_in_which_a_pipeline_ran_two_plans_is_left_out() -> None:
    log = IterationLog(RANKS)
    add_all(log, 0)
    for rank in RANKS:
        (_, complete) = log.add(rank, rows([1], version=1 if rank == RANKS[0] else 0), NOW_S)
    assert complete[0].versions is None
    assert log.periods == []


def test_memory_holds_the_latest_periods_and_the_baseline_that_they_are_held_against() -> None:
    log, stored = IterationLog(RANKS), dict[int, Period]()
    for version in range(3 * MAX_PERIODS):
        state = JobState.PLANNED if version else JobState.BASELINE
        label(log, version, 2 * version, state)
        for iteration in (2 * version, 2 * version + 1):
            add_all(log, iteration, version=version)
        stored |= {period.number: period for period in log.periods}
    assert len(log.periods) <= MAX_PERIODS + 1
    assert list(stored) == list(range(3 * MAX_PERIODS)), "each was there to be stored"
    assert log.latest_baseline == stored[0]
    latest = log.latest_period()
    assert latest is not None
    assert latest[1] == saving(stored[3 * MAX_PERIODS - 1], stored[0])
    again = IterationLog(RANKS)
    again.restore([stored[0], *log.periods])
    assert again.latest_period() == latest
    add_all(again, 6 * MAX_PERIODS, version=3 * MAX_PERIODS - 1)
    assert again.periods[-1].number == 3 * MAX_PERIODS - 1


def test_plans_since_the_baseline_are_known() -> None:
    log = IterationLog(RANKS)
    assert log.has_planned_since_baseline, "there is no baseline"
    for version, state in enumerate((JobState.BASELINE, JobState.PLANNED, JobState.BASELINE)):
        label(log, version, 2 * version, state)
        for iteration in (2 * version, 2 * version + 1):
            add_all(log, iteration, version=version)
        assert log.has_planned_since_baseline is (state is JobState.PLANNED)


def test_a_straggler_begins_a_period_of_its_own() -> None:
    log = IterationLog(RANKS)
    log.mark_straggler(3, True)
    log.mark_straggler(5, False)
    for iteration in range(7):
        add_all(log, iteration)
    assert [(p.has_straggler, p.first_iteration, p.iteration_count) for p in log.periods] == [
        (False, 1, 2),
        (True, 3, 2),
        (False, 5, 2),
    ]


def test_irregular_iterations_count_with_their_time_and_change_no_mean() -> None:
    log = IterationLog(RANKS)
    for iteration, (time_s, is_regular) in enumerate(
        [(9.0, False), (1.0, True), (1.0, True), (3.0, False), (5.0, False), (1.0, True)]
    ):
        add_all(log, iteration, time_s=time_s, is_regular=is_regular)
    (period,) = log.periods
    assert (period.iteration_count, period.iteration_time_s) == (2, 1.0)
    assert period.irregular_count == 3
    assert period.irregular_time_s == pytest.approx(17 / 3)
    assert (period.first_iteration, period.last_iteration) == (2, 5)
    label(log, 1, 6, JobState.PLANNED)
    for iteration in (6, 7, 8):
        add_all(log, iteration, version=1, is_regular=iteration != 6)
    assert [each.irregular_count for each in log.periods] == [3, 1], "it counts in its own period"


def test_iterations_that_never_become_complete_do_not_pile_up() -> None:
    log = IterationLog(RANKS)
    for iteration in range(3 * OPEN_LIMIT):
        log.add(RANKS[0], rows([iteration]), NOW_S)
    log.validate()
    assert log.closed_through == 2 * OPEN_LIMIT - 1


def test_after_a_restart_of_the_trainers_earlier_iterations_count_again() -> None:
    log = IterationLog(RANKS)
    for iteration in range(5, 9):
        add_all(log, iteration)
    log.restart()
    for iteration in range(3, 6):
        add_all(log, iteration)
    (period,) = log.periods
    assert period.iteration_count == 3 + 2
    assert (period.first_iteration, period.last_iteration) == (4, 8)


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0, 1000)), min_size=2, max_size=20))
def test_a_period_holds_mean_and_standard_error(measured: list[tuple[float, float]]) -> None:
    log = IterationLog(RANKS)
    add_all(log, 0)
    for iteration, (time_s, energy_j) in enumerate(measured, start=1):
        add_all(log, iteration, time_s=time_s, energy_j=energy_j)
    (period,) = log.periods
    times_s, energies_j = zip(*measured, strict=True)
    assert math.isclose(period.iteration_time_s, statistics.fmean(times_s))
    assert math.isclose(period.energy_j, 4 * statistics.fmean(energies_j), abs_tol=1e-9)
    assert math.isclose(
        period.iteration_time_se_s, statistics.stdev(times_s) / math.sqrt(len(times_s)), abs_tol=1e-9
    )
    assert math.isclose(sum(period.pipeline_energy_j), period.energy_j, abs_tol=1e-9)


# ---------------------------------------------------------------------- savings


def period(number: int, times_s: list[float], energies_j: list[float]) -> Period:
    """Iterations of one pipeline, added one by one."""
    found = Period(
        number, JobState.PLANNED, False, (1,), 0, 0, 0.0, 0.0, 1, times_s[0], 0.0, energies_j[0], 0.0,
        (energies_j[0],),
    )  # fmt: skip
    for iteration, (time_s, energy_j) in enumerate(zip(times_s[1:], energies_j[1:], strict=True), start=1):
        found = found.extended(JobIteration(iteration, (1,), True, time_s, (energy_j,)), float(iteration))
    return found


def test_a_margin_is_half_the_95_percent_interval_by_students_distribution() -> None:
    exact = [1000.0, 1000.0, 1000.0]
    stock = period(0, [1.0, 1.0, 1.0], exact)
    (own,) = [period(1, [0.9, 1.0, 1.1], exact)]
    assert own.iteration_time_margin_s == pytest.approx(4.303 * 0.1 / math.sqrt(3), rel=1e-3)
    assert own.energy_margin_j == 0.0
    assert saving(own, stock).energy_margin_percent == 0.0
    assert saving(own, stock).slowdown_margin_percent == pytest.approx(4.303 * 10 / math.sqrt(3), rel=1e-3)
    # Equal errors on both sides have the degrees of freedom of both.
    assert saving(own, own).slowdown_margin_percent == pytest.approx(2.776 * 10 * math.sqrt(2 / 3), rel=1e-3)
    single = period(2, [1.0], [1000.0])
    assert (single.iteration_time_margin_s, single.energy_margin_j) == (None, None)
    for found in (saving(single, stock), saving(stock, single)):
        assert (found.slowdown_se_percent, found.slowdown_margin_percent) == (None, None)
        assert (found.energy_se_percent, found.energy_margin_percent) == (None, None)
        assert found.energy_percent is not None


@pytest.mark.parametrize(
    ("counts", "spreads"),
    [((40, 5), (0.01, 0.01)), ((5, 40), (0.02, 0.001)), ((8, 8), (0.001, 0.03)), ((100, 10), (0.05, 0.05))],
)
def test_the_standard_error_is_the_spread_of_repeated_trainings(
    counts: tuple[int, int], spreads: tuple[float, float]
) -> None:
    """The savings of many trainings of the same kind spread by the mean of their reported errors."""
    rng = np.random.default_rng(7)
    savings = []
    for _ in range(1000):
        (period_s, period_j), (stock_s, stock_j) = (
            rng.normal(np.array(means)[:, None], np.array(means)[:, None] * spread, (2, count))
            for means, count, spread in zip(((1.02, 780.0), (1.0, 1000.0)), counts, spreads, strict=True)
        )
        savings.append(
            saving(
                period(1, period_s.tolist(), period_j.tolist()), period(0, stock_s.tolist(), stock_j.tolist())
            )
        )
    for name, expected in (("energy", 22.0), ("slowdown", 2.0)):
        found = np.array([getattr(each, f"{name}_percent") for each in savings])
        reported = np.array([getattr(each, f"{name}_se_percent") for each in savings])
        assert found.mean() == pytest.approx(expected, abs=4 * found.std() / math.sqrt(len(found)))
        assert math.sqrt((reported**2).mean()) == pytest.approx(found.std(), rel=0.08)


@pytest.mark.parametrize(("energy_j", "stock_j"), [(0.0, 5.0), (5.0, 0.0), (0.0, 0.0)])
def test_without_measured_energy_there_is_no_saving(energy_j: float, stock_j: float) -> None:
    found = saving(period(1, [1.1] * 2, [energy_j] * 2), period(0, [1.0] * 2, [stock_j] * 2))
    assert (found.energy_percent, found.energy_se_percent) == (None, None)
    assert found.slowdown_percent == pytest.approx(10.0)


def test_the_report_compares_with_the_latest_baseline_from_any_start() -> None:
    (rank,) = Parallelism(1, 1, 1).all_coordinates()
    log = IterationLog([rank])
    states = {0: JobState.BASELINE, 1: JobState.PROFILING, 2: JobState.PLANNED, 3: JobState.BASELINE}
    for version, state in [*states.items(), (4, JobState.PLANNED)]:
        clocks = STOCK if state is JobState.BASELINE else HoldClocks((1000,))
        log.label(0, PipelineOffer((version,), 3 * version, clocks), state)
        for iteration in range(3 * version, 3 * version + 3):
            log.add(rank, rows([iteration], version=version, time_s=1.0 + version), 1000.0 + iteration)
    expected = [None, 0, 0, None, 3]
    assert [each and each.baseline_number for _, each in report(log.periods, 0)] == expected
    for first in range(6):
        assert list(report(log.periods, first)) == list(report(log.periods, 0))[first:]
    spans = [(each.first_iteration, each.last_iteration) for each, _ in report(log.periods, 0)]
    assert spans == [(1, 2), (4, 5), (7, 8), (10, 11), (13, 14)], "the first under new plans is left out"
    assert [(each.start_time_s, each.end_time_s) for each, _ in report(log.periods, 0)] == [
        (1000.0 + first, 1000.0 + last) for first, last in spans
    ]


# ---------------------------------------------------------------------- timelines


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
