"""The saving of a period against the stock baseline, and its uncertainty."""

import math

import numpy as np
import pytest

from perseus.service.domain.measured import JobIteration, Period, saving
from perseus.service.domain.model import STOCK, JobState, PipelineOffer
from perseus.service.domain.specification import Parallelism
from perseus.service.job.iterations.iteration_log import IterationLog, report
from tests.service.job.iterations.test_iteration_log import rows


def period(number: int, times_s: list[float], energies_j: list[float]) -> Period:
    """Iterations of one pipeline, added one by one."""
    found = Period(
        number, JobState.PLANNED, False, (1,), 0, 0, 0.0, 0.0, 1, times_s[0], 0.0, energies_j[0], 0.0,
        (energies_j[0],),
    )  # fmt: skip
    for iteration, (time_s, energy_j) in enumerate(zip(times_s[1:], energies_j[1:], strict=True), start=1):
        found = found.extended(JobIteration(iteration, (1,), True, time_s, (energy_j,)), float(iteration))
    return found


def test_a_saving_is_in_percent_of_the_baseline() -> None:
    found = saving(period(3, [1.1, 1.1], [750.0, 750.0]), period(0, [1.0, 1.0], [1000.0, 1000.0]))
    assert found.baseline_number == 0
    assert found.energy_percent == pytest.approx(25.0)
    assert found.slowdown_percent == pytest.approx(10.0)
    assert (found.energy_se_percent, found.slowdown_se_percent) == (0.0, 0.0)
    assert (found.energy_margin_percent, found.slowdown_margin_percent) == (0.0, 0.0)


def test_a_margin_is_half_the_95_percent_interval_by_students_distribution() -> None:
    exact = [1000.0, 1000.0, 1000.0]
    stock = period(0, [1.0, 1.0, 1.0], exact)
    (own,) = [period(1, [0.9, 1.0, 1.1], exact)]
    assert own.iteration_time_margin_s == pytest.approx(4.303 * 0.1 / math.sqrt(3), rel=1e-3)
    assert own.energy_margin_j == 0.0
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
        log.label(0, PipelineOffer((version,), 3 * version, STOCK), state)
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
