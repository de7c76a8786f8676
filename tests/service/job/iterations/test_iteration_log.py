"""Iterations assembled from their ranks, and the report's periods."""

import math
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.measured import MAX_PERIODS, Period, saving
from perseus.service.domain.model import STOCK, JobState, PipelineOffer
from perseus.service.domain.specification import Parallelism
from perseus.service.domain.telemetry import IterationColumns
from perseus.service.job.iterations.iteration_log import OPEN_LIMIT, IterationLog

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
        log.label(pipeline, PipelineOffer((version,), start_iteration, STOCK), state)


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
