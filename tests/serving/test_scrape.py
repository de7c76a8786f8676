"""Engines' metrics, as they write them: every name, differences of scrapes, restarts and malformed text."""

from contextlib import suppress
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from perseus.serving.errors import ServingError
from perseus.serving.scrape import EngineTotals, interval, parse_metrics
from perseus.serving.stats import LatencyObjective

NEW = {"kv": "kv_cache_usage_perc", "itl": "inter_token_latency_seconds"}
OLD = {"kv": "gpu_cache_usage_perc", "itl": "time_per_output_token_seconds"}
BOUNDS_S = (0.01, 0.1, 1.0, 10.0)


class Page:
    """vLLM's metrics, by the library that vLLM uses."""

    def __init__(self, names: dict[str, str]) -> None:
        self.registry = CollectorRegistry()
        labels: Any = {"labelnames": ("model_name", "engine"), "registry": self.registry}
        self.metrics = {name: metric.labels("m", "0") for name, metric in self._make(names, labels).items()}

    def _make(self, names: dict[str, str], labels: Any) -> dict[str, Any]:
        return {
            "running": Gauge("vllm:num_requests_running", "", **labels),
            "waiting": Gauge("vllm:num_requests_waiting", "", **labels),
            "by_reason": Gauge("vllm:num_requests_waiting_by_reason", "", **labels),
            "kv": Gauge(f"vllm:{names['kv']}", "", **labels),
            "prompts": Counter("vllm:prompt_tokens", "", **labels),
            "cached": Counter("vllm:prompt_tokens_cached", "", **labels),
            "generated": Counter("vllm:generation_tokens", "", **labels),
            "steps": Histogram("vllm:iteration_tokens_total", "", **labels),
            "ttft": Histogram("vllm:time_to_first_token_seconds", "", buckets=BOUNDS_S, **labels),
            "itl": Histogram(f"vllm:{names['itl']}", "", buckets=BOUNDS_S, **labels),
        }

    def parsed(self) -> EngineTotals:
        return parse_metrics(generate_latest(self.registry).decode())


@pytest.mark.parametrize("names", [NEW, OLD])
def test_vllm_by_its_new_and_old_names(names: dict[str, str]) -> None:
    page = Page(names)
    before = page.parsed()
    metrics = page.metrics
    metrics["running"].set(3)
    metrics["waiting"].set(2)
    metrics["by_reason"].set(40)
    metrics["kv"].set(0.25)
    metrics["prompts"].inc(500)
    metrics["cached"].inc(100)
    metrics["generated"].inc(30)
    for latency_s in (0.05, 0.5, 20.0):
        metrics["ttft"].observe(latency_s)
    for _ in range(27):
        metrics["itl"].observe(0.02)
    metrics["steps"].observe(3)
    stats = interval(before, page.parsed(), 0.25)
    assert stats is not None
    assert (stats.running_count, stats.waiting_count, stats.kv_usage) == (3, 2, 0.25)
    assert (stats.prompt_tokens, stats.generation_tokens, stats.step_count) == (400, 30, 1)
    assert [(each.lower_s, each.upper_s, each.count) for each in stats.ttft] == [
        (0.01, 0.1, 1), (0.1, 1.0, 1), (10.0, inf, 1)
    ]  # fmt: skip
    assert LatencyObjective(99, 10.0).late(stats.ttft) == (1, 3)
    assert stats.itl_sum_s == pytest.approx(0.54)
    assert stats.contradiction is None


def test_counters_that_went_back_are_a_restart() -> None:
    page = Page(NEW)
    page.metrics["generated"].inc(10)
    assert interval(page.parsed(), Page(NEW).parsed(), 1.0) is None
    page = Page(NEW)
    page.metrics["ttft"].observe(0.05)
    again = Page(NEW)
    again.metrics["ttft"].observe(5.0)
    assert interval(page.parsed(), again.parsed(), 1.0) is None


SGLANG = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",tp_rank="0"} 12.0
sglang:num_running_reqs{model_name="m",tp_rank="1"} 12.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 1.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.28
sglang:prompt_tokens_total{model_name="m"} 8e3
sglang:cached_tokens_total{model_name="m"} 1e3
sglang:generation_tokens_total{model_name="m"} 7e2
sglang:time_to_first_token_seconds_bucket{le="0.5",model_name="m"} 6.0
sglang:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 7.0
sglang:ITL_bucket{le="0.02",model_name="m"} 300.0
sglang:ITL_bucket{le="+Inf",model_name="m"} 301.0
sglang:ITL_sum{model_name="m"} 5.5
"""
LIVE = """\
sglang:realtime_tokens_total{mode="prefill_compute",model_name="m",tp_rank="0"} 9e3
sglang:realtime_tokens_total{mode="prefill_cache",model_name="m",tp_rank="0"} 5e3
sglang:realtime_tokens_total{mode="decode",model_name="m",tp_rank="0"} 8e2
"""


@pytest.mark.parametrize("itl", ["inter_token_latency_seconds", "time_per_output_token_seconds"])
@pytest.mark.parametrize(("more", "tokens"), [("", (7000, 700)), (LIVE, (9000, 800))])
def test_sglang_counts_tensor_parallel_ranks_once(itl: str, more: str, tokens: tuple[int, int]) -> None:
    totals = parse_metrics(SGLANG.replace("ITL", itl) + more)
    assert (totals.running_count, totals.waiting_count, totals.kv_usage) == (12, 1, 0.28)
    assert (totals.prompt_tokens, totals.generation_tokens) == tokens
    assert totals.ttft == {0.5: 6, inf: 7}
    assert totals.itl == {0.02: 300, inf: 301}
    assert totals.itl_sum_s == 5.5
    assert totals.step_count is None


def tgi(decodes: int) -> str:
    return f"""\
tgi_batch_current_size 4
tgi_queue_size 0
tgi_request_input_length_sum {900 * decodes}
tgi_request_generated_tokens_sum {40 * decodes}
tgi_request_queue_duration_bucket{{le="0.1"}} {decodes}
tgi_request_queue_duration_bucket{{le="+Inf"}} {decodes}
tgi_batch_inference_duration_bucket{{method="prefill",le="0.1"}} 0
tgi_batch_inference_duration_bucket{{method="prefill",le="+Inf"}} {decodes}
tgi_batch_inference_duration_sum{{method="prefill"}} {0.3 * decodes}
tgi_batch_inference_duration_count{{method="prefill"}} {decodes}
tgi_batch_inference_duration_bucket{{method="decode",le="0.1"}} {10 * decodes}
tgi_batch_inference_duration_bucket{{method="decode",le="+Inf"}} {10 * decodes}
tgi_batch_inference_duration_sum{{method="decode"}} {0.2 * decodes}
"""


def test_tgi_by_its_queue_and_its_steps() -> None:
    stats = interval(parse_metrics(tgi(1)), parse_metrics(tgi(3)), 1.0)
    assert stats is not None
    assert (stats.running_count, stats.prompt_tokens, stats.generation_tokens) == (4, 1800, 80)
    (ttft,) = stats.ttft
    assert [ttft.lower_s, ttft.upper_s, ttft.count] == pytest.approx([0.3, 0.4, 2])
    assert sum(each.count for each in stats.itl) == 20
    assert stats.itl_sum_s == pytest.approx(0.4)


IDLE = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "found none of vllm:num_requests_running"),
        ("<html></html>", "found none of"),
        (10_001 * "vllm:num_requests_running 0\n", "expected at most 10000 lines to parse, found 10001"),
        ('vllm:num_requests_running{engine="0"} many\n', "expected Prometheus' text"),
        ("vllm:num_requests_running NaN\nvllm:num_requests_waiting 0\n", "from 0 to 1e\\+18, found nan"),
        *(
            (
                f"{IDLE}vllm:iteration_tokens_total_count {value}\n",
                "expected vllm:iteration_tokens_total_count from 0 to",
            )
            for value in ("NaN", "+Inf", "-1", "1e308")
        ),
        *(
            (f'{IDLE}vllm:time_to_first_token_seconds_bucket{{le="{bound}"}} 0\n', "a bucket's bound")
            for bound in ("NaN", "x")
        ),
    ],
)
def test_what_is_no_engines_metrics_is_one_clear_error(text: str, expected: str) -> None:
    with pytest.raises(ServingError, match=expected):
        parse_metrics(text)


@given(st.text() | st.text().map(lambda text: f"vllm:num_requests_running{text}"))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with suppress(ServingError):
        parse_metrics(text)
