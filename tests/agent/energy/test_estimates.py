"""Estimates of iterations whose computations are as short as the counter's windows, or shorter."""

from typing import Any

import numpy as np
import pytest

from perseus.agent.link.computation import Kind
from perseus.agent.rank.messages import EnergyEstimate
from perseus.agent.rank.sampling import estimate
from tests.agent.counter_simulation import POWER_W, simulate

CLOCK_MHZ = 1200
Program = list[tuple[str, float]]
LONG = [("wait", 0.030), ("forward", 0.050), ("wait", 0.030), ("backward", 0.100)] * 2
SHORT = [("forward", 0.006), ("wait", 0.004), ("backward", 0.012), ("wait", 0.004), ("gap", 0.005)]


def estimated(
    program: Program, repetitions: int, seed: int = 0, *, iterations: int | None = None, **more: Any
) -> EnergyEstimate:
    """Return the agent's estimate after a program; each repetition is an iteration, unless there are more."""
    simulation = simulate(program, seed=seed, iterations=repetitions, **more)
    made = estimate(simulation.request(iterations or repetitions, CLOCK_MHZ))
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("program", "iterations", "duration_noise", "tolerance"),
    [
        pytest.param(LONG, 40, 0.01, 0.05, id="of 50 and 100 ms"),
        # Before, a window with a gap counted as unknown, and a gap as short as an optimizer step is in each.
        pytest.param(SHORT, 250, 0.05, 0.10, id="of 6 and 12 ms, with a gap in every window"),
    ],
)
def test_energies_and_blocking_power_are_right_within_their_stated_errors(
    program: Program, iterations: int, duration_noise: float, tolerance: float
) -> None:
    deviations = []
    for seed in range(16):
        made = estimated(program, iterations, seed, duration_noise=duration_noise)
        assert {sample.kind for sample in made.samples} == {Kind.FORWARD, Kind.BACKWARD}
        assert made.undetermined == ()
        assert made.blocking_power_w is not None
        assert made.blocking_power_w == pytest.approx(POWER_W["wait"], rel=0.1)
        deviations.append((made.blocking_power_w - POWER_W["wait"]) / made.blocking_power_se_w)
        for sample in made.samples:
            true_j = POWER_W[sample.kind.name.lower()] * sample.time_s
            assert sample.energy_j == pytest.approx(true_j, rel=tolerance)
            deviations.append((sample.energy_j - true_j) / sample.energy_se_j)
    assert np.mean(np.abs(deviations) <= 2) >= 0.9
    assert abs(np.mean(deviations)) <= 0.6


def test_late_marks_do_not_stretch_the_time_of_a_computation() -> None:
    made = estimated(LONG, 40, 1, late_mark_share=0.2)
    assert {sample.kind.name: sample.time_s for sample in made.samples} == {
        "FORWARD": pytest.approx(0.050, rel=0.005),
        "BACKWARD": pytest.approx(0.100, rel=0.005),
    }


def test_a_longer_gap_than_usual_is_unknown() -> None:
    """It may hold an evaluation, of another power: its windows are left out."""
    usual, longer = SHORT * 50, [*SHORT * 49, *SHORT[:-1], ("gap", 0.5)]
    discarded = [estimated(program, 5, iterations=250).discarded_window_count for program in (longer, usual)]
    assert discarded[0] >= discarded[1] + 5 * 4


def test_undetermined_energies_are_reported_with_their_times_and_the_joint_information() -> None:
    even = [("forward", 0.005), ("wait", 0.002), ("backward", 0.01), ("wait", 0.003)]
    made = estimated(even, 250, duration_noise=0.0)
    assert made.samples == ()
    assert [(each.kind, each.chunk, each.clock_mhz) for each in made.undetermined] == [
        (Kind.FORWARD, 0, CLOCK_MHZ),
        (Kind.BACKWARD, 0, CLOCK_MHZ),
    ]
    assert [each.time_s for each in made.undetermined] == pytest.approx([0.005, 0.01])
    assert all(each.energy_j == each.energy_se_j == 0 for each in made.undetermined)
    assert all(each.computation_count == 250 for each in made.undetermined)
    assert len(made.power_information) == 6
    assert len(made.power_information_vector) == 3
