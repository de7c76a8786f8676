"""Transfers that occupy their stages: by hand, in schedules where they deadlock, and from a fit to a plan."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import assume, given

from perseus.solver import (
    Computation,
    Kind,
    Pipeline,
    Schedule,
    ScheduleError,
    gpipe,
)
from perseus.solver.study import (
    FittedTimes,
    MeasuredIteration,
    Transfers,
    emulated_iteration_time_s,
    fit_times,
    with_occupying_transfers,
)
from perseus.solver.study.transfers import lagged_arcs
from tests.solver.pipelines import pipeline_of, pipelines

LAGS = FittedTimes({(0, 1): 0.5}, {(1, 0): 0.25}, {})


def test_an_exchange_keeps_both_stages_waiting() -> None:
    """Forwards take 1 on stage 0 and 2 on stage 1, backwards 3.

    Stage 0 computes until 1, sends until 1.5, computes until 2.5, waits until stage 1 can receive at 3.5,
    sends until 4. Stage 1 computes 1.5–3.5, 4–6, 6–9 (the last microbatch), sends until 9.25, computes until
    12.25 and sends until 12.5. Stage 0 computes 9.25–12.25 and 12.5–15.5.
    """
    schedule = gpipe(2, 2)
    times_s = {c: 3.0 if c.kind is Kind.BACKWARD else 1.0 + c.stage for c in schedule.computations}
    occupying = replace(LAGS, transfers=Transfers.OCCUPYING)
    assert emulated_iteration_time_s(schedule, times_s, occupying) == 15.5
    assert emulated_iteration_time_s(schedule, times_s, LAGS) == 1.5 + 2 + 2 + 3 + 3 + 0.25 + 3


def crossing() -> Schedule:
    """Two paths in opposite directions: each stage would send before it receives, and neither is ready."""

    def both(stage: int, first: int) -> tuple[Computation, ...]:
        other = 1 - first
        forwards = [Computation(stage, Kind.FORWARD, chunk, chunk) for chunk in (first, other)]
        return (
            *forwards,
            *(Computation(stage, Kind.BACKWARD, c.microbatch, c.chunk) for c in reversed(forwards)),
        )

    return Schedule((both(0, 0), both(1, 1)), (((0, 0), (1, 0)), ((1, 1), (0, 1))))


def deadlocking() -> Schedule:
    """Stage 0 begins a second forward before it receives stage 1's earlier transfer: both wait for the
    other."""
    f, b = Kind.FORWARD, Kind.BACKWARD
    first = [(f, 0, 0), (f, 1, 0), (f, 0, 1), (f, 1, 1), (b, 1, 1), (b, 0, 1), (b, 1, 0), (b, 0, 0)]
    second = [(f, 0, 1), (f, 0, 0), (f, 1, 1), (f, 1, 0), (b, 1, 0), (b, 0, 0), (b, 1, 1), (b, 0, 1)]
    orders = tuple(
        tuple(Computation(stage, kind, 2 * chunk + m, chunk) for kind, m, chunk in order)
        for stage, order in enumerate((first, second))
    )
    return Schedule(orders, (((0, 0), (1, 0)), ((1, 1), (0, 1))))


def test_schedules_that_would_deadlock_are_refused_and_fitted_without() -> None:
    schedule = deadlocking()
    with pytest.raises(
        ScheduleError, match="with transfers that occupy their stages the orders deadlock: stage"
    ):
        lagged_arcs(schedule, Transfers.OCCUPYING)
    with pytest.raises(ScheduleError, match="with transfers that occupy their stages"):
        with_occupying_transfers(pipeline_of(schedule))
    times_s = dict.fromkeys(schedule.computations, 1.0)
    fitted = fit_times(schedule, [MeasuredIteration(times_s, 12.0)])
    assert fitted.transfers is Transfers.OVERLAPPING


def test_paths_that_cross_may_exchange() -> None:
    assert len(lagged_arcs(crossing(), Transfers.OCCUPYING)) > len(crossing().arcs)


@given(pipeline=pipelines())
def test_each_transfer_begins_when_both_stages_can_and_holds_both(pipeline: Pipeline) -> None:
    orders = pipeline.schedule.orders
    before = {b: a for order in orders for a, b in pairwise(order)}
    after = {a: b for order in orders for a, b in pairwise(order)}
    waits_s: dict[tuple[Computation | None, Computation | None], set[float]] = {}
    for sender, receiver in pipeline.schedule.dependencies:
        lags_s = pipeline.activation_lags_s if receiver.kind is Kind.FORWARD else pipeline.gradient_lags_s
        for begin, end in product((sender, before.get(receiver)), (receiver, after.get(sender))):
            if begin and end and (begin, end) != (sender, receiver):
                waits_s.setdefault((begin, end), set()).add(lags_s[sender.stage, receiver.stage])
    try:
        occupied = with_occupying_transfers(pipeline)
    except ScheduleError:  # they would deadlock
        assume(False)
    assert occupied.extra_lags_s == {pair: max(lags_s) for pair, lags_s in waits_s.items()}
