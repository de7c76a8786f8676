"""Several processes of one engine: what adds up, what counts once, and when nothing is known."""

from dataclasses import replace

from perseus.serving.sources import Sources
from perseus.serving.stats import EngineStats, LatencyCount

ONE = EngineStats(
    length_s=0.25,
    running_count=3,
    waiting_count=1,
    kv_usage=0.2,
    prompt_tokens=400,
    generation_tokens=30,
    ttft=(LatencyCount(0.3, 0.3, 1),),
    itl=(LatencyCount(0.02, 0.02, 29),),
    itl_sum_s=0.58,
    step_count=11,
)


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
