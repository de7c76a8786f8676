"""Objectives as people write them, late ones by sample and by bucket, and impossible statistics."""

from dataclasses import replace

import pytest

from perseus.serving.errors import ServingError
from perseus.serving.stats import EngineStats, LatencyCount, LatencyObjective

SOUND = EngineStats(
    length_s=0.25,
    running_count=3,
    waiting_count=0,
    kv_usage=0.2,
    prompt_tokens=400,
    generation_tokens=30,
    ttft=(LatencyCount(0.3, 0.3, 1),),
    itl=(LatencyCount(0.02, 0.02, 29),),
    itl_sum_s=0.58,
    step_count=11,
    power_w=200.0,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("p99 <= 2 s", LatencyObjective(99, 2.0)),
        ("P95 ≤ 100 ms", LatencyObjective(95, 0.1)),
        ("p99.9 500ms", LatencyObjective(99.9, 0.5)),
    ],
)
def test_objectives(text: str, expected: LatencyObjective) -> None:
    assert LatencyObjective.parse(text) == expected


@pytest.mark.parametrize(
    "text", ["", "2 s", "p99 2", "p100 2 s", "p99 0 s", "p20 1 s", "p99 -1 s", "p99 2 s 3 s"]
)
def test_other_texts_are_no_objectives(text: str) -> None:
    with pytest.raises(ServingError, match=r"^objective: expected .*, found "):
        LatencyObjective.parse(text)


def test_late_ones_of_a_bucket_count_by_its_share() -> None:
    objective = LatencyObjective(99, 2.0)
    infinite = LatencyCount(5.0, float("inf"), 2)
    latencies = [LatencyCount(0.5, 1.0, 10), LatencyCount(1.0, 2.5, 3), infinite, LatencyCount(2.0, 2.0, 1)]
    assert objective.late(latencies) == pytest.approx((3 / 3 + 2, 16))
    assert objective.allowed_share == pytest.approx(0.01)


def test_sound_statistics() -> None:
    assert SOUND.contradiction is None
    assert replace(SOUND, step_count=None, power_w=None).contradiction is None


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (replace(SOUND, running_count=-1), "running: -1"),
        (replace(SOUND, prompt_tokens=float("nan")), "prompt tokens: nan"),
        (replace(SOUND, generation_tokens=-3), "generation tokens: -3"),
        (replace(SOUND, power_w=float("inf")), "power: inf"),
        (replace(SOUND, itl=(LatencyCount(0.02, 0.02, -1),)), "latencies: -1"),
        (replace(SOUND, itl_sum_s=float("inf")), "sum of ITLs: inf"),
        (replace(SOUND, length_s=0.0), "an interval of 0.0 s"),
        (replace(SOUND, kv_usage=1.2), "KV cache usage: 1.2"),
        (replace(SOUND, step_count=0), "30 tokens generated in no step"),
    ],
)
def test_contradictions(changed: EngineStats, why: str) -> None:
    assert changed.contradiction == why
