"""Energy counters that count something else than the power readings."""

import random
import re

import pytest

from perseus.agent.energy.counter import PowerSample, disagreement


def samples(
    counter_w: float, power_w: float, swing_w: float = 0.0, count: int = 40, seed: int = 1
) -> list[PowerSample]:
    """Return samples at random times of a counter that moves every 0.1 s, and of a power that swings."""
    rng = random.Random(seed)
    times_s = [0.25 * index + rng.uniform(0, 0.2) for index in range(count)]
    return [
        PowerSample(time_s, counter_w * (time_s // 0.1 * 0.1), power_w + rng.choice((-1, 1)) * swing_w)
        for time_s in times_s
    ]


@pytest.mark.parametrize(
    ("counter_w", "power_w", "swing_w"),
    [
        (300.0, 300.0, 0.0),
        (300.0, 300.0, 150.0),
        (330.0, 300.0, 0.0),
        (95.0, 75.0, 0.0),
        (250.0, 300.0, 50.0),
    ],
)
def test_a_counter_of_the_gpu_agrees(counter_w: float, power_w: float, swing_w: float) -> None:
    assert disagreement(samples(counter_w, power_w, swing_w)) == ""


@pytest.mark.parametrize(
    ("counter_w", "power_w", "swing_w", "cause"),
    [
        (
            290.0,
            90.0,
            0.0,
            "expected the GPU's 90 W of its power readings, found 2[89]. W: it counts more than the GPU",
        ),
        (900.0, 600.0, 100.0, "counts more than the GPU"),
        (100.0, 300.0, 0.0, "does not count all of the GPU's energy"),
    ],
)
def test_a_counter_of_more_or_less_is_named(
    counter_w: float, power_w: float, swing_w: float, cause: str
) -> None:
    assert re.search(cause, disagreement(samples(counter_w, power_w, swing_w)))


def test_a_mean_of_a_few_bursty_readings_is_not_exact() -> None:
    texts = {disagreement(samples(300.0, 300.0, 280.0, seed=seed)) for seed in range(300)}
    assert texts == {""}


def test_a_few_samples_say_nothing() -> None:
    assert disagreement([]) == ""
    assert disagreement(samples(290.0, 90.0, count=19)) == ""
