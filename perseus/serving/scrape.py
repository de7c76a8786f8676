"""What an engine's metrics say: the totals of one scrape, and the interval between two. Pure.

Prometheus' text as vLLM, SGLang and TGI write it, under their old and new names. Models and data-parallel
engines are added up, and shares averaged; tensor-parallel ranks report the same, and count once. A page has a
thousand lines, of which some sixty matter: the others are dropped before the library parses them, as parsing
takes most of the time.

TGI reports tokens when a request ends, no use of its KV cache, and neither TTFT nor ITL: the time in the
queue with the mean prefill, and the time of decode steps, stand for them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan

from perseus.serving.errors import ServingError
from perseus.serving.stats import EngineStats, LatencyCount

_Buckets = dict[float, float]
"""Upper bound in seconds → latencies up to it, since the engine started."""
_Samples = Mapping[str, Sequence[tuple[Mapping[str, str], float]]]


@dataclass(frozen=True, slots=True)
class _Names:
    """An engine's names, of each the newest first. `steps` is empty where steps are not counted."""

    running: str
    waiting: str
    kv_usage: tuple[str, ...]
    prompt_tokens: tuple[str, ...]
    cached_tokens: str
    generation_tokens: tuple[str, ...]
    ttft: str
    itl: tuple[str, ...]
    steps: str = ""
    by_mode: str = ""
    """Tokens while requests run, by mode, where the counters above move at a request's end."""


_ENGINES = (
    _Names(
        running="vllm:num_requests_running",
        waiting="vllm:num_requests_waiting",
        kv_usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        prompt_tokens=("vllm:prompt_tokens_total",),
        cached_tokens="vllm:prompt_tokens_cached_total",
        generation_tokens=("vllm:generation_tokens_total",),
        ttft="vllm:time_to_first_token_seconds",
        itl=("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        steps="vllm:iteration_tokens_total_count",
    ),
    _Names(
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
        kv_usage=("sglang:token_usage",),
        prompt_tokens=("sglang:prompt_tokens_total",),
        cached_tokens="sglang:cached_tokens_total",
        generation_tokens=("sglang:generation_tokens_total",),
        ttft="sglang:time_to_first_token_seconds",
        itl=("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
        by_mode="sglang:realtime_tokens_total",
    ),
    _Names(
        running="tgi_batch_current_size",
        waiting="tgi_queue_size",
        kv_usage=(),
        prompt_tokens=("tgi_request_input_length_sum",),
        cached_tokens="",
        generation_tokens=("tgi_request_generated_tokens_sum",),
        ttft="tgi_request_queue_duration",
        itl=("tgi_batch_inference_duration",),
    ),
)
_MAX_LINES = 10_000
"""Of those that matter: more take seconds to parse."""
_MAX_VALUE = 1e18
"""Of any counter, gauge or sum: differences of larger ones are no longer exact, or NaN."""
_METHOD, _PREFILL = "method", "prefill"
_RANKS = frozenset({"tp_rank", "pp_rank", "moe_ep_rank"})
_PREFIXES = ("vllm:", "sglang:", "tgi_")
_WANTED = {
    name
    for names in _ENGINES
    for name in (
        names.running, names.waiting, *names.kv_usage, *names.prompt_tokens, names.cached_tokens,
        *names.generation_tokens, names.steps, names.by_mode,
        *(f"{each}{end}" for each in (names.ttft, *names.itl) for end in ("_bucket", "_sum", "_count")),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """One scrape. Counts are since the engine started.

    `prefills`: seconds and number, where TTFT lacks them.
    """

    running_count: int
    waiting_count: int
    kv_usage: float
    prompt_tokens: float
    generation_tokens: float
    ttft: _Buckets
    itl: _Buckets
    itl_sum_s: float
    step_count: float | None
    prefills: tuple[float, float] = (0.0, 0.0)


def parse_metrics(text: str) -> EngineTotals:
    """Return the totals of a page of metrics.

    Raises:
        ServingError: it is not Prometheus' text, or none of a known engine's.
    """
    from prometheus_client.parser import text_string_to_metric_families  # an extra

    lines = [line for line in text.splitlines() if line.startswith(_PREFIXES) and _name_of(line) in _WANTED]
    if len(lines) > _MAX_LINES:
        raise ServingError(f"metrics: expected at most {_MAX_LINES} lines to parse, found {len(lines)}")
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                labels = frozenset(each for each in sample.labels.items() if each[0] not in _RANKS)
                values = found.setdefault(sample.name, {})
                value = float(sample.value)
                if not 0 <= value <= _MAX_VALUE:
                    raise ServingError(
                        f"metrics: expected {sample.name} from 0 to {_MAX_VALUE:g}, found {value:g}"
                    )
                values[labels] = max(value, values.get(labels, 0.0))
    except ServingError:
        raise
    except (ValueError, KeyError, IndexError, RuntimeError) as error:
        raise ServingError(f"metrics: expected Prometheus' text, found {str(error)[:200]!r}") from error
    samples = {
        name: [(dict(labels), value) for labels, value in values.items()] for name, values in found.items()
    }
    for names in _ENGINES:
        if names.running in samples and names.waiting in samples:
            return _totals(samples, names)
    raise ServingError(
        "metrics: expected those of vLLM, SGLang (--enable-metrics) or TGI, "
        f"found none of {', '.join(names.running for names in _ENGINES)}"
    )


def interval(before: EngineTotals, after: EngineTotals, length_s: float) -> EngineStats | None:
    """Return what happened between two scrapes; None if a counter went back: the engine restarted."""
    amounts = [
        after.prompt_tokens - before.prompt_tokens,
        after.generation_tokens - before.generation_tokens,
        after.itl_sum_s - before.itl_sum_s,
        (after.step_count or 0.0) - (before.step_count or 0.0),
    ]
    seconds, prefills = (b - a for a, b in zip(before.prefills, after.prefills, strict=True))
    ttft = _between(before.ttft, after.ttft, seconds / prefills if prefills > 0 else 0.0)
    itl = _between(before.itl, after.itl, 0.0)
    if min(amounts) < 0 or ttft is None or itl is None:
        return None
    return EngineStats(
        length_s=length_s,
        running_count=after.running_count,
        waiting_count=after.waiting_count,
        kv_usage=after.kv_usage,
        prompt_tokens=amounts[0],
        generation_tokens=amounts[1],
        ttft=ttft,
        itl=itl,
        itl_sum_s=amounts[2],
        step_count=None if after.step_count is None else round(amounts[3]),
    )


def _name_of(line: str) -> str:
    return line[: line.find("{")] if "{" in line else line.partition(" ")[0]


def _totals(samples: _Samples, names: _Names) -> EngineTotals:
    def total(*alternatives: str) -> float:
        found = next((samples[each] for each in alternatives if each in samples), ())
        return sum(value for _, value in found)

    by_mode = {at.get("mode"): value for at, value in samples.get(names.by_mode, ())}
    usages = next((samples[each] for each in names.kv_usage if each in samples), ())
    itl = next((each for each in names.itl if f"{each}_bucket" in samples), names.itl[0])
    itl_samples = {
        end: [(at, value) for at, value in samples.get(f"{itl}{end}", ()) if at.get(_METHOD) != _PREFILL]
        for end in ("_bucket", "_sum")
    }
    prefills = (
        sum(value for at, value in samples.get(f"{itl}{end}", ()) if at.get(_METHOD) == _PREFILL)
        for end in ("_sum", "_count")
    )
    return EngineTotals(
        running_count=round(total(names.running)),
        waiting_count=round(total(names.waiting)),
        kv_usage=sum(value for _, value in usages) / max(1, len(usages)),
        prompt_tokens=by_mode.get(
            "prefill_compute", total(*names.prompt_tokens) - total(names.cached_tokens)
        ),
        generation_tokens=by_mode.get("decode", total(*names.generation_tokens)),
        ttft=_buckets(samples.get(f"{names.ttft}_bucket", ())),
        itl=_buckets(itl_samples["_bucket"]),
        itl_sum_s=sum(value for _, value in itl_samples["_sum"]),
        step_count=total(names.steps) if names.steps in samples else None,
        prefills=(next(prefills), next(prefills)),
    )


def _buckets(samples: Sequence[tuple[Mapping[str, str], float]]) -> _Buckets:
    """Add up the labels' buckets."""
    buckets: _Buckets = {}
    for labels, value in samples:
        try:
            upper_s = float(labels["le"])
        except (KeyError, ValueError):
            upper_s = nan
        if isnan(upper_s):
            raise ServingError(f"metrics: expected a bucket's bound, found {dict(labels)}")
        buckets[upper_s] = buckets.get(upper_s, 0.0) + value
    return dict(sorted(buckets.items()))


def _between(before: _Buckets, after: _Buckets, shift_s: float) -> list[LatencyCount] | None:
    """Return the latencies between two scrapes, later by `shift_s`; None if buckets differ or went back."""
    if before and before.keys() != after.keys():
        return None
    counts, lower_s, below = [], 0.0, 0.0
    for upper_s, total in after.items():
        new = total - before.get(upper_s, 0.0)
        if new < below:
            return None
        if new > below:
            counts.append(LatencyCount(lower_s + shift_s, upper_s + shift_s, new - below))
        lower_s, below = upper_s, new
    return counts
