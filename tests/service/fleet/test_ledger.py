"""The energy that runs have used and saved, and its uncertainty."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.ledger import (
    HOUR_S,
    UNKNOWN,
    EnergyGroup,
    EnergyHour,
    EnergySums,
    HourFilter,
    Rates,
    Reference,
)
from perseus.service.domain.measured import JobIteration, Period
from perseus.service.domain.model import JobState
from perseus.service.domain.statement import J_PER_KWH, Account, LedgerTotals
from perseus.service.fleet.ledger import priced, statement
from perseus.service.fleet.ledger_totals import OPEN_HOURS, WINDOW_HOURS, RunningTotals
from perseus.service.job.iterations.energy_meter import EnergyMeter

RATES = Rates(0.25, 400.0)
REFERENCE = Reference(0, 10, 100.0, 90.0)
"""Standard deviation √10 J, standard error 1 J."""


def group(hour: int = 10, reference: Reference | None = REFERENCE, **changes: Any) -> EnergyGroup:
    sums = EnergySums(
        **{
            "iteration_count": 1000,
            "time_s": 1000.0,
            "compared_count": 1000,
            "compared_energy_j": 80_000.0,
            "energy_m2": 9.0 * 998,
            "freedom_count": 998,
            **{name: value for name, value in changes.items() if name in EnergySums.__slots__},
        }
    )
    others = {name: value for name, value in changes.items() if name not in EnergySums.__slots__}
    sums, rates = others.pop("sums", sums), others.pop("rates", RATES)
    return replace(EnergyGroup.of_hour("job", 0, 1, EnergyHour(hour, reference, sums, rates)), **others)


def only(groups: Sequence[EnergyGroup], now: Rates = UNKNOWN) -> Account:
    (entry,) = statement(groups, now).entries
    return entry.account


def test_a_saving_has_the_error_of_both_means() -> None:
    found = only([group()])
    assert found.energy_j.used == 80_000.0
    assert found.energy_j.saved == 1000 * 100.0 - 80_000.0
    # The baseline's 1 J for each of 1,000 iterations, and their own 3 J each.
    assert found.energy_j.saved_se == pytest.approx(math.hypot(1000 * 1.0, math.sqrt(1000) * 3.0))
    assert found.saved_percent == pytest.approx(20.0)
    assert found.saved_se_percent == pytest.approx(
        math.hypot(0.8 * 1000, math.sqrt(1000) * 3) / 100_000 * 100
    )


def test_money_and_carbon_follow_the_energy() -> None:
    found = only([group()])
    for quantity, rate in ((found.cost, 0.25), (found.carbon_g, 400.0)):
        for name in ("used", "saved", "saved_se", "saved_margin"):
            in_energy = getattr(found.energy_j, name)
            assert getattr(quantity, name) == pytest.approx(in_energy / J_PER_KWH * rate)
    assert found.rates.price_per_kwh == pytest.approx(0.25)
    assert found.rates.intensity_g_per_kwh == pytest.approx(400.0)


def test_hours_of_a_run_share_their_baselines_error_and_runs_do_not() -> None:
    one = only([group()]).energy_j
    hours = only([group(10), group(11, rates=Rates(0.5, 400.0))]).energy_j
    runs = statement([group(), group(run_number=2)], Rates()).total.energy_j
    assert one.saved is not None
    assert hours.saved == runs.saved == 2 * one.saved
    assert hours.saved_se == pytest.approx(math.hypot(2000 * 1.0, math.sqrt(2000) * 3.0))
    assert one.saved_se is not None
    assert runs.saved_se == pytest.approx(math.sqrt(2) * one.saved_se)


def test_each_hour_is_weighed_by_its_own_price() -> None:
    found = only([group(10, rates=Rates(0.2)), group(11, rates=Rates(0.4))])
    assert found.cost.used == pytest.approx(80_000 / J_PER_KWH * 0.6)
    assert found.cost.saved == pytest.approx(20_000 / J_PER_KWH * 0.6)
    baselines, own = 1000 * 0.6, math.sqrt(1000 * 9 * (0.2**2 + 0.4**2))
    assert found.cost.saved_se == pytest.approx(math.hypot(baselines, own) / J_PER_KWH)
    assert found.rates.price_per_kwh == pytest.approx(0.3)
    assert found.carbon_g.used is None


def test_hours_without_rates_take_the_present_ones_and_others_keep_theirs() -> None:
    groups = [group(10, rates=Rates()), group(11)]
    assert only(groups).cost.used is None
    found = only(groups, Rates(0.75, 100.0))
    assert found.cost.used == pytest.approx(80_000 / J_PER_KWH * (0.75 + 0.25))
    assert found.carbon_g.used == pytest.approx(80_000 / J_PER_KWH * (100 + 400))


def test_without_a_baseline_the_saving_is_unknown_and_not_0() -> None:
    sums = EnergySums(iteration_count=3, stock_energy_j=30.0, uncompared_energy_j=7.0)
    bare = group(reference=None, job_id="bare", sums=sums)
    found = statement([bare, group()], Rates())
    entry = found.entries[0].account
    assert (entry.energy_j.saved, entry.energy_j.saved_se, entry.saved_percent) == (None, None, None)
    assert (entry.sums.uncompared_energy_j, entry.sums.stock_energy_j) == (37.0, 0.0)
    # The total includes it, but no saving from it.
    assert found.total.energy_j.saved == only([group()]).energy_j.saved
    assert (found.total.sums.uncompared_energy_j, found.total.energy_j.used) == (37.0, 80_037.0)


def test_iterations_at_stock_before_the_baseline_save_nothing() -> None:
    before = group(9, reference=None, sums=EnergySums(iteration_count=2, stock_energy_j=200.0))
    found = only([before, group()])
    assert found.energy_j.saved == 20_000.0
    assert found.sums.uncompared_energy_j == 0
    assert found.saved_percent == pytest.approx(100 * 20_000 / 100_200)


def test_a_run_that_stayed_at_stock_saved_exactly_nothing() -> None:
    found = only([group(sums=EnergySums(iteration_count=2, stock_energy_j=200.0))])
    assert (found.energy_j.saved, found.energy_j.saved_se, found.energy_j.saved_margin) == (0.0, 0.0, 0.0)
    assert (found.saved_percent, found.saved_se_percent) == (0.0, 0.0)


@pytest.mark.parametrize(
    "unsure", [group(reference=Reference(0, 1, 100.0, 0.0)), group(energy_m2=0.0, freedom_count=0)]
)
def test_an_unknown_error_makes_the_totals_error_unknown(unsure: EnergyGroup) -> None:
    found = statement([unsure, group(run_number=2)], Rates())
    for each in (found.entries[0].account, found.total):
        assert each.energy_j.saved is not None
        assert (each.energy_j.saved_se, each.energy_j.saved_margin, each.saved_se_percent) == (None,) * 3


def test_profiling_is_reported_with_its_energy_beyond_stock() -> None:
    found = only([group(profiling_count=10, profiling_energy_j=1_150.0)])
    assert found.profiling_extra_j == pytest.approx(150.0)
    assert only([group()]).profiling_extra_j is None


def test_entries_name_their_hours_and_deleted_jobs() -> None:
    found = statement(
        [group(10, deletion=1), group(12), group(15, reference=replace(REFERENCE, number=4))], RATES
    )
    assert [(entry.deletion, entry.start_time_s, entry.end_time_s) for entry in found.entries] == [
        (1, 10 * HOUR_S, 11 * HOUR_S),
        (0, 12 * HOUR_S, 16 * HOUR_S),
    ]


def test_the_statement_of_an_empty_ledger_is_empty() -> None:
    found = statement([], RATES)
    assert found.entries == ()
    assert (found.total.sums, found.total.energy_j.saved) == (EnergySums(), None)


def test_an_hour_has_the_rates_of_its_beginning() -> None:
    assert priced(EnergyHour(3, None), Rates).rates == Rates(3 * HOUR_S)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=6), st.floats(0.0, 1e3), st.floats(1.0, 1e4))
def test_the_split_of_a_run_into_hours_does_not_matter(
    counts: list[int], variance_j2: float, energy_j: float
) -> None:
    def part(hour: int, count: int) -> EnergyGroup:
        return group(
            hour,
            iteration_count=count,
            compared_count=count,
            compared_energy_j=count * energy_j,
            energy_m2=count * variance_j2,
            freedom_count=count,
        )

    cut = only([part(hour, count) for hour, count in enumerate(counts)])
    whole = only([part(0, sum(counts))])
    for one, other in ((cut.energy_j, whole.energy_j), (cut.cost, whole.cost)):
        assert one.saved == pytest.approx(other.saved, rel=1e-9, abs=1e-6)
        assert one.saved_se == pytest.approx(other.saved_se, rel=1e-9)
        assert one.saved_margin == pytest.approx(other.saved_margin, rel=1e-9)


def simulated(
    rng: np.random.Generator, baseline_count: int, count: int, sd_j: float, plan_sd_j: float
) -> Account:
    """Simulate a run: a baseline, then iterations under three plans, in two hours."""
    at_stock_j = rng.normal(100.0, sd_j, baseline_count)
    mean_j = float(at_stock_j.mean())
    baseline = Period(
        0, JobState.BASELINE, False, (0,), 0, 9, 0.0, 9.0, baseline_count, 1.0, 0.0,
        mean_j, float(((at_stock_j - mean_j) ** 2).sum()), (mean_j,),
    )  # fmt: skip
    meter, hours = EnergyMeter(), {}
    for plan, plan_mean_j in enumerate(PLAN_SETTINGS_J):
        energies_j = rng.normal(plan_mean_j, plan_sd_j, count)
        for energy_j in energies_j.tolist():
            iteration = JobIteration(1, (plan,), True, 1.0, (energy_j,), state=JobState.PLANNED)
            hour = meter.take([iteration], baseline, plan // 2 * HOUR_S)
            hours[hour.hour] = hour
    groups = [EnergyGroup.of_hour("job", 0, 1, replace(each, rates=RATES)) for each in hours.values()]
    return only(groups)


PLAN_SETTINGS_J = (110.0, 80.0, 85.0)


@pytest.mark.parametrize(
    ("baseline_count", "count", "sd_j", "plan_sd_j"),
    [
        # The baseline's error dominates.
        pytest.param(4, 20, 5.0, 5.0, marks=pytest.mark.slow("the periods of 1,500 jobs")),
        (10, 4, 5.0, 5.0),
        (10, 10, 1.0, 8.0),  # the plans' error dominates
        (30, 10, 3.0, 3.0),
    ],
)
def test_the_interval_covers_the_actual_saving(
    baseline_count: int, count: int, sd_j: float, plan_sd_j: float
) -> None:
    """It does so in 95 of 100 runs; 1.96 standard errors of a short baseline would cover fewer."""
    rng = np.random.default_rng(20)
    really_j = count * sum(100.0 - mean_j for mean_j in PLAN_SETTINGS_J)
    trials = 1_500
    covered = by_normal = 0
    for _ in range(trials):
        found = simulated(rng, baseline_count, count, sd_j, plan_sd_j).energy_j
        assert found.saved is not None
        assert found.saved_se is not None
        assert found.saved_margin is not None
        covered += abs(found.saved - really_j) <= found.saved_margin
        by_normal += abs(found.saved - really_j) <= 1.96 * found.saved_se
    # Within three standard errors of 1,500 trials; Welch's approximation may cover a little more.
    assert 0.95 - 3 * math.sqrt(0.95 * 0.05 / trials) <= covered / trials <= 0.98
    if baseline_count == 4:
        assert by_normal / trials < 0.91


# ---------------------------------------------------------------------- totals, added up by and by

NOW = Rates(0.25, 400.0)
LAST_HOUR = 3 * WINDOW_HOURS
ENERGY_J = st.floats(0.0, 1e9)


@st.composite
def hours(draw: st.DrawFn) -> EnergyGroup:
    """Draw an hour of one of two runs, with or without a baseline and rates."""
    hour = draw(st.integers(0, LAST_HOUR))
    is_compared = draw(st.booleans())
    count = draw(st.integers(0, 1000)) if is_compared else 0
    sums = EnergySums(
        iteration_count=count + 1,
        stock_energy_j=draw(ENERGY_J),
        uncompared_energy_j=0.0 if is_compared else draw(ENERGY_J),
        compared_count=count,
        compared_energy_j=draw(ENERGY_J) if count else 0.0,
    )
    reference = Reference(0, 10, draw(ENERGY_J), 0.0) if is_compared else None
    rates = draw(st.sampled_from([Rates(), Rates(0.5, 100.0)]))
    return EnergyGroup.of_hour("job", 0, draw(st.integers(1, 2)), EnergyHour(hour, reference, sums, rates))


def read(ledger: Sequence[EnergyGroup], window: HourFilter) -> list[EnergyGroup]:
    first, end = window.first_hour, window.end_hour
    assert first is not None
    found = [each for each in ledger if first <= each.first_hour and (end is None or each.first_hour < end)]
    return sorted(found, key=lambda each: each.run_number)


def added_up(totals: RunningTotals, ledger: Sequence[EnergyGroup], now_hour: int, now: Rates) -> int:
    """Read all requested windows; return the number of hours read."""
    hour_count = 0
    while True:
        window = totals.next_window(now_hour)
        groups = read(ledger, window)
        totals.add(window, groups, now)
        hour_count += len({each.first_hour for each in groups})
        if window.end_hour is None:
            return hour_count
        assert window.first_hour is not None
        assert window.end_hour - window.first_hour <= WINDOW_HOURS


def close(found: float | None, expected: float | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return found == pytest.approx(expected, rel=1e-9, abs=1e-3)


@given(st.lists(hours(), max_size=30), st.sampled_from([Rates(), NOW]), st.integers(0, LAST_HOUR))
def test_totals_equal_those_of_a_complete_statement(
    ledger: list[EnergyGroup], now: Rates, first_view: int
) -> None:
    totals = RunningTotals(0)
    added_up(totals, [each for each in ledger if each.first_hour <= first_view], first_view, now)
    added_up(totals, ledger, LAST_HOUR, now)
    whole = statement(sorted(ledger, key=lambda each: each.run_number), now).total
    found = totals.known
    assert found is not None
    assert close(found.energy_j, whole.energy_j.used)
    assert close(found.saved_energy_j, whole.energy_j.saved)
    for quantity, expected in ((found.cost, whole.cost), (found.carbon_g, whole.carbon_g)):
        assert (quantity is None) is (expected.used is None)
        if quantity is not None:
            assert close(quantity.used, expected.used)
            assert close(quantity.saved, expected.saved)


def hour(number: int) -> EnergyGroup:
    sums = EnergySums(1, stock_energy_j=100.0)
    return EnergyGroup.of_hour("job", 0, 1, EnergyHour(number, None, sums, NOW))


def test_past_hours_are_read_once_and_open_hours_again() -> None:
    totals, ledger = RunningTotals(0), [hour(number) for number in range(1001)]
    assert added_up(totals, ledger, 1000, NOW) == 1001
    assert added_up(totals, ledger, 1000, NOW) == OPEN_HOURS
    assert added_up(totals, [*ledger, hour(1001)], 1001, NOW) == OPEN_HOURS + 1
    assert totals.known is not None
    assert totals.known.energy_j == 100.0 * 1002


def test_totals_are_unknown_before_a_complete_pass_and_so_is_a_partial_cost() -> None:
    now_hour = 2 * WINDOW_HOURS
    totals = RunningTotals(0)
    totals.add(totals.next_window(now_hour), [hour(1)], NOW)
    assert totals.known is None
    unpriced = EnergyGroup.of_hour(
        "job", 0, 1, EnergyHour(now_hour, None, EnergySums(1, stock_energy_j=50.0), Rates())
    )
    added_up(totals, [unpriced], now_hour, NOW)
    assert totals.known is not None
    assert totals.known.cost is not None
    assert totals.known.cost.used == pytest.approx(150 / 3.6e6 * 0.25)
    added_up(totals, [unpriced], now_hour, Rates())
    assert totals.known == LedgerTotals(150.0, None, None, None)
