"""The controller, event by event: which commands follow, and what always holds."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.serving.controller import (
    DWELL_S,
    MAX_STATS_AGE_S,
    REFUSED_S,
    SETTLE_S,
    Command,
    Controller,
    SetClock,
    SetStock,
    StockReason,
)
from perseus.serving.prediction import LATE_S
from perseus.serving.stats import EngineStats, LatencyCount
from tests.serving.profiles import CLOCKS_MHZ, LIMITS, OBJECTIVES, model

STEPS = model()
INTERVAL_S = 0.5


def interval(  # a light load by default: eight requests decode, and a prompt of 100 tokens comes each second
    running: int = 8, waiting: int = 0, prompts: float = INTERVAL_S, itl_s: float = 0.022, ttft_s: float = 0.1
) -> EngineStats:
    tokens = running * INTERVAL_S / itl_s
    return EngineStats(
        length_s=INTERVAL_S,
        running_count=running,
        waiting_count=waiting,
        kv_usage=0.02,
        prompt_tokens=100 * prompts,
        generation_tokens=tokens,
        ttft=[LatencyCount(ttft_s, ttft_s, prompts)] if prompts else [],
        itl=[LatencyCount(itl_s, itl_s, tokens)] if tokens else [],
        itl_sum_s=itl_s * tokens,
        power_w=None,
    )


class Driver:
    """Sends intervals and applies clocks at once."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.controller = Controller(STEPS, LIMITS, OBJECTIVES, 0.0)
        self.commands: list[tuple[float, Command]] = []

    def take(self, commands: Sequence[Command]) -> Sequence[Command]:
        for command in commands:
            self.commands.append((self.now_s, command))
            clock = command.clock_mhz if isinstance(command, SetClock) else None
            self.controller.on_clock_set(self.now_s, clock)
        self.controller.validate()
        return commands

    def run(self, length_s: float, stats: EngineStats | None = None) -> None:
        for _ in range(round(length_s / INTERVAL_S)):
            self.now_s += INTERVAL_S
            self.take(self.controller.on_stats(self.now_s, stats or self.light()))

    def light(self) -> EngineStats:
        """The light load, with the latencies of the clock in force."""
        clock = self.controller.clock_mhz or CLOCKS_MHZ[-1]
        itl_s = float(STEPS.time_s(0, 8, 2_000)[CLOCKS_MHZ.index(clock)])
        return interval(itl_s=itl_s)


def controlled() -> Driver:
    """Return a driver whose controller is at a low clock."""
    driver = Driver()
    driver.run(60)
    assert driver.controller.clock_mhz is not None
    assert driver.controller.clock_mhz < CLOCKS_MHZ[-1]
    return driver


def test_begins_at_stock_and_goes_down_step_by_step() -> None:
    driver = Driver()
    driver.run(SETTLE_S - INTERVAL_S)
    assert driver.commands == []
    assert driver.controller.stock_reason is StockReason.STARTING
    driver.run(60)
    clocks = [command.clock_mhz for _, command in driver.commands if isinstance(command, SetClock)]
    assert clocks == sorted(CLOCKS_MHZ, reverse=True)[: len(clocks)]
    assert len(clocks) > 2
    times_s = [time_s for time_s, _ in driver.commands]
    assert min(b - a for a, b in pairwise(times_s)) >= DWELL_S


@pytest.mark.parametrize(
    "changed",
    [{"waiting_count": 200}, {"ttft": [LatencyCount(3.0, 3.0, 10)]}],
    ids=["growing queue", "missed objective"],
)
def test_too_much_load_raises_to_the_highest_at_once(changed: dict[str, Any]) -> None:
    driver = controlled()
    driver.now_s += INTERVAL_S
    commands = driver.take(driver.controller.on_stats(driver.now_s, replace(driver.light(), **changed)))
    assert list(commands) == [SetClock(CLOCKS_MHZ[-1])]


def test_objective_missed_at_the_highest_clock_too_means_stock_until_it_is_kept() -> None:
    driver = controlled()
    late = replace(driver.light(), ttft=[LatencyCount(3.0, 3.0, 1)], prompt_tokens=100)
    driver.run(LATE_S + 30, late)
    assert driver.commands[-1][1] == SetStock(StockReason.OBJECTIVE_MISSED)
    driver.run(60)
    assert driver.controller.clock_mhz is None
    driver.run(LATE_S)
    assert driver.controller.clock_mhz is not None


def test_old_statistics_mean_stock_at_the_deadline() -> None:
    driver = controlled()
    deadline_s = driver.controller.deadline_s
    assert deadline_s == driver.now_s + MAX_STATS_AGE_S
    assert driver.controller.on_tick(deadline_s - 0.01) == ()
    assert driver.controller.on_tick(deadline_s) == (SetStock(StockReason.NO_STATS),)
    assert driver.controller.on_tick(deadline_s + 10) == ()


def test_statistics_after_a_gap_are_no_basis_yet() -> None:
    driver = controlled()
    driver.now_s += 1.5
    assert driver.take(driver.controller.on_stats(driver.now_s, interval())) == [
        SetStock(StockReason.NO_STATS)
    ]
    driver.run(SETTLE_S - INTERVAL_S)
    assert driver.controller.clock_mhz is None
    driver.run(1)
    assert driver.controller.clock_mhz == CLOCKS_MHZ[-1]


@pytest.mark.parametrize(
    "stats",
    [replace(interval(), kv_usage=3.0), interval(running=0, waiting=1, prompts=0)],
    ids=["more than all of the cache", "requests wait while none runs"],
)
def test_contradictions_mean_stock(stats: EngineStats) -> None:
    driver = controlled()
    driver.run(4, stats)
    assert driver.commands[-1][1] == SetStock(StockReason.CONTRADICTION)


def test_refused_clock_means_stock_and_is_not_tried_again_soon() -> None:
    driver = controlled()
    driver.take(driver.controller.on_clock_refused(driver.now_s))
    assert driver.commands[-1][1] == SetStock(StockReason.CLOCK_REFUSED)
    driver.run(REFUSED_S - 1)
    assert driver.controller.clock_mhz is None
    driver.run(2)
    assert driver.controller.clock_mhz is not None


def test_restarted_engine_means_stock() -> None:
    driver = controlled()
    driver.take(driver.controller.on_engine_restarted(driver.now_s))
    assert driver.commands[-1][1] == SetStock(StockReason.RESTARTED)


def test_another_engine_means_stock() -> None:
    driver = Driver()
    driver.run(120, interval(itl_s=0.06))
    assert driver.controller.stock_reason is StockReason.OTHER_ENGINE


def test_idle_engine_ends_at_the_highest_clock() -> None:
    driver = controlled()
    driver.run(62, interval(running=0, prompts=0))
    assert driver.controller.clock_mhz == CLOCKS_MHZ[-1]


def test_no_clock_is_tried_that_breaks_the_objective() -> None:
    tight = replace(OBJECTIVES, itl=replace(OBJECTIVES.itl, limit_s=0.026))
    driver = Driver()
    driver.controller = Controller(STEPS, LIMITS, tight, 0.0)
    driver.run(LATE_S + 20)  # at first, bounds are wide
    clocks = {command.clock_mhz for _, command in driver.commands if isinstance(command, SetClock)}
    allowed = STEPS.time_s(0, 8, 2_000) <= 0.026
    assert min(clocks) < CLOCKS_MHZ[-1]
    assert all(allowed[CLOCKS_MHZ.index(clock)] for clock in clocks)


EVENTS = st.one_of(
    st.builds(
        interval,
        running=st.integers(0, 60),
        waiting=st.integers(0, 20),
        prompts=st.floats(0, 4),
        itl_s=st.floats(0.01, 0.2),
        ttft_s=st.floats(0.01, 4),
    ),
    st.just(replace(interval(), kv_usage=2.0)),
    st.sampled_from(["tick", "refused", "restarted"]),
)


@given(
    st.lists(
        st.tuples(EVENTS, st.integers(1, 40), st.sampled_from([0.05, 0.25, 0.25, 0.6, 1.2])), max_size=25
    )
)
def test_whatever_happens(events: list[tuple[EngineStats | str, int, float]]) -> None:
    driver = Driver()
    controller = driver.controller
    heard_s = changed_s = 0.0
    for event, times, gap_s in events:
        for _ in range(times):
            before = controller.clock_mhz
            driver.now_s += gap_s
            if isinstance(event, EngineStats):
                commands = controller.on_stats(driver.now_s, replace(event, length_s=gap_s))
            elif event == "tick":
                commands = controller.on_tick(driver.now_s)
            elif event == "refused":
                commands = controller.on_clock_refused(driver.now_s)
            else:
                commands = controller.on_engine_restarted(driver.now_s)
            driver.take(commands)
            after = controller.clock_mhz
            gap = driver.now_s - heard_s
            if event in ("refused", "restarted") or gap >= MAX_STATS_AGE_S:
                assert after is None
            if isinstance(event, EngineStats):
                heard_s = driver.now_s
                assert after is None or event.contradiction is None
            if after is not None and before is not None and after < before:
                assert CLOCKS_MHZ.index(before) - CLOCKS_MHZ.index(after) == 1
                assert driver.now_s - changed_s >= DWELL_S - 1e-9
                assert controller.prediction is not None
                assert controller.prediction.is_kept(OBJECTIVES)[CLOCKS_MHZ.index(after)]
            if after != before:
                changed_s = driver.now_s
            if before is None and after is not None:
                assert after == CLOCKS_MHZ[-1]
