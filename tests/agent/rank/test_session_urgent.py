"""The measurements of an iteration in which an urgent offer comes into force are void."""

import pytest

from perseus.agent.energy.counter import CounterChange
from perseus.agent.rank.commands import EstimateEnergy
from perseus.agent.rank.sampling import EstimateRequest
from tests.agent.rank.bench import ORDER, Bench, Run, begin, clock_set, counted, end, offer, stage, telemetry

SLOW = stage(1000, 800, 1000, 800)


@pytest.fixture
def planned(bench: Bench) -> Bench:
    """Two iterations of a plan are over."""
    counted(bench, 0.0)
    bench.do(offer(1, 0, stage(1400, 1400, 1400, 1400)), Run(0), Run(1))
    return bench


def touched(bench: Bench, number: int, at: int) -> None:
    """An iteration in which an urgent offer comes while its computation of this index runs."""
    bench.do(begin(number))
    for index, computation in enumerate(ORDER):
        bench.now_s += 0.1
        bench.do(begin(computation))
        if index == at:
            bench.do(offer(2, number + 2, SLOW, is_urgent=True), clock_set(1000, bench.now_s + 0.02))
        bench.now_s += 0.1
        bench.do(end(computation))
    bench.do(end(number))


def test_between_iterations_the_next_is_regular(planned: Bench) -> None:
    planned.do(offer(2, 4, SLOW, is_urgent=True), Run(2))
    planned.now_s += 0.05
    rows = [row for some in telemetry(counted(planned, 300.0)) for row in some.iterations]
    assert [(row.iteration, row.plan_version, row.has_clock_change) for row in rows][-1] == (2, 2, False)


@pytest.mark.parametrize("at", range(len(ORDER)))
def test_the_affected_iteration_is_reported_as_such_without_its_computations(planned: Bench, at: int) -> None:
    touched(planned, 2, at)
    planned.do(Run(3))
    planned.now_s += 0.05
    reported = telemetry(counted(planned, 400.0))
    rows = {row.iteration: row for some in reported for row in some.iterations}
    assert [(n, row.plan_version, row.is_regular, row.has_clock_change) for n, row in rows.items()] == [
        (0, 1, True, False),
        (1, 1, True, False),
        (2, 1, False, True),
        (3, 2, True, False),
    ]
    assert {row.iteration for some in reported for row in some.computations} == {0, 1, 3}
    assert rows[2].energy_j > 0, "it was used, and counts as such"
    clocks = {some.clocks.plan_version: some.clocks.computation_count for some in reported if some.clocks}
    assert clocks == {1: 2 * len(ORDER), 2: len(ORDER)}, "without those of the affected iteration"


def test_the_affected_iteration_is_in_no_energy_sample(planned: Bench) -> None:
    requests: list[EstimateRequest] = []
    begun_s = 0.0
    for number in range(2, 20):
        if number == 10:
            begun_s = planned.now_s
            touched(planned, number, at=1)
        else:
            planned.do(Run(number))
        planned.now_s += 0.05
        change = CounterChange(planned.now_s, 100.0 * number, 0.002)
        commands = planned.session.handle(change, planned.now_s)
        requests += [command.request for command in commands if isinstance(command, EstimateEnergy)]
    assert {request.plan_version for request in requests} == {1, 2}
    for request in requests:
        assert all(each.is_regular == (abs(each.begin_s - begun_s) > 1e-6) for each in request.iterations)
        if request.plan_version == 2:
            assert all(each.begin_s > begun_s for each in request.iterations)
