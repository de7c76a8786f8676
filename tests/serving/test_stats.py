"""Objectives as people write them, late ones by sample and by bucket, and impossible statistics.

Several processes of one engine: what adds up, what counts once, and when nothing is known.
"""

from dataclasses import replace

import pytest

from perseus.serving.errors import ServingError
from perseus.serving.sources import Sources
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
ONE = replace(SOUND, waiting_count=1, power_w=None)
"""Of one process."""


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


def joined(*names: str) -> Sources:
    sources = Sources()
    for name in names:
        sources.join(name, 0.0)
    return sources


def test_one_source_is_passed_on() -> None:
    sources = Sources()
    assert sources.take(0.0) is None
    sources.join("a", 0.0)
    assert not sources.has_restarted
    sources.report("a", 0.25, ONE)
    merged = sources.take(0.3)
    assert merged == replace(ONE, ttft=list(ONE.ttft), itl=list(ONE.itl))
    assert sources.take(0.4) is None


def test_api_servers_of_one_engine_add_up_tokens_and_not_what_runs() -> None:
    sources = joined("a", "b")
    sources.report("a", 0.2, ONE)
    assert sources.take(0.2) is None  # b has not reported yet
    sources.report("b", 0.3, replace(ONE, running_count=5, waiting_count=0))
    merged = sources.take(0.3)
    assert merged is not None
    assert (merged.length_s, merged.running_count, merged.waiting_count, merged.kv_usage) == (0.25, 5, 0, 0.2)
    assert (merged.prompt_tokens, merged.generation_tokens, merged.step_count) == (800, 60, 22)
    assert (len(merged.ttft), len(merged.itl), merged.itl_sum_s) == (2, 2, 1.16)


def test_data_parallel_engines_add_up() -> None:
    sources = Sources()
    for index in range(2):
        sources.join(index, 0.0, engine_index=index)
        sources.report(index, 0.2, replace(ONE, kv_usage=0.2 * index, step_count=None))
    merged = sources.take(0.3)
    assert merged is not None
    assert (merged.running_count, merged.waiting_count, merged.kv_usage) == (6, 2, 0.1)
    assert merged.step_count is None


def test_a_source_that_is_silent_for_a_second_makes_all_unknown() -> None:
    sources = joined("a", "b")
    sources.report("b", 0.2, ONE)
    sources.report("a", 0.2, ONE)
    assert sources.take(0.2) is not None
    for tenth in range(3, 14):
        sources.report("a", tenth / 10, ONE)
        assert sources.take(tenth / 10) is None
    sources.leave("b")
    sources.report("a", 1.5, ONE)
    assert sources.take(1.5) is not None


def test_what_nobody_takes_is_bounded() -> None:
    sources = joined("a")
    for _ in range(1000):
        sources.report("a", 0.2, ONE)
    merged = sources.take(0.2)
    assert merged is not None
    assert merged.length_s == 2.0


def test_a_source_after_none_is_a_restart() -> None:
    sources = joined("a")
    sources.report("a", 0.2, ONE)
    sources.join("b", 0.2)
    assert not sources.has_restarted
    sources.leave("a")
    sources.leave("b")
    sources.join("c", 5.0)
    assert sources.has_restarted
    sources.take(5.0)
    assert not sources.has_restarted
