"""Transfers that occupy their stages: by hand, in schedules where they deadlock, and from a fit to a plan."""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import assume, given

from benchmarks.transfer_simulation import Mechanisms, SimulatedRun, simulate_run
from benchmarks.transfers import with_fixed_time
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


# --- Simulated runs with 40 % transfers, and fits that predict them -----------------------------------------


SHORT = {"stage_count": 3, "microbatch_count": 10, "plan_count": 24, "step_count": 3}


def held_out_errors(simulated: SimulatedRun) -> tuple[list[float], Transfers]:
    """Fitted to every second plan, tested on the others."""
    schedule = with_fixed_time(simulated.schedule)
    measured = [plan.measured for plan in simulated.plans]
    fitted = fit_times(schedule, measured[::2])
    errors = [
        abs(emulated_iteration_time_s(schedule, one.times_s, fitted) / one.iteration_time_s - 1)
        for one in measured[1::2]
    ]
    return errors, fitted.transfers


def test_a_seed_is_a_run() -> None:
    mechanisms = Mechanisms(has_uneven_links=True, contention=0.1)
    runs = [simulate_run(seed, mechanisms, plan_count=2, step_count=1) for seed in (3, 3, 4)]
    assert runs[0] == runs[1]
    assert runs[0].plans != runs[2].plans


@pytest.mark.parametrize("is_blocking", [False, True])
@pytest.mark.parametrize("transfer_share", [0.4, 0.6])
def test_transfers_have_the_requested_share(is_blocking: bool, transfer_share: float) -> None:
    simulated = simulate_run(1, Mechanisms(is_blocking), transfer_share, plan_count=1, step_count=1)
    assert transfer_share <= simulated.transfer_share <= transfer_share + 0.02
    assert len(simulated.plans[0].measured.times_s) == len(list(simulated.schedule.computations))


def test_contention_is_in_measured_times() -> None:
    """Measured while all hold their clock: longer than without contention, by less than with uninterrupted
    transfers."""
    slow, free = (
        simulate_run(1, Mechanisms(contention=contention, noise=0.0), plan_count=1, step_count=1)
        for contention in (0.2, 0.0)
    )
    ratios = [slow.profile_s[key] / free.profile_s[key] for key in free.profile_s]
    assert 1.02 < np.mean(ratios) < 1.6
    assert free.profile_s[0, Kind.FORWARD, 930] > free.profile_s[0, Kind.FORWARD, 1410]


@pytest.mark.slow("two simulated runs are fitted in both ways")
def test_blocking_transfers_are_distinguished_from_overlapping_ones() -> None:
    """Without noise, critical paths explain either simulation to a thousandth, though it does not use
    them."""
    for is_blocking in (False, True):
        errors, transfers = held_out_errors(simulate_run(5, Mechanisms(is_blocking, noise=0.0), **SHORT))
        assert np.mean(errors) < 1e-3
        if transfers is Transfers.OCCUPYING:
            assert is_blocking


@pytest.mark.slow("a simulated run is fitted in both ways")
@pytest.mark.parametrize(
    "mechanisms",
    [
        Mechanisms(is_blocking=True, has_uneven_links=True),
        Mechanisms(has_shared_links=True),
        Mechanisms(contention=0.15, has_uneven_links=True),
        Mechanisms(has_fixed_costs=True),
    ],
)
def test_iterations_full_of_transfers_are_predicted_within_a_hundredth(mechanisms: Mechanisms) -> None:
    errors, _ = held_out_errors(simulate_run(2, mechanisms, **SHORT))
    assert np.mean(errors) <= 0.01
