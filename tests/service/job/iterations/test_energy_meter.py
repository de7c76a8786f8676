"""The energy of a run, hour by hour: every iteration once, and in the right place."""

import statistics
from dataclasses import astuple, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.ledger import HOUR_S, EnergyHour, EnergySums, Reference, UncomparedHours
from perseus.service.domain.measured import JobIteration, Period
from perseus.service.domain.model import JobState
from perseus.service.job.iterations.energy_meter import EnergyMeter

NOW_S = 500_000 * HOUR_S
BASELINE = Period(3, JobState.BASELINE, False, (1,), 0, 9, 0.0, 9.0, 10, 1.0, 0.0, 100.0, 90.0, (100.0,))
REFERENCE = Reference(3, 10, 100.0, 90.0)


def iteration(energy_j: float = 80.0, **changes: Any) -> JobIteration:
    return JobIteration(
        **{
            "iteration": 1,
            "versions": (2,),
            "is_regular": True,
            "iteration_time_s": 1.0,
            "pipeline_energy_j": (energy_j / 2, energy_j / 2),
            "state": JobState.PLANNED,
            **changes,
        }
    )


def sums(*iterations: JobIteration, baseline: Period | None = BASELINE) -> EnergySums:
    return EnergyMeter().take(iterations, baseline, NOW_S).sums


def test_an_iteration_under_other_clocks_is_compared_with_the_baseline() -> None:
    hour = EnergyMeter().take([iteration(80.0), iteration(82.0)], BASELINE, NOW_S + 10)
    assert (hour.hour, hour.reference) == (500_000, REFERENCE)
    expected = {"iteration_count": 2, "compared_count": 2, "time_s": 2.0, "compared_energy_j": 162.0}
    assert {name: getattr(hour.sums, name) for name in expected} == expected


AT_STOCK = {"stock_energy_j": 80.0, "compared_count": 0, "uncompared_energy_j": 0.0}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"is_at_stock": True}, AT_STOCK, id="at stock: saves nothing"),
        pytest.param({"is_regular": False}, AT_STOCK, id="irregular: saves nothing"),
        pytest.param(
            {"unmeasured_rank_count": 1},
            {"iteration_count": 1, "unmeasured_count": 1, "uncompared_energy_j": 80.0, "compared_count": 0},
            id="a lost energy counter",
        ),
        pytest.param(
            {"skipped_count": 3}, {"iteration_count": 1, "unmeasured_count": 3}, id="after lost rows"
        ),
        pytest.param(
            {"gap_time_s": 2.0, "gap_energy_j": 30.0},
            {"time_s": 3.0, "stock_energy_j": 30.0, "compared_energy_j": 80.0},
            id="after a gap: that is at stock",
        ),
        pytest.param(
            {"state": JobState.PROFILING}, {"profiling_count": 1, "profiling_energy_j": 80.0}, id="profiling"
        ),
        pytest.param(
            {"state": JobState.PROFILING, "is_at_stock": True},
            {"profiling_count": 0, "profiling_energy_j": 0.0},
            id="profiling, but at stock",
        ),
        pytest.param({"has_straggler": True}, {"straggler_energy_j": 80.0}, id="with a straggler"),
    ],
)
def test_an_iteration_counts_in_its_place(changes: dict[str, Any], expected: dict[str, float]) -> None:
    counted = sums(iteration(80.0, **changes))
    assert {name: getattr(counted, name) for name in expected} == expected


NO_ENERGY = Period(0, JobState.BASELINE, False, (1,), 0, 1, 0.0, 1.0, 2, 1.0, 0.0, 0.0, 0.0, ())


@pytest.mark.parametrize("baseline", [None, NO_ENERGY])
def test_without_a_baseline_nothing_is_compared(baseline: Period | None) -> None:
    hour = EnergyMeter().take([iteration(80.0)], baseline, NOW_S)
    assert hour.reference is None
    assert (hour.sums.uncompared_energy_j, hour.sums.compared_count) == (80.0, 0)


def test_an_hour_adds_up_until_it_ends_and_the_next_begins_at_0() -> None:
    meter = EnergyMeter()
    meter.take([iteration(80.0)], BASELINE, NOW_S)
    assert meter.take([iteration(80.0)], BASELINE, NOW_S + HOUR_S - 1).sums.compared_count == 2
    later = meter.take([iteration(80.0)], BASELINE, NOW_S + HOUR_S)
    assert (later.hour, later.sums.compared_count) == (500_001, 1)


def test_another_baseline_begins_another_part_of_the_hour() -> None:
    meter = EnergyMeter()
    first = meter.take([iteration(is_at_stock=True)], None, NOW_S)
    second = meter.take([iteration()], BASELINE, NOW_S)
    assert [(each.hour, each.baseline_number) for each in (first, second)] == [(500_000, -1), (500_000, 3)]
    assert (first.sums.iteration_count, second.sums.iteration_count) == (1, 1)


def test_a_clock_that_is_set_back_overwrites_no_hour() -> None:
    meter = EnergyMeter()
    meter.take([iteration()], BASELINE, NOW_S + 2 * HOUR_S)
    found = meter.take([iteration()], BASELINE, NOW_S)
    assert (found.hour, found.sums.compared_count) == (500_002, 2)


def test_the_latest_hour_continues_after_a_restart() -> None:
    before = EnergyMeter().take([iteration()], BASELINE, NOW_S)
    meter = EnergyMeter()
    meter.restore(before)
    assert meter.take([iteration()], BASELINE, NOW_S).sums.compared_count == 2
    meter.restore(EnergyHour(500_000, None))
    assert meter.take([iteration()], BASELINE, NOW_S).sums.compared_count == 1


@given(st.lists(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=8), min_size=1, max_size=5))
def test_deviations_are_from_the_mean_under_the_same_plans(energies_j: list[list[float]]) -> None:
    """The first iteration under new plans does not count."""
    meter = EnergyMeter()
    m2, freedom_count = 0.0, 0
    for version, of_plan in enumerate(energies_j):
        batch = [iteration(energy_j, versions=(version,)) for energy_j in of_plan]
        found = meter.take(batch, BASELINE, NOW_S).sums
        rest = of_plan[1:]
        if len(rest) > 1:
            m2 += statistics.variance(rest) * (len(rest) - 1)
            freedom_count += len(rest) - 1
    assert found.freedom_count == freedom_count
    assert found.energy_m2 == pytest.approx(m2, rel=1e-6, abs=1e-3)
    assert found.compared_energy_j == pytest.approx(sum(map(sum, energies_j)))


@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=20), st.data())
def test_hours_and_batches_add_up_to_the_same(energies_j: list[float], data: st.DataObject) -> None:
    whole = sums(*map(iteration, energies_j))
    meter, hours = EnergyMeter(), {}
    now_s = NOW_S
    rest = energies_j
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        hour = meter.take(map(iteration, rest[:count]), BASELINE, now_s)
        hours[hour.hour] = hour
        rest, now_s = rest[count:], now_s + data.draw(st.sampled_from([1.0, HOUR_S, 5 * HOUR_S]))
    split = [astuple(hour.sums) for hour in hours.values()]
    assert [sum(column) for column in zip(*split, strict=True)] == pytest.approx(
        list(astuple(whole)), rel=1e-6, abs=1e-3
    )


def test_iterations_of_several_plans_at_once_do_not_count_for_the_deviation() -> None:
    found = sums(*(iteration(energy_j, versions=None) for energy_j in (70.0, 90.0, 80.0)))
    assert (found.compared_count, found.freedom_count, found.energy_m2) == (3, 0, 0.0)


def test_what_was_compared_with_a_wrong_baseline_is_uncompared_and_saves_nothing() -> None:
    meter = EnergyMeter()
    meter.take([iteration(80.0)], BASELINE, NOW_S)
    following = replace(BASELINE, number=5)
    before = meter.take([iteration(70.0), iteration(70.0)], following, NOW_S)
    assert meter.saved_j == 20.0 + 60.0
    assert meter.refute(following) == UncomparedHours(5)
    after = meter.take([iteration(60.0)], replace(following, is_wrong=True), NOW_S)
    assert (after.hour, after.baseline_number) == (before.hour, before.baseline_number), "the same row"
    assert (after.sums.uncompared_energy_j, after.sums.compared_count) == (200.0, 0)
    assert (after.sums.compared_energy_j, after.sums.energy_m2) == (0.0, 0.0)
    assert after.sums.iteration_count == 3
    assert meter.saved_j == 20.0
    assert meter.refute(following) == UncomparedHours(5), "again: nothing changes"
    assert meter.saved_j == 20.0
