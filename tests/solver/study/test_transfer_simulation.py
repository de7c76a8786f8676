"""Simulated runs with 40 % transfers, and fits that predict them for every kind of transfers."""

import numpy as np
import pytest

from benchmarks.transfer_simulation import Mechanisms, SimulatedRun, simulate_run
from benchmarks.transfers import with_fixed_time
from perseus.solver import Kind
from perseus.solver.study import Transfers, emulated_iteration_time_s, fit_times

SMALL = {"stage_count": 3, "microbatch_count": 10, "plan_count": 24, "step_count": 3}


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
        errors, transfers = held_out_errors(simulate_run(5, Mechanisms(is_blocking, noise=0.0), **SMALL))
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
    errors, _ = held_out_errors(simulate_run(2, mechanisms, **SMALL))
    assert np.mean(errors) <= 0.01
