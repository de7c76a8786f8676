import numpy as np
import pytest
from numpy.typing import NDArray

from perseus.agent.energy.update_times import UpdateTimes, find_update_times

Array = NDArray[np.float64]


def polled(moves_s: Array, seed: int, interval_s: float = 0.005) -> tuple[Array, Array]:
    """Poll intervals around moves: midpoints and half-widths."""
    random = np.random.default_rng(seed)
    widths_s = interval_s * random.uniform(1.0, 1.5, len(moves_s))
    begins_s = moves_s - widths_s * random.uniform(0.0, 1.0, len(moves_s))
    return begins_s + widths_s / 2, widths_s / 2


def update_times_of(moves_s: Array, seed: int) -> UpdateTimes:
    updates = find_update_times(*polled(moves_s, seed))
    assert updates is not None
    return updates


@pytest.mark.parametrize("period_s", [0.02, 0.1])
@pytest.mark.parametrize("count", [15, 60, 200])
def test_the_stated_phase_error_is_the_true_one(period_s: float, count: int) -> None:
    moves_s = 1e6 + period_s * np.arange(count, dtype=np.float64)
    ratios = []
    for seed in range(100):
        updates = find_update_times(*polled(moves_s, seed))
        if updates is not None:
            ratios.append(
                np.sqrt(np.mean((updates.times_s - moves_s) ** 2)) / (updates.phase_error_s / 3**0.5)
            )
    assert len(ratios) >= 90
    assert 0.5 < np.sqrt(np.mean(np.square(ratios))) < 1.4
    assert np.quantile(ratios, 0.9) < 2.0


def test_a_missed_move_does_not_upset_the_update_period() -> None:
    moves_s = 0.1 * np.delete(np.arange(60.0), [20, 21, 40])
    updates = update_times_of(moves_s, seed=3)
    assert np.max(np.abs(updates.times_s - moves_s)) < 0.0005
    assert updates.phase_error_s < 0.0009, "far more precise than one poll"
    assert updates.jitter_s < 0.0001


def test_a_jittery_update_period_states_its_jitter() -> None:
    random = np.random.default_rng(0)
    moves_s = 0.1 * np.arange(100.0) + random.uniform(-0.001, 0.001, 100)
    updates = update_times_of(moves_s, seed=4)
    assert 0.0003 < updates.jitter_s <= 0.0011
    assert np.max(np.abs(updates.times_s - moves_s)) < 0.002


def test_irregular_or_few_moves_have_no_update_period() -> None:
    random = np.random.default_rng(0)
    assert find_update_times(*polled(np.cumsum(random.uniform(0.02, 0.1, 100)), seed=5)) is None
    for count in range(3):
        assert find_update_times(0.1 * np.arange(float(count)), np.full(count, 0.0025)) is None
