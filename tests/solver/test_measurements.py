"""Repeated clocks are merged, missing ones interpolated and marked."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.solver import Measurement, ProfileError, interpolate_clocks, merge_measurements

profiles = st.lists(
    st.builds(
        Measurement,
        st.sampled_from([600, 900, 1200, 1410]),
        st.floats(1e-3, 1.0),
        st.floats(1.0, 1000.0),
        st.floats(1e-6, 1e-3),
        st.floats(1e-3, 10.0),
    ),
    min_size=1,
    max_size=12,
)


def test_weights_are_inverse_variances() -> None:
    (merged,) = merge_measurements(
        [Measurement(900, 0.1, 10.0, 1e-3, 2.0), Measurement(900, 0.2, 40.0, 2e-3, 1.0)]
    )
    assert (merged.time_s, merged.energy_j) == pytest.approx((0.12, 34.0))
    assert merged.time_se_s == pytest.approx(1e-3 * math.sqrt(0.8))
    assert merged.energy_se_j == pytest.approx(math.sqrt(0.8))


def test_what_errors_have_in_common_does_not_average_out() -> None:
    (merged,) = merge_measurements(Measurement(900, 0.1, 10.0, 1e-3, 2.0, False, 0.9e-3) for _ in range(4))
    assert merged.time_se_s == merged.time_common_se_s == 0.9e-3


def test_without_errors_the_mean_is_plain_and_its_error_is_the_scatter() -> None:
    (merged,) = merge_measurements([Measurement(900, 0.1, 10.0), Measurement(900, 0.2, 40.0, 1e-3, 0.0)])
    assert (merged.time_s, merged.energy_j) == pytest.approx((0.15, 25.0))
    assert (merged.time_se_s, merged.energy_se_j) == pytest.approx((0.05, 15.0))


@given(profile=profiles)
def test_merging_stays_within_the_measurements(profile: list[Measurement]) -> None:
    merged = merge_measurements(profile)
    assert [m.clock_mhz for m in merged] == sorted({m.clock_mhz for m in profile})
    assert merge_measurements(merged) == merged
    for m in merged:
        same = [one for one in profile if one.clock_mhz == m.clock_mhz]
        assert min(one.time_s for one in same) <= m.time_s * (1 + 1e-12)
        assert max(one.time_s for one in same) >= m.time_s * (1 - 1e-12)
        assert m.energy_se_j <= min(one.energy_se_j for one in same)


def test_interpolation_is_linear_in_the_cycle_time_and_marked() -> None:
    measured = (Measurement(500, 0.2, 10.0, 4e-3, 0.0), Measurement(1000, 0.1, 20.0))
    added = interpolate_clocks(measured, [800, 500])
    assert [m.clock_mhz for m in added] == [500, 800, 1000]
    assert [m.interpolated for m in added] == [False, True, False]
    assert (added[1].time_s, added[1].energy_j) == pytest.approx((0.125, 17.5))
    assert added[1].time_se_s == pytest.approx(1e-3)


def test_an_interpolated_error_is_no_smaller_than_its_neighbours_which_are_alike() -> None:
    ends = (Measurement(mhz, 0.1, 1.0, 4e-3, 0.1, time_common_se_s=2e-3) for mhz in (500, 1000))
    _, added, _ = interpolate_clocks(tuple(ends), [800])
    assert (added.time_se_s, added.time_common_se_s) == pytest.approx((4e-3, 2e-3))
    assert added.energy_se_j == pytest.approx(0.1)


def test_measured_clocks_replace_interpolated_ones() -> None:
    measured = Measurement(800, 0.13, 17.0)
    guessed = Measurement(800, 0.125, 17.5, interpolated=True)
    assert merge_measurements([guessed, measured]) == (measured,)


@pytest.mark.parametrize("clock_mhz", [400, 1200])
def test_nothing_is_extrapolated(clock_mhz: int) -> None:
    measured = (Measurement(500, 0.2, 10.0), Measurement(1000, 0.1, 20.0))
    with pytest.raises(ProfileError, match=f"500 to 1000 MHz, found {clock_mhz} MHz"):
        interpolate_clocks(measured, [clock_mhz])


def test_repeated_clocks_are_merged_first() -> None:
    with pytest.raises(ProfileError, match="found several at 500 MHz"):
        interpolate_clocks([Measurement(500, 0.2, 10.0), Measurement(500, 0.2, 11.0)], [])
