"""The engine of replays: what it counts, against figures worked out by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.serving.engine import Engine, Request, StepTable
from perseus.serving.errors import ServingError
from perseus.serving.model import fit_step_model
from perseus.serving.stats import EngineLimits
from tests.serving.profiles import LIMITS, measured, model

TABLE = StepTable(model(), LIMITS)
STEPS = model()


def time_s(prompt_tokens: float, decoding: float, context: float) -> float:
    return float(STEPS.time_s(prompt_tokens, decoding, context)[-1])


def test_one_request() -> None:
    engine = Engine(TABLE, LIMITS, [Request(0.0, 700, 3)])
    engine.run_until(10.0)
    first = time_s(512, 0, 512)
    second = time_s(188, 0, 700)
    (through_s, ttft_s), itl = engine.totals.ttft[0], engine.totals.itl
    assert ttft_s == through_s == pytest.approx(first + second)
    # A decoding request's own token counts as its context from the next step on.
    assert [each[1] for each in itl] == pytest.approx([time_s(1, 0, 701), time_s(1, 0, 702)])
    assert engine.totals.generated_tokens == 3
    assert not engine.is_busy
    busy_s = first + second + sum(each[1] for each in itl)
    watts = float(STEPS.power_w(512, 0)[-1])
    assert engine.totals.energy_j == pytest.approx(watts * busy_s + 60 * (10 - busy_s), rel=0.01)


def test_decoding_requests_slow_down_with_prompts() -> None:
    engine = Engine(TABLE, LIMITS, [Request(0.0, 10, 200), Request(0.5, 512, 2)])
    engine.run_until(30.0)
    slowest = max(engine.totals.itl, key=lambda each: each[1])
    assert slowest[1] > time_s(511, 1, 500) * 0.99
    assert (
        len(engine.totals.itl) == 199
    )  # the second request's only further token comes with one of the first's


def test_decoding_tokens_may_take_longer_than_those_of_prompts() -> None:
    slower = [replace(each, time_s=each.time_s + 1e-3 * each.decoding_count) for each in measured()]
    steps = fit_step_model(slower, 60.0)
    engine = Engine(StepTable(steps, LIMITS), LIMITS, [Request(0.0, 10, 2), Request(0.0, 10, 2)])
    engine.run_until(1.0)
    assert engine.totals.itl[0][1] == pytest.approx(float(steps.time_s(0, 2, 22)[-1]))
    assert steps.time_s(0, 2, 22)[-1] > steps.time_s(2, 0, 22)[-1] + 1e-3


def test_full_kv_cache_keeps_requests_waiting() -> None:
    limits = EngineLimits(max_batched_tokens=512, kv_capacity_tokens=1_000)
    engine = Engine(StepTable(model(), limits), limits, [Request(0.0, 600, 100), Request(0.0, 600, 100)])
    engine.run_until(0.5)
    assert (engine.stats().running_count, engine.stats().waiting_count) == (1, 1)
    engine.finish()
    assert engine.totals.ttft[1][1] > 100 * time_s(1, 0, 0)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 900), st.integers(1, 40)), min_size=1, max_size=20))
def test_every_token_is_generated_and_nothing_is_left(drawn: list[tuple[float, int, int]]) -> None:
    # The last one needs the whole cache, so nothing of the others may be left there.
    requests = [Request(*each) for each in sorted(drawn)]
    requests.append(Request(5.0, LIMITS.kv_capacity_tokens - 1, 1))
    engine = Engine(TABLE, LIMITS, requests)
    reports = []
    for i in range(1, 80):
        engine.run_until(requests[0].arrival_s + i * 0.25)
        reports.append(engine.stats())
    engine.finish()
    reports.append(engine.stats())
    totals = engine.totals
    assert totals.generated_tokens == sum(request.generated_tokens for request in requests)
    assert totals.prompt_tokens == sum(request.prompt_tokens for request in requests)
    assert len(totals.ttft) == len(requests)
    assert sum(count for _, _, count in totals.itl) == totals.generated_tokens - len(requests)
    assert engine.occupancy == (0, 0, 0.0)
    # What it reported adds up to the totals.
    assert sum(report.generation_tokens for report in reports) == totals.generated_tokens
    assert sum((r.power_w or 0) * r.length_s for r in reports) == pytest.approx(totals.energy_j, rel=1e-3)
    assert all(report.contradiction is None for report in reports)


def test_copy_leaves_the_original_alone() -> None:
    engine = Engine(TABLE, LIMITS, [Request(0.0, 700, 50), Request(0.1, 700, 50)])
    engine.run_until(0.3)
    before = engine.load
    copy = engine.copy()
    copy.finish()
    assert engine.load == before
    assert copy.totals.generated_tokens + engine.totals.generated_tokens == 100


def test_restart_begins_requests_anew() -> None:
    engine = Engine(TABLE, LIMITS, [Request(0.0, 100, 50), Request(0.0, 100, 50)])
    engine.run_until(0.5)
    done = engine.totals.generated_tokens
    engine.stop(10.0)
    assert engine.stats().running_count == 0
    engine.finish()
    assert engine.totals.generated_tokens == done + 100
    assert engine.now_s > 10.0


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ServingError, match="at most 100000 tokens together, found Request"):
        Engine(TABLE, LIMITS, [Request(0.0, 99_990, 11)])
    with pytest.raises(ServingError, match="expected a prompt and an answer"):
        Engine(TABLE, LIMITS, [Request(0.0, 5, 0)])
