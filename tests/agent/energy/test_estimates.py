"""Estimates of iterations whose computations are as short as the counter's windows, or shorter."""

from typing import Any

import numpy as np
import pytest

from perseus.agent.link.computation import Kind
from perseus.agent.rank.messages import EnergyEstimate
from perseus.agent.rank.sampling import estimate
from tests.agent.counter_simulation import POWER_W, simulate

CLOCK_MHZ = 1200
LONG = [("wait", 0.030), ("forward", 0.050), ("wait", 0.030), ("backward", 0.100)] * 2
SHORT = [("forward", 0.006), ("wait", 0.004), ("backward", 0.012), ("wait", 0.004), ("gap", 0.005)]


def estimated(program: list[tuple[str, float]], iterations: int, seed: int, **more: Any) -> EnergyEstimate:
    """Return the agent's estimate after a program, of which each repetition is an iteration."""
    made = estimate(
        simulate(program, seed=seed, iterations=iterations, **more).request(iterations, CLOCK_MHZ)
    )
    assert made is not None
    return made


def test_energies_and_blocking_power_are_right_within_their_stated_errors() -> None:
    """There is a gap in every window, as short as an optimizer step."""
    deviations = []
    for seed in range(16):
        made = estimated(SHORT, 250, seed, duration_noise=0.05)
        assert {sample.kind for sample in made.samples} == {Kind.FORWARD, Kind.BACKWARD}
        assert made.undetermined == ()
        assert made.blocking_power_w is not None
        assert made.blocking_power_w == pytest.approx(POWER_W["wait"], rel=0.1)
        deviations.append((made.blocking_power_w - POWER_W["wait"]) / made.blocking_power_se_w)
        for sample in made.samples:
            true_j = POWER_W[sample.kind.name.lower()] * sample.time_s
            assert sample.energy_j == pytest.approx(true_j, rel=0.10)
            deviations.append((sample.energy_j - true_j) / sample.energy_se_j)
    assert np.mean(np.abs(deviations) <= 2) >= 0.9
    assert abs(np.mean(deviations)) <= 0.6


def test_late_marks_do_not_stretch_the_time_of_a_computation() -> None:
    made = estimated(LONG, 40, 1, late_mark_share=0.2)
    assert {sample.kind.name: sample.time_s for sample in made.samples} == {
        "FORWARD": pytest.approx(0.050, rel=0.005),
        "BACKWARD": pytest.approx(0.100, rel=0.005),
    }
