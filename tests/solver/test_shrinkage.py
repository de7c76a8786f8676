"""Noisy measurements are shrunk to their expectations."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.solver import Kind, Measurement, shrink, shrink_profiles
from perseus.solver.shrinkage import MIN_CLOCKS
from tests.solver.pipelines import published_pipeline

CLOCKS_MHZ = range(900, 1411, 15)


def smooth(clock_mhz: int) -> tuple[float, float]:
    """Time and energy of a computation of which a part does not depend on the clock."""
    time_s = 0.02 + 0.05 * 1410 / clock_mhz
    return time_s, time_s * (60 + 240 * (clock_mhz / 1410) ** 3)


def noisy(share: float, seed: int) -> list[Measurement]:
    random = np.random.default_rng(seed)
    found = []
    for mhz in CLOCKS_MHZ:
        time_s, energy_j = smooth(mhz)
        times, energies = 1 + share * random.standard_normal(2)
        found.append(Measurement(mhz, time_s * times, energy_j * energies, share * time_s, share * energy_j))
    return found


def root_mean_square(measured: tuple[Measurement, ...] | list[Measurement]) -> tuple[float, float]:
    """Errors of times and energies, as shares."""
    errors = [
        (m.time_s / time_s - 1, m.energy_j / energy_j - 1)
        for m in measured
        for time_s, energy_j in [smooth(m.clock_mhz)]
    ]
    times, energies = np.sqrt(np.mean(np.square(errors), axis=0))
    return float(times), float(energies)


@pytest.mark.parametrize("share", [0.005, 0.01, 0.02])
def test_noise_on_a_smooth_curve_becomes_less_than_half(share: float) -> None:
    raw = [root_mean_square(noisy(share, seed)) for seed in range(10)]
    found = [root_mean_square(shrink(noisy(share, seed))) for seed in range(10)]
    assert np.all(np.mean(found, axis=0) < np.mean(raw, axis=0) / 2)


def repeated(share: float, repetitions: int, seed: int, clocks_mhz: range = CLOCKS_MHZ) -> list[Measurement]:
    """Means of repetitions, with standard errors that are estimated from their scatter."""
    random = np.random.default_rng(seed)
    found = []
    for mhz in clocks_mhz:
        time_s = smooth(mhz)[0] * (1 + share * random.standard_normal(repetitions))
        error_s = float(time_s.std(ddof=1)) / repetitions**0.5
        found.append(Measurement(mhz, float(time_s.mean()), 1.0, error_s))
    return found


@pytest.mark.parametrize(
    "measured",
    [
        lambda seed: noisy(0.01, seed),
        lambda seed: repeated(0.02, 3, seed),
        lambda seed: repeated(0.02, 5, seed),
    ],
    ids=["known", "estimated from 3 repetitions", "estimated from 5"],
)
def test_standard_errors_match_the_errors_of_expectations(
    measured: Callable[[int], list[Measurement]],
) -> None:
    """Those that are estimated from few repetitions are not taken at face value."""
    deviations = [
        (m.time_s - smooth(m.clock_mhz)[0]) / m.time_se_s
        for seed in range(15)
        for m in shrink(measured(seed))
    ]
    assert 0.6 < np.std(deviations) < 1.4
    assert np.mean(np.abs(deviations) > 3) < 0.02


def test_stated_errors_that_truly_differ_are_trusted() -> None:
    random = np.random.default_rng(3)
    shares = [0.001 if k % 2 else 0.03 for k in range(len(CLOCKS_MHZ))]
    measured = [
        Measurement(mhz, time_s * (1 + share * random.standard_normal()), 1.0, share * time_s)
        for mhz, share in zip(CLOCKS_MHZ, shares, strict=True)
        for time_s in [smooth(mhz)[0]]
    ]
    for share, after in zip(shares, shrink(measured), strict=True):
        assert after.time_se_s / after.time_s < 1.1 * share
        assert after.time_s == pytest.approx(smooth(after.clock_mhz)[0], rel=0.004)


def test_shrunk_errors_have_a_part_in_common() -> None:
    """The common part of all curves is one estimate: its error doesn't average out."""
    means, expected = [], []
    for seed in range(10):
        profiles = {(stage, 0, Kind.FORWARD): tuple(noisy(0.02, 10 * seed + stage)) for stage in range(6)}
        at_middle = [some[len(CLOCKS_MHZ) // 2] for some in shrink_profiles(profiles).values()]
        means.append(np.mean([m.time_s / smooth(m.clock_mhz)[0] - 1 for m in at_middle]))
        common, own = np.mean(
            [(m.time_common_se_s**2, m.time_se_s**2 - m.time_common_se_s**2) for m in at_middle], axis=0
        )
        assert 0 < common < own
        expected.append(np.sqrt(common + own / 6) / at_middle[0].time_s)
    assert np.std(means) < 1.3 * np.mean(expected)


def test_clean_measurements_stay_unchanged_even_at_cliffs() -> None:
    """The published A40 profile has steps of 2.4 % between clocks; errors of 0.01 % change nothing."""
    for measured in published_pipeline("a40", 8).profiles.values():
        reported = [
            Measurement(m.clock_mhz, m.time_s, m.energy_j, 1e-4 * m.time_s, 1e-4 * m.energy_j)
            for m in measured
        ]
        for before, after in zip(sorted(reported, key=lambda m: m.clock_mhz), shrink(reported), strict=True):
            assert after.time_s == pytest.approx(before.time_s, rel=3e-4)
            assert after.energy_j == pytest.approx(before.energy_j, rel=3e-4)


def test_without_standard_errors_nothing_changes() -> None:
    measured = tuple(Measurement(m.clock_mhz, m.time_s, m.energy_j) for m in noisy(0.01, 0))
    assert shrink(measured) == measured


def test_times_and_energies_are_treated_separately() -> None:
    measured = [Measurement(m.clock_mhz, m.time_s, m.energy_j, 0.0, m.energy_se_j) for m in noisy(0.01, 0)]
    for before, after in zip(measured, shrink(measured), strict=True):
        assert (after.time_s, after.time_se_s) == (before.time_s, 0.0)
        assert after.energy_j != before.energy_j
        assert after.energy_se_j <= before.energy_se_j * 1.05


def test_too_few_clocks_are_not_shrunk() -> None:
    few = tuple(noisy(0.01, 0)[: MIN_CLOCKS - 1])
    assert shrink(few) == few


@given(
    st.lists(
        st.tuples(st.floats(1e-6, 1e3), st.floats(1e-3, 1e6), st.floats(1e-6, 0.4), st.floats(1e-6, 0.4)),
        min_size=1,
        max_size=12,
    )
)
def test_any_measurements_shrink_to_valid_ones(rows: list[tuple[float, float, float, float]]) -> None:
    measured = [
        Measurement(1000 + 15 * k, time_s, energy_j, time_s * time_share, energy_j * energy_share)
        for k, (time_s, energy_j, time_share, energy_share) in enumerate(rows)
    ]
    found = shrink(measured)
    errors = [m.time_se_s / m.time_s for m in measured]
    assert [m.clock_mhz for m in found] == [m.clock_mhz for m in measured]
    for after in found:
        # Student's distribution of three degrees of freedom is at most so much wider.
        assert after.time_se_s / after.time_s <= 3**0.5 * max(errors) * (1 + 1e-9)
        assert after.time_common_se_s <= after.time_se_s * (1 + 1e-9)
        assert min(m.time_s for m in measured) / 100 < after.time_s < 100 * max(m.time_s for m in measured)


def test_computations_at_the_same_clocks_inform_each_other() -> None:
    """A GPU that gets no faster at its highest clocks: a smooth curve alone would overestimate them."""
    kinds = (Kind.FORWARD, Kind.BACKWARD)

    def true_s(mhz: int, weight: float) -> float:
        return weight * smooth(min(mhz, 1350))[0]

    errors = []
    for seed in range(10):
        random = np.random.default_rng(seed)
        profiles = {
            (stage, 0, kind): tuple(
                Measurement(mhz, time_s * (1 + 0.01 * random.standard_normal()), 1.0, 0.01 * time_s)
                for mhz in CLOCKS_MHZ
                for time_s in [true_s(mhz, 1 + 0.1 * stage)]
            )
            for stage in range(4)
            for kind in kinds
        }
        together = shrink_profiles(profiles)
        for key, measured in profiles.items():
            highest = [true_s(m.clock_mhz, 1 + 0.1 * key[0]) for m in together[key]][-1]
            errors.append((shrink(measured)[-1].time_s / highest - 1, together[key][-1].time_s / highest - 1))
    alone, pooled = np.mean(errors, axis=0)
    assert abs(pooled) < 0.0025 < abs(alone)


def test_fixed_computations_are_treated_alone() -> None:
    measured = tuple(noisy(0.01, 0))
    profiles = {(0, 0, Kind.FIXED): measured, (0, 0, Kind.FORWARD): tuple(noisy(0.01, 1))}
    assert shrink_profiles(profiles)[0, 0, Kind.FIXED] == shrink(measured)
