"""Measured savings: when windows come, what the regression recovers, and when nothing is claimed."""

import json
from collections.abc import Callable

import numpy as np
import pytest

from perseus.serving.errors import ServingError
from perseus.serving.savings import MAX_STOCK_SHARE, MIN_WINDOWS, WINDOW_S, SavingsMeter
from perseus.serving.stats import EngineStats, LatencyCount
from tests.serving.profiles import OBJECTIVES

INTERVAL_S = 5.0


def interval(load: float, power_w: float | None, waiting: int = 0) -> EngineStats:
    return EngineStats(
        length_s=INTERVAL_S,
        running_count=3,
        waiting_count=waiting,
        kv_usage=0.1,
        prompt_tokens=200 * load * INTERVAL_S,
        generation_tokens=50 * load * INTERVAL_S,
        ttft=[LatencyCount(0.1, 0.1, load)],
        itl=[LatencyCount(0.2, 0.2, 1), LatencyCount(0.02, 0.02, 99)],
        itl_sum_s=1.0,
        power_w=power_w,
    )


def run(
    hours: float, kept: float, noise: float = 0.0, load: Callable[[float], float] | None = None
) -> SavingsMeter:
    """Drive a meter as the agent does: stock draws 100 W and 40 W per unit of load, clocks `kept` of it."""
    meter, generator, window_s = SavingsMeter(OBJECTIVES), np.random.default_rng(1), 0.0
    for step in range(round(3600 * hours / INTERVAL_S)):
        now_s = step * INTERVAL_S
        at = load(now_s) if load else 1 + generator.random()
        stock_w = (100 + 40 * at) * (1 + noise * generator.standard_normal())
        if window_s > 0:
            window_s -= INTERVAL_S
            meter.add(interval(at, stock_w))
            if window_s <= 0:
                meter.end_window()
            continue
        meter.add(interval(at, kept * stock_w))
        if meter.is_due(0):
            meter.begin_window()
            window_s = WINDOW_S
    return meter


def test_nothing_is_claimed_before_there_are_windows_enough() -> None:
    savings = run(1.0, 0.7).savings()
    assert (savings.saving, savings.is_useful) == (None, False)
    assert 2 < savings.useful_after_h < 6
    assert savings.joules_per_token is not None
    assert savings.attainment_ttft == 1.0
    assert savings.attainment_itl == pytest.approx(0.99)


def test_windows_take_at_most_their_share_and_begin_without_backlog() -> None:
    savings = run(24.0, 0.7).savings()
    assert savings.window_count * WINDOW_S <= MAX_STOCK_SHARE * 24 * 3600
    assert savings.window_count >= 1.2 * MIN_WINDOWS
    meter = run(0.4, 0.7)
    while not meter.is_due(0):
        meter.add(interval(1.0, 100.0))
    assert not meter.is_due(1)


@pytest.mark.parametrize("kept", [0.6, 0.8, 1.0])
def test_the_saving_is_found_within_its_interval(kept: float) -> None:
    meter = run(12.0, kept, noise=0.1)
    savings = meter.savings()
    assert savings.saving is not None
    assert savings.uncertainty is not None
    assert abs(savings.saving - (1 - kept)) <= 1.5 * savings.uncertainty
    assert savings.is_useful
    assert meter.saves_nothing is (kept == 1.0)


def test_another_load_in_the_windows_does_not_mislead() -> None:
    def load(now_s: float) -> float:
        return 1.0 + (now_s // 600) % 3

    savings = run(24.0, 0.7, noise=0.02, load=load).savings()
    assert savings.saving == pytest.approx(0.3, abs=0.02)


def test_a_broken_window_and_intervals_without_power_do_not_count() -> None:
    meter = run(0.4, 0.7)
    before = meter.savings().window_count
    meter.begin_window()
    meter.add(interval(1.0, 100.0))
    meter.end_window()
    meter.add(interval(1.0, None))
    assert meter.savings().window_count == before


def test_a_meter_goes_on_after_a_restart() -> None:
    meter = run(5.0, 0.7)
    again = SavingsMeter.from_json(OBJECTIVES, json.loads(json.dumps(meter.to_json())))
    assert again.savings() == meter.savings()
    assert again.is_due(0) is meter.is_due(0)


@pytest.mark.parametrize(
    "found", [None, [], {}, {"controlled": [1], "windows": [], "late": [], "waited_s": 0}]
)
def test_another_files_content_is_refused(found: object) -> None:
    with pytest.raises(ServingError, match="expected those of an instance"):
        SavingsMeter.from_json(OBJECTIVES, found)
