"""What live measurements change: the scale at once, other clocks only as far as they were measured."""

import numpy as np
import pytest

from perseus.serving.live import LiveScale

PRIOR = np.array([1.6, 1.3, 1.1, 1.0])


def taught(measurements: list[tuple[int, float]]) -> LiveScale:
    live = LiveScale(0.03)
    for column, measured in measurements:
        live.learn(measured, float(PRIOR[column]), float(PRIOR[-1]))
    return live


def test_prior_until_measured() -> None:
    assert taught([]).expected(PRIOR) == pytest.approx(PRIOR)


def test_scale_is_learned_at_one_clock() -> None:
    live = taught([(3, 1.2)] * 30)
    assert live.scale == pytest.approx(1.2, rel=0.01)
    assert live.expected(PRIOR) == pytest.approx(1.2 * PRIOR, rel=0.05)


def test_bound_widens_away_from_the_measured_clock() -> None:
    live = taught([(3, 1.0)] * 100)
    width = live.upper(PRIOR, 0.0) / live.expected(PRIOR)
    assert np.all(np.diff(width) < 0)
    nearer = taught([(3, 1.0)] * 100 + [(1, 1.3)] * 100)
    assert nearer.upper(PRIOR, 0.0)[1] < live.upper(PRIOR, 0.0)[1]


def test_memory_bound_share_is_learned_at_two_clocks() -> None:
    # Steps slow down by half of what the profile says.
    live = taught([(3, 1.0), (1, 1.15)] * 50)
    assert live.expected(PRIOR)[0] == pytest.approx(1.3, rel=0.03)


def test_what_is_not_measured_any_more_becomes_uncertain_again() -> None:
    fresh = taught([(0, 1.6)] * 50)
    stale = taught([(0, 1.6)] * 50 + [(3, 1.0)] * 500)
    assert stale.upper(PRIOR, 0.0)[0] > fresh.upper(PRIOR, 0.0)[0]


def test_bound_is_monotone_in_the_clock() -> None:
    live = taught([(3, 1.0)] * 100)
    shapes = np.stack([PRIOR, np.ones(4)])
    assert np.all(np.diff(live.upper(shapes, 0.03), axis=-1) <= 0)


def test_impossible_measurements_are_ignored() -> None:
    assert taught([(3, 50.0), (3, 1e-6)]).scale == 1.0
