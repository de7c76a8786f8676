"""Estimates of iterations that are shorter than the counter's windows."""

import numpy as np
import pytest

from perseus.agent.link.computation import Kind
from perseus.agent.rank.messages import EnergyEstimate
from perseus.agent.rank.sampling import estimate
from tests.agent.counter_simulation import POWER_W, simulate

CLOCK_MHZ = 1200
ITERATIONS = 250
ITERATION = [("forward", 0.006), ("wait", 0.004), ("backward", 0.012), ("wait", 0.004), ("gap", 0.005)]
SEEDS = range(12)


def estimated(seed: int, program: list[tuple[str, float]] = ITERATION) -> EnergyEstimate:
    simulation = simulate(program, seed=seed, iterations=ITERATIONS, duration_noise=0.05)
    found = estimate(simulation.request(ITERATIONS, CLOCK_MHZ))
    assert found is not None
    return found


def test_gaps_in_every_window_do_not_prevent_estimates() -> None:
    """Before, a window with a gap counted as unknown, and a gap as short as an optimizer step is in each."""
    deviations = []
    for seed in SEEDS:
        found = estimated(seed)
        assert {sample.kind for sample in found.samples} == {Kind.FORWARD, Kind.BACKWARD}
        assert found.undetermined == ()
        assert found.blocking_power_w is not None
        deviations.append((found.blocking_power_w - POWER_W["wait"]) / found.blocking_power_se_w)
        for sample in found.samples:
            true_j = POWER_W[sample.kind.name.lower()] * sample.time_s
            assert sample.energy_j == pytest.approx(true_j, rel=0.1)
            deviations.append((sample.energy_j - true_j) / sample.energy_se_j)
    assert np.mean(np.abs(deviations) <= 2) >= 0.9
    assert abs(np.mean(deviations)) <= 0.6


def test_a_longer_gap_than_usual_is_unknown() -> None:
    """It may hold an evaluation, of another power: its windows are left out."""
    usual, longer = ITERATION * 50, [*ITERATION * 49, *ITERATION[:-1], ("gap", 0.5)]
    found, expected = (
        estimate(simulate(program, seed=0, iterations=5).request(250, CLOCK_MHZ))
        for program in (longer, usual)
    )
    assert found is not None
    assert expected is not None
    assert found.discarded_window_count >= expected.discarded_window_count + 5 * 4


def test_undetermined_energies_are_reported_with_their_times_and_the_joint_information() -> None:
    even = [("forward", 0.005), ("wait", 0.002), ("backward", 0.01), ("wait", 0.003)]
    simulation = simulate(even, seed=0, iterations=ITERATIONS, duration_noise=0.0)
    found = estimate(simulation.request(ITERATIONS, CLOCK_MHZ))
    assert found is not None
    assert found.samples == ()
    assert [(each.kind, each.chunk, each.clock_mhz) for each in found.undetermined] == [
        (Kind.FORWARD, 0, CLOCK_MHZ),
        (Kind.BACKWARD, 0, CLOCK_MHZ),
    ]
    assert [each.time_s for each in found.undetermined] == pytest.approx([0.005, 0.01])
    assert all(each.energy_j == each.energy_se_j == 0 for each in found.undetermined)
    assert all(each.computation_count == ITERATIONS for each in found.undetermined)
    assert len(found.power_information) == 6
    assert len(found.power_information_vector) == 3
