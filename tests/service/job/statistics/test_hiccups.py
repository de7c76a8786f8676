"""Hiccups: what is learned of rare, large values, and what the detector makes of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.job.statistics.hiccups import MAX_LENGTH, UNSEEN_SHARE, Hiccups
from perseus.service.job.statistics.noise import Noise
from perseus.service.job.statistics.sequential_test import SequentialTest
from perseus.service.job.stragglers.response_cost import Leads

FIRST = np.array([0])


def learn(values: list[float]) -> Hiccups:
    """Return what is learned of one source with a level of 0 and a scale of 0.01."""
    hiccups = Hiccups(1)
    for value in values:
        hiccups.add(np.array([value]), np.zeros(1), np.array([0.01]))
    return hiccups


def shares(hiccups: Hiccups, distance: float) -> tuple[float, float]:
    begun, continued = hiccups.shares(FIRST, np.array([distance]), is_learned=False)
    return float(begun[0]), float(continued[0])


def test_the_share_is_that_of_values_at_least_as_far() -> None:
    hiccups = learn(([0.0] * 9 + [0.5]) * 10 + [0.0])
    assert shares(hiccups, 0.3)[0] == pytest.approx(0.1, rel=0.1)
    assert shares(hiccups, 0.8)[0] == UNSEEN_SHARE
    assert shares(hiccups, -0.5)[0] == UNSEEN_SHARE


def test_a_departure_counts_once_it_has_ended() -> None:
    assert shares(learn([0.0] * 5 + [0.5] * 3), 0.4)[0] == UNSEEN_SHARE
    assert shares(learn([0.0] * 5 + [0.5] * 3 + [0.0]), 0.4)[0] > 0.2
    assert shares(learn([0.0] * 5 + [0.5] * (MAX_LENGTH + 1) + [0.0]), 0.4)[0] == UNSEEN_SHARE


@pytest.mark.parametrize(("length", "low", "high"), [(1, 0.0, 0.1), (2, 0.9, 1.0), (6, 0.9, 1.0)])
def test_one_iteration_is_followed_by_another_as_often_as_they_did(
    length: int, low: float, high: float
) -> None:
    hiccups = learn(([0.0] * 20 + [0.5] * length) * 20 + [0.0] * 20 + [0.5])
    assert low <= shares(hiccups, 0.5)[1] <= high


def test_small_hiccups_say_nothing_of_large_ones() -> None:
    small = learn(([0.0] * 20 + [0.05] * 6) * 20 + [0.0] * 20 + [0.5])
    assert shares(small, 0.5)[1] < 0.2 < 0.8 < shares(small, 0.05)[1]


def test_beyond_a_new_level_a_departure_is_a_new_one() -> None:
    hiccups = learn([0.0] * 5 + [0.5] * 2)
    hiccups.explain(0)
    assert shares(hiccups, 0.5)[1] == 0.0


@given(
    values=st.lists(st.one_of(st.floats(-0.05, 0.05), st.floats(0.2, 3)), max_size=60),
    distance=st.floats(0.01, 3),
)
def test_shares_are_probabilities_and_fall_with_the_distance(values: list[float], distance: float) -> None:
    hiccups = learn(values)
    begun, continued = shares(hiccups, distance)
    assert 0 < begun <= 1 + UNSEEN_SHARE
    assert 0 <= continued <= 1
    assert shares(hiccups, 1.5 * distance)[0] <= begun


def evidence(length: int) -> float:
    """Return the evidence of two large values in a row, where hiccups of this length are frequent."""
    rng = np.random.default_rng(1)
    noise, test = Noise(4), SequentialTest(4, 4000, 100)

    def feed(first: float) -> None:
        values = 0.01 * rng.standard_normal(4)
        values[0] += first
        test.add(values, noise)
        noise.add(values)

    for _ in range(30):
        for _ in range(20):
            feed(0.0)
        for _ in range(length):
            feed(0.5)
    for first in [0.0] * 20 + [0.5] * 2:
        feed(first)
    return float(test.evidence_above()[0]) / 4000


def test_two_clustered_hiccups_are_no_straggler() -> None:
    assert evidence(0) > 1, "where there are no hiccups, two values are enough"
    assert evidence(3) < 0.1


def test_others_are_slowed_as_far_as_hiccups_allow() -> None:
    leads, none = Leads(), np.zeros_like(Hiccups(1).size_shares)
    for _ in range(100):
        leads.add(np.array([0.0, 0.001, -0.001, 0.002]))
    assert 0.28 < leads.affordable(0.3, none) < 0.3
    often = learn(([0.0] * 9 + [0.5]) * 20 + [0.0]).size_shares
    assert leads.affordable(0.3, often) == pytest.approx(0.001 / 0.1, rel=0.2), "each costs all of it"
