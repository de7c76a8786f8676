"""A session's energy measurements from the counter."""

import pytest

from perseus.agent.link.computation import Kind
from perseus.agent.link.packets import Edge, WaitMark
from perseus.agent.rank.messages import Hold, Telemetry
from tests.agent.rank.bench import F0, ORDER, Bench, clock_set, counted, telemetry


def test_energy_is_reported_of_computing_without_waits_within(bench: Bench) -> None:
    """300 W while computing and 100 W in waits, within computations and between them."""
    bench.offer(7, 0, Hold(1000))
    bench.do(clock_set(1000, bench.now_s))
    messages: list[Telemetry] = []
    energy_j, tick = 0.0, 0

    def pass_time(hundredths: int, drawn_w: float) -> None:
        nonlocal energy_j, tick, messages
        for _ in range(hundredths):
            bench.now_s += 0.01
            energy_j += drawn_w * 0.01
            tick += 1
            if tick % 7 == 0:
                messages += telemetry(counted(bench, energy_j))

    for number in range(8):
        bench.iteration(Edge.BEGIN, number)
        for computation in ORDER:
            pass_time(3, 100.0)
            bench.mark(Edge.BEGIN, number, computation)
            pass_time(5, 300.0)
            bench.do(WaitMark(Edge.BEGIN, number, int(bench.now_s * 1e9)))
            pass_time(4 + number % 3, 100.0)
            bench.do(WaitMark(Edge.END, number, int(bench.now_s * 1e9)))
            pass_time(5, 300.0)
            bench.mark(Edge.END, number, computation)
        bench.iteration(Edge.END, number)
    estimate = [message.energy for message in messages if message.energy is not None][-1]
    assert estimate.blocking_power_w == pytest.approx(100, rel=0.1)
    assert {sample.kind for sample in estimate.samples} == {Kind.FORWARD, Kind.BACKWARD}
    for sample in estimate.samples:
        assert sample.time_s == pytest.approx(0.1, abs=0.002)
        assert sample.energy_j == pytest.approx(30.0, rel=0.05)


def test_blocking_power_is_that_of_the_held_clock_and_not_of_stock_after_the_last_computation(
    bench: Bench,
) -> None:
    """300 W while computing, 100 W in waits at the held clock, and 140 W in those at stock."""
    bench.offer(7, 0, Hold(1000))
    messages: list[Telemetry] = []
    energy_j, tick = 0.0, 0

    def pass_time(hundredths: int, drawn_w: float) -> None:
        nonlocal energy_j, tick, messages
        for _ in range(hundredths):
            bench.now_s += 0.01
            energy_j += drawn_w * 0.01
            tick += 1
            if tick % 7 == 0:
                messages += telemetry(counted(bench, energy_j))

    for number in range(16):
        bench.iteration(Edge.BEGIN, number)
        bench.do(clock_set(1000, bench.now_s))
        for computation in ORDER:
            pass_time(4 + (number + computation.microbatch) % 4, 100.0)
            bench.mark(Edge.BEGIN, number, computation)
            pass_time(6, 300.0)
            bench.mark(Edge.END, number, computation)
        bench.do(clock_set(None, bench.now_s))
        pass_time(15 + number % 5, 140.0)
        bench.iteration(Edge.END, number)
    estimate = [message.energy for message in messages if message.energy is not None][-1]
    assert estimate.blocking_power_w == pytest.approx(100, rel=0.03)
    assert {sample.clock_mhz for sample in estimate.samples} == {1000}


def test_the_energy_estimate_is_that_of_the_plan_and_its_clock(bench: Bench) -> None:
    """Forwards draw 300 W, backwards 400 W and waiting 100 W; the counter moves every 70 ms."""
    power_w = {Kind.FORWARD: 300.0, Kind.BACKWARD: 400.0}
    bench.offer(7, 0, Hold(1000))
    bench.do(clock_set(1000, bench.now_s))
    messages: list[Telemetry] = []
    energy_j = 0.0
    tick = 0
    for number in range(8):
        bench.iteration(Edge.BEGIN, number)
        for computation in ORDER:
            for drawn_w, hundredths, edge in (
                (100.0, 3, Edge.BEGIN),
                (power_w[computation.kind], 5 + number % 3, Edge.END),
            ):
                for _ in range(hundredths):
                    bench.now_s += 0.01
                    energy_j += drawn_w * 0.01
                    tick += 1
                    if tick % 7 == 0:
                        messages += telemetry(counted(bench, energy_j))
                bench.mark(edge, number, computation)
        bench.iteration(Edge.END, number)
    estimate = [message.energy for message in messages if message.energy is not None][-1]
    assert estimate.plan_version == 7
    assert estimate.blocking_power_w == pytest.approx(100, rel=0.1)
    samples = {sample.kind: sample for sample in estimate.samples}
    assert {(sample.chunk, sample.clock_mhz) for sample in estimate.samples} == {(0, 1000)}
    for kind, sample in samples.items():
        assert sample.energy_j == pytest.approx(power_w[kind] * sample.time_s, rel=0.05)
        assert sample.time_s == pytest.approx(0.06, abs=0.003)
        assert sample.computation_count == 2 * estimate.iteration_count


def test_a_computation_during_which_the_clock_changed_is_no_sample(bench: Bench) -> None:
    bench.offer(1, 0, Hold(1000))
    energy_j = 0.0
    messages: list[Telemetry] = []
    for number in range(6):
        bench.iteration(Edge.BEGIN, number)
        for computation in ORDER:
            bench.mark(Edge.BEGIN, number, computation)
            if computation == F0:  # every forward of microbatch 0 sees its clock change
                bench.do(clock_set(1000 if number % 2 else 800, bench.now_s + 0.04))
            for _ in range(2):
                bench.now_s += 0.05
                energy_j += 10.0
                messages += telemetry(counted(bench, energy_j))
            bench.mark(Edge.END, number, computation)
        bench.iteration(Edge.END, number)
    estimate = [message.energy for message in messages if message.energy is not None][-1]
    counts = {(s.kind, s.clock_mhz): s.computation_count for s in estimate.samples}
    forward_count = sum(count for (kind, _), count in counts.items() if kind is Kind.FORWARD)
    assert forward_count == estimate.iteration_count, "F1 only"
