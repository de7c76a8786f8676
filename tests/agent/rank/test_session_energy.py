"""A session's energy measurements from the counter."""

from collections.abc import Callable

import pytest

from perseus.agent.link.computation import Computation, Kind
from perseus.agent.link.packets import Edge
from perseus.agent.rank.messages import EnergyEstimate, Hold, Telemetry
from tests.agent.rank.bench import F0, ORDER, Bench, Mark, begin, clock_set, counted, end, offer, telemetry


@pytest.fixture
def holding(bench: Bench) -> Bench:
    bench.do(offer(7, 0, Hold(1000)), clock_set(1000, bench.now_s))
    return bench


Part = Callable[[Bench, int, Computation], list[Telemetry]]


def trained(bench: Bench, count: int, wait: Part, compute: Part, after: Part | None = None) -> EnergyEstimate:
    """The last estimate of a training whose computations are made of these parts."""
    messages: list[Telemetry] = []
    for number in range(count):
        bench.do(begin(number))
        for computation in ORDER:
            messages += wait(bench, number, computation)
            bench.do(begin(computation))
            messages += compute(bench, number, computation)
            bench.do(end(computation))
        if after is not None:
            messages += after(bench, number, ORDER[-1])
        bench.do(end(number))
    return [message.energy for message in messages if message.energy is not None][-1]


def test_energy_is_that_of_computing_without_waits_under_the_plan_and_its_clock(holding: Bench) -> None:
    """Forwards draw 300 W, backwards 400 W, and waits 100 W, within computations and between them."""
    power_w = {Kind.FORWARD: 300.0, Kind.BACKWARD: 400.0}

    def compute(bench: Bench, number: int, computation: Computation) -> list[Telemetry]:
        messages = bench.draw(0.05, power_w[computation.kind])
        bench.do(Mark(Edge.BEGIN))
        messages += bench.draw(0.04 + 0.01 * (number % 3), 100.0)
        bench.do(Mark(Edge.END))
        return messages + bench.draw(0.05, power_w[computation.kind])

    estimate = trained(holding, 8, lambda bench, *_: bench.draw(0.03, 100.0), compute)
    assert estimate.plan_version == 7
    assert estimate.blocking_power_w == pytest.approx(100, rel=0.1)
    assert {(sample.chunk, sample.clock_mhz) for sample in estimate.samples} == {(0, 1000)}
    assert {sample.kind for sample in estimate.samples} == power_w.keys()
    for sample in estimate.samples:
        assert sample.time_s == pytest.approx(0.1, abs=0.002)
        assert sample.energy_j == pytest.approx(power_w[sample.kind] * sample.time_s, rel=0.05)
        assert sample.computation_count == 2 * estimate.iteration_count


def test_blocking_power_is_that_of_the_held_clock_and_not_of_stock_after_the_last_computation(
    holding: Bench,
) -> None:
    """300 W while computing, 100 W in waits at the held clock, and 140 W in those at stock.

    One gap is an evaluation.
    """

    def wait(bench: Bench, number: int, computation: Computation) -> list[Telemetry]:
        if computation == ORDER[0]:
            bench.do(clock_set(1000, bench.now_s))
        return bench.draw(0.04 + 0.01 * ((number + computation.microbatch) % 4), 100.0)

    def gap(bench: Bench, number: int, _: Computation) -> list[Telemetry]:
        bench.do(clock_set(None, bench.now_s))
        evaluation = bench.draw(2.0, 300.0) if number == 3 else []
        return evaluation + bench.draw(0.15 + 0.01 * (number % 5), 140.0)

    estimate = trained(holding, 16, wait, lambda bench, *_: bench.draw(0.06, 300.0), gap)
    assert estimate.blocking_power_w == pytest.approx(100, rel=0.03)
    assert {sample.clock_mhz for sample in estimate.samples} == {1000}


def test_a_computation_during_which_the_clock_changed_is_no_sample(bench: Bench) -> None:
    bench.do(offer(1, 0, Hold(1000)))
    energy_j = 0.0

    def compute(bench: Bench, number: int, computation: Computation) -> list[Telemetry]:
        nonlocal energy_j
        if computation == F0:  # every forward of microbatch 0 sees its clock change
            bench.do(clock_set(1000 if number % 2 else 800, bench.now_s + 0.04))
        messages: list[Telemetry] = []
        for _ in range(2):
            bench.now_s += 0.05
            energy_j += 10.0
            messages += telemetry(counted(bench, energy_j))
        return messages

    estimate = trained(bench, 6, lambda *_: [], compute)
    forwards = [sample for sample in estimate.samples if sample.kind is Kind.FORWARD]
    count = sum(sample.computation_count for sample in forwards)
    assert count == estimate.iteration_count, "F1 only"
