"""The jobs' clock stands still while the coordinator does; and the event loop's idle time."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.shell.job_clock import TOLERANCE_S, JobClock
from perseus.service.shell.measured_loop import MeasuredLoop

PERIOD_S = 1.0


class Source:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def clock() -> tuple[JobClock, Source]:
    source = Source()
    return JobClock(PERIOD_S, source), source


def test_the_clock_follows_its_source_while_ticks_are_on_time() -> None:
    jobs, source = clock()
    for _ in range(100):
        assert jobs.tick() <= TOLERANCE_S
        source.now_s += PERIOD_S / 2
        assert jobs.now_s() == source.now_s
        source.now_s += PERIOD_S / 2 + 0.9 * TOLERANCE_S
    assert jobs.now_s() == source.now_s


@pytest.mark.parametrize("is_asked_first", [True, False])
def test_a_stop_is_left_out_whether_a_tick_or_a_message_comes_first(is_asked_first: bool) -> None:
    jobs, source = clock()
    jobs.tick()
    before_s = jobs.now_s()
    source.now_s += 600.0
    if is_asked_first:
        assert jobs.now_s() - before_s <= PERIOD_S + TOLERANCE_S
    assert jobs.tick() == pytest.approx(600.0 - PERIOD_S)
    assert jobs.now_s() - before_s <= PERIOD_S + TOLERANCE_S
    jobs.tick()
    source.now_s += 0.5
    assert jobs.now_s() - before_s <= PERIOD_S + TOLERANCE_S + 0.5


def test_a_loop_that_is_busy_without_ticking_is_credited_at_the_tick_and_never_goes_back() -> None:
    jobs, source = clock()
    jobs.tick()
    start_s = jobs.now_s()
    for _ in range(50):
        source.now_s += 0.1
        busy_s = jobs.now_s()
    assert jobs.tick() == pytest.approx(4.0)
    assert jobs.now_s() == busy_s
    for _ in range(5):  # it stands until the time that it returned is true
        source.now_s += PERIOD_S
        jobs.tick()
    assert jobs.now_s() - start_s == pytest.approx(10.0 - 4.0)


@given(st.lists(st.tuples(st.sampled_from(["ask", "tick"]), st.floats(0, 100)), max_size=50))
def test_the_clock_never_goes_back_and_never_runs_ahead(steps: list[tuple[str, float]]) -> None:
    jobs, source = clock()
    first_s = last_s = jobs.now_s()
    for step, time_s in steps:
        source.now_s += time_s
        if step == "tick":
            assert jobs.tick() >= 0
        now_s = jobs.now_s()
        assert last_s <= now_s <= source.now_s
        last_s = now_s
    assert last_s - first_s <= source.now_s - 1000.0


def test_the_clock_stands_while_messages_wait_longer_and_longer() -> None:
    jobs, source = clock()
    jobs.tick()
    before_s = jobs.now_s()
    for kept_s in (1.0, 2.0, 3.0, 4.0):  # no agent is heard for four seconds
        source.now_s += PERIOD_S
        assert jobs.tick(kept_s) == 0.0
        assert jobs.now_s() == before_s


def test_the_clock_runs_while_the_wait_is_constant_and_does_not_leap_when_it_ends() -> None:
    jobs, source = clock()
    jobs.tick()
    source.now_s += PERIOD_S
    jobs.tick(5.0)
    start_s = jobs.now_s()
    for kept_s in (5.0, 5.1, 4.9, 5.0, 5.2):
        source.now_s += PERIOD_S
        jobs.tick(kept_s)
    while source.now_s - jobs.now_s() > 5.0:  # a time returned before that tick can't be taken back
        source.now_s += PERIOD_S
        jobs.tick(5.0)
    passed_s, before_s = source.now_s, jobs.now_s()
    assert before_s > start_s
    for _ in range(5):
        source.now_s += PERIOD_S
        jobs.tick(0.0)
    assert jobs.now_s() - before_s == pytest.approx(source.now_s - passed_s)


def test_a_stop_in_which_the_wait_grew_is_credited_once() -> None:
    jobs, source = clock()
    jobs.tick()
    before_s = jobs.now_s()
    source.now_s += 10.0
    jobs.tick(9.0)
    source.now_s += 0.5
    assert jobs.now_s() - before_s == pytest.approx(1.5)


def test_waiting_is_idle_and_work_is_not() -> None:
    with asyncio.Runner(loop_factory=MeasuredLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, MeasuredLoop)

        async def wait_and_work() -> None:
            await asyncio.sleep(0.2)
            time.sleep(0.05)  # noqa: ASYNC251 - that is the work

        begun_s, before_s = time.monotonic(), loop.idle_s
        runner.run(wait_and_work())
        assert 0.05 < loop.idle_s - before_s < time.monotonic() - begun_s - 0.04
