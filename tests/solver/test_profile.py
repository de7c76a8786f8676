"""Measurements, Pareto options and hulls."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.solver import Measurement, ProfileError
from perseus.solver.coarse_hull import coarse_hull
from perseus.solver.profile import Hull, convex_hull, pareto_options
from perseus.solver.scale import Scale

STEEPEST_UW = 10**13

profiles = st.lists(
    st.builds(Measurement, st.integers(200, 2000), st.floats(1e-4, 1.0), st.floats(0.1, 1000.0)),
    min_size=1,
    max_size=12,
)


FIGURES: dict[str, Any] = {"clock_mhz": 1410, "time_s": 0.05, "energy_j": 20.0}
ERRORS = ["time_se_s", "energy_se_j"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *(
            (name, value, f"expected .* found {value}")
            for name in [*FIGURES, *ERRORS]
            for value in (math.nan, math.inf, -1)
        ),
        *((name, 0, "expected") for name in FIGURES),
        ("time_s", 1e-14, "expected at least .* found"),
        ("energy_j", 5e-324, "expected at least .* found"),
        ("clock_mhz", 100_001, "expected at most .* found"),
        *((name, 1e308, "expected at most .* found") for name in ("time_s", "energy_j", *ERRORS)),
    ],
)
def test_impossible_figures_are_refused(name: str, value: float, message: str) -> None:
    with pytest.raises(ProfileError, match=f"{name}: {message}") as caught:
        Measurement(**{**FIGURES, name: value})
    assert caught.value.details["field"] == name


def test_a_common_error_is_a_part_of_the_error() -> None:
    """The rest has no square root, and no margin of the whole would cover it."""
    measured = Measurement(1410, 0.05, 20.0, time_se_s=0.001)
    assert replace(measured, time_common_se_s=0.001 * (1 + 1e-9))  # rounded
    with pytest.raises(ProfileError, match=r"time_common_se_s: expected at most time_se_s, .* found"):
        replace(measured, time_common_se_s=0.002)


@given(profile=profiles, blocking_power_w=st.floats(0, 500))
def test_options_are_the_pareto_front(profile: list[Measurement], blocking_power_w: float) -> None:
    options = pareto_options(profile, blocking_power_w, Scale())
    for fast, slow in pairwise(options):
        assert fast.time_ps < slow.time_ps
        assert fast.effective_energy_j > slow.effective_energy_j
    for m in profile:
        effective_energy_j = m.energy_j - blocking_power_w * m.time_s
        assert any(
            o.time_ps <= round(m.time_s * 1e12) and o.effective_energy_j <= effective_energy_j
            for o in options
        )


@given(profile=profiles)
def test_hull_is_convex_and_below_every_option(profile: list[Measurement]) -> None:
    options = pareto_options(profile, 50.0, Scale())
    hull = convex_hull(options, STEEPEST_UW)
    assert hull.times_ps[0] == options[0].time_ps
    assert list(hull.slopes_uw) == sorted(set(hull.slopes_uw), reverse=True)
    assert all(slope_uw > 0 for slope_uw in hull.slopes_uw)
    assert set(hull.times_ps) <= {option.time_ps for option in options}
    for option in options:
        assert value_at(hull, option.time_ps) <= option.effective_energy_j + 1e-9


def test_absurdly_steep_steps_are_capped() -> None:
    options = pareto_options(
        [Measurement(1400, 1.0, 100.0), Measurement(1300, 1.0 + 1e-11, 1.0)], 0.0, Scale()
    )
    assert convex_hull(options, STEEPEST_UW).slopes_uw == (STEEPEST_UW,)


@given(profile=profiles, tolerance_j=st.floats(0, 200))
def test_the_hull_is_lower_by_at_most_the_tolerance(profile: list[Measurement], tolerance_j: float) -> None:
    exact = convex_hull(pareto_options(profile, 50.0, Scale()), STEEPEST_UW)
    coarse = coarse_hull(exact, tolerance_j)
    assert (coarse.times_ps[0], coarse.times_ps[-1]) == (exact.times_ps[0], exact.times_ps[-1])
    assert coarse.slowest_effective_energy_j == exact.slowest_effective_energy_j
    assert list(coarse.times_ps) == sorted(set(coarse.times_ps))
    assert list(coarse.slopes_uw) == sorted(set(coarse.slopes_uw), reverse=True)
    assert all(slope_uw > 0 for slope_uw in coarse.slopes_uw)
    for time_ps in {*exact.times_ps, *coarse.times_ps}:
        lower_j, value_j = (value_at(hull, time_ps) for hull in (coarse, exact))
        assert value_j - tolerance_j - 1e-6 <= lower_j <= value_j + 1e-6


def test_no_tolerance_is_the_hull_itself() -> None:
    hull = Hull((10**12, 2 * 10**12, 3 * 10**12), (50_000_001, 7_000_003), 50.0)
    assert coarse_hull(hull, 0.0) == hull


def test_coarse_hulls_have_slopes_in_common() -> None:
    hulls = [Hull((10**12, 2 * 10**12), (slope_uw,), 50.0) for slope_uw in range(50_000_001, 54_000_000, 77)]
    slopes_uw = {slope_uw for hull in hulls for slope_uw in coarse_hull(hull, 1.0).slopes_uw}
    assert len(slopes_uw) < 6


def value_at(hull: Hull, time_ps: int) -> float:
    missing_ps = (max(0, t - max(s, time_ps)) for s, t in pairwise(hull.times_ps))
    return hull.slowest_effective_energy_j + sum(
        missing * slope_uw * 1e-18 for missing, slope_uw in zip(missing_ps, hull.slopes_uw, strict=True)
    )
