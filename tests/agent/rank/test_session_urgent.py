"""Urgent offers come into force at once, at any point of an iteration, and void its measurements."""

import pytest

from perseus.agent.clocks.sets import SetClock
from perseus.agent.energy.counter import CounterChange
from perseus.agent.link.packets import Edge
from perseus.agent.rank.commands import EstimateEnergy
from perseus.agent.rank.messages import Hold, PlanRefusalReason, RankRefused
from perseus.agent.rank.sampling import EstimateRequest
from tests.agent.rank.bench import (
    B0,
    F0,
    F1,
    ORDER,
    RANK,
    Bench,
    accepted,
    clock_set,
    counted,
    in_force,
    refusal,
    stage,
    telemetry,
)

FAST, SLOW = stage(1400, 1400, 1400, 1400), stage(1000, 800, 1000, 800)


@pytest.fixture
def planned(bench: Bench) -> Bench:
    """Two iterations of a plan are over."""
    counted(bench, 0.0)
    bench.offer(1, 0, FAST)
    bench.run(0)
    bench.run(1)
    return bench


def test_the_current_computation_gets_its_clock_at_once(planned: Bench) -> None:
    planned.iteration(Edge.BEGIN, 2)
    planned.mark(Edge.BEGIN, 2, F0)
    assert planned.offer(2, 4, SLOW, is_urgent=True) == [accepted(2, 2), SetClock(1000), in_force(2, 2)]
    planned.mark(Edge.END, 2, F0)
    assert planned.mark(Edge.BEGIN, 2, F1) == [SetClock(1000)], (
        "because B0 is faster, and its begin is unknown"
    )


def test_a_waiting_gpu_gets_the_next_computations_clock(planned: Bench) -> None:
    planned.iteration(Edge.BEGIN, 2)
    planned.mark(Edge.BEGIN, 2, F0)
    planned.mark(Edge.END, 2, F0)
    assert SetClock(800) in planned.offer(2, 4, SLOW, is_urgent=True)


def test_an_urgent_offer_is_never_too_late(planned: Bench) -> None:
    planned.iteration(Edge.BEGIN, 7)
    assert planned.offer(2, 3, SLOW, is_urgent=True)[-1] == in_force(2, 7)


def test_between_iterations_it_is_in_force_and_the_next_one_is_regular(planned: Bench) -> None:
    assert planned.offer(2, 4, SLOW, is_urgent=True) == [accepted(2, 1), in_force(2, 1)]
    planned.run(2)
    planned.now_s += 0.05
    rows = [row for some in telemetry(counted(planned, 300.0)) for row in some.iterations]
    assert [(row.iteration, row.plan_version, row.has_clock_change) for row in rows][-1] == (2, 2, False)


def test_it_replaces_the_pending_plan(planned: Bench) -> None:
    planned.offer(2, 5, Hold(1200))
    planned.offer(3, 6, SLOW, is_urgent=True)
    planned.iteration(Edge.BEGIN, 6)
    assert planned.session.has_plan
    assert planned.offer(3, 6, SLOW, is_urgent=True) == [accepted(3, 6)], "it is in force"


def test_invalid_urgent_offers_are_refused(planned: Bench) -> None:
    reason, _ = refusal(planned.offer(2, 4, Hold(1234), is_urgent=True))
    assert reason is PlanRefusalReason.CLOCK_NOT_SUPPORTED
    planned.do(RankRefused(RANK, "JOB_NOT_FOUND", ""))
    reason, _ = refusal(planned.offer(3, 4, SLOW, is_urgent=True))
    assert reason is PlanRefusalReason.UNKNOWN_RANK


def test_an_iteration_that_left_its_order_stays_at_stock(planned: Bench) -> None:
    planned.iteration(Edge.BEGIN, 2)
    planned.mark(Edge.BEGIN, 2, B0, ordinal=0)
    assert planned.offer(2, 4, SLOW, is_urgent=True) == [accepted(2, 2), in_force(2, 2)]
    assert SetClock(1000) in planned.iteration(Edge.BEGIN, 3)


def touched(bench: Bench, number: int, at: int) -> None:
    """An iteration in which an urgent offer comes while its computation of this index runs."""
    bench.iteration(Edge.BEGIN, number)
    for index, computation in enumerate(ORDER):
        bench.now_s += 0.1
        bench.mark(Edge.BEGIN, number, computation)
        if index == at:
            bench.offer(2, number + 2, SLOW, is_urgent=True)
            bench.do(clock_set(1000, bench.now_s + 0.02))
        bench.now_s += 0.1
        bench.mark(Edge.END, number, computation)
    bench.iteration(Edge.END, number)


@pytest.mark.parametrize("at", range(len(ORDER)))
def test_the_affected_iteration_is_reported_as_such_without_its_computations(planned: Bench, at: int) -> None:
    touched(planned, 2, at)
    planned.run(3)
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


def test_the_affected_iteration_is_in_no_energy_sample(planned: Bench) -> None:
    requests: list[EstimateRequest] = []
    begun_s = 0.0
    for number in range(2, 20):
        if number == 10:
            begun_s = planned.now_s
            touched(planned, number, at=1)
        else:
            planned.run(number)
        planned.now_s += 0.05
        change = CounterChange(planned.now_s, 100.0 * number, 0.002)
        commands = planned.session.handle(change, planned.now_s)
        requests += [command.request for command in commands if isinstance(command, EstimateEnergy)]
    assert {request.plan_version for request in requests} == {1, 2}
    for request in requests:
        assert all(each.is_regular == (abs(each.begin_s - begun_s) > 1e-6) for each in request.iterations)
        if request.plan_version == 2:
            assert all(each.begin_s > begun_s for each in request.iterations)


def test_the_affected_iterations_clocks_are_in_no_statistics(planned: Bench) -> None:
    counted(planned, 10.0)
    touched(planned, 2, at=1)
    planned.now_s += 0.05
    reported = telemetry(counted(planned, 300.0))
    assert reported[-1].clocks is not None
    assert reported[-1].clocks.computation_count == 2 * len(ORDER)
