"""Predicted shares and watts: monotone in the clock, and near to what an engine then does.

What live measurements change: the scale at once, other clocks only as far as they were measured.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.serving.engine import Engine, Request, StepTable
from perseus.serving.live import LiveModel, LiveScale
from perseus.serving.prediction import LATE_S, LateWindow, LoadPredictor, Prediction
from perseus.serving.stats import EngineStats, LatencyCount
from tests.serving.profiles import CLOCKS_MHZ, LIMITS, OBJECTIVES, model

STEPS = model()
TABLE = StepTable(STEPS, LIMITS)


def observed(requests: list[Request], end_s: float) -> Prediction:
    """Return the prediction after a load at the highest clock."""
    column = len(CLOCKS_MHZ) - 1
    engine = Engine(TABLE, LIMITS, requests)
    predictor = LoadPredictor(LiveModel(STEPS), LIMITS, OBJECTIVES)
    for i in range(1, int(end_s * 4)):
        engine.run_until(i / 4)
        predictor.observe(engine.stats(), column)
        if i % 4 == 0:
            predictor.predict(1.0, 1.0)
    return predictor.predict(1.0, 1.0)


def load(rate: float, prompt_tokens: int, end_s: float) -> list[Request]:
    times_s = np.cumsum(np.random.default_rng(5).exponential(1 / rate, int(rate * end_s)))
    return [Request(float(t), prompt_tokens, 60) for t in times_s]


@pytest.mark.parametrize("rate", [0.5, 3.0])
@pytest.mark.parametrize("column", range(len(CLOCKS_MHZ)))
def test_watts_at_every_clock_are_predicted_from_the_highest(rate: float, column: int) -> None:
    requests = load(rate, 300, 60)
    prediction = observed(requests, 60)
    other = Engine(TABLE, LIMITS, requests)
    other.column = column
    other.run_until(60.0)
    assert prediction.power_w[column] == pytest.approx(other.totals.energy_j / 60, rel=0.12)


def test_late_requests_are_predicted() -> None:
    # Prompts of 8,000 tokens take 1.1 s at the highest clock, and 2.7 s at the lowest.
    prediction = observed(load(0.1, 8_000, 100), 100)
    assert prediction.late_ttft_share[0] > 0.8
    assert prediction.late_ttft_share[-1] < 0.5
    assert not prediction.is_kept(OBJECTIVES)[0]


def test_overload_keeps_no_clock() -> None:
    prediction = observed(load(30.0, 400, 30), 30)
    assert prediction.utilisation[-1] > 1
    assert not prediction.is_kept(OBJECTIVES).any()


INTERVALS = st.builds(
    lambda running, waiting, prompts, tokens: EngineStats(
        0.25, running, waiting, 0.3, 500 * prompts, tokens, [LatencyCount(0.2, 0.2, prompts)], [], 0.0
    ),
    st.integers(0, 100),
    st.integers(0, 50),
    st.integers(0, 5),
    st.integers(0, 500),
)


@given(st.lists(INTERVALS, min_size=1, max_size=30), st.floats(1.0, 1.25))
def test_lower_clocks_are_never_predicted_to_be_faster(
    intervals: list[EngineStats], strictness: float
) -> None:
    predictor = LoadPredictor(LiveModel(STEPS), LIMITS, OBJECTIVES)
    for interval in intervals:
        predictor.observe(interval, None)
        prediction = predictor.predict(strictness, strictness)
    for falling in (prediction.late_ttft_share, prediction.late_itl_share, prediction.utilisation):
        assert np.all(np.isfinite(falling))
        assert np.all(np.diff(falling) <= 1e-9)
    assert np.all(prediction.power_w >= STEPS.idle_power_w - 1e-9)
    kept = prediction.is_kept(OBJECTIVES)
    assert list(kept) == sorted(kept)


def test_no_load_costs_idle_power_at_every_clock() -> None:
    predictor = LoadPredictor(LiveModel(STEPS), LIMITS, OBJECTIVES)
    assert not predictor.is_idle
    for _ in range(241):
        predictor.observe(EngineStats(0.25, 0, 0, 0.0, 0, 0, [], [], 0.0), None)
    assert predictor.is_idle
    assert predictor.predict(1.0, 1.0).power_w == pytest.approx(np.full(5, STEPS.idle_power_w))


def test_late_ones_count_for_the_last_minutes() -> None:
    window = LateWindow()
    window.add(10.0, 4.0, 8.0)
    assert window.share == 0.5
    for _ in range(round(LATE_S / 10)):
        window.add(10.0, 0.0, 1.0)
    assert window.share == 0.0


def test_late_ones_count_for_longer_if_there_are_few() -> None:
    window = LateWindow(clock_count=2, min_count=100.0)
    window.add(10.0, np.array([1.0, 0.0]), 1.0)
    for _ in range(99):
        window.add(10.0, np.zeros(2), 1.0)
    assert list(window.share) == [0.01, 0.0]
    window.add(10.0, np.zeros(2), 1.0)
    assert list(window.share) == [0.0, 0.0]


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
