"""Times of iterations whose work varies apply to their mean work, and are as accurate as that allows."""

import numpy as np
import pytest

from perseus.agent.energy.counter import CounterChange
from perseus.agent.link.computation import Computation, Kind
from perseus.agent.rank.messages import EnergyEstimate
from perseus.agent.rank.sampling import (
    EstimateRequest,
    FinishedComputation,
    FinishedIteration,
    estimate,
)

COMPUTING_W, WAITING_W = 300.0, 75.0
UNIT_S = 0.1
MICROBATCHES = 8


def measured(sigma: float, *, follows: bool = True, knows: bool = True, count: int = 6) -> EnergyEstimate:
    """Measure iterations of some microbatches of log-normal work, which the agent may know in all."""
    random = np.random.default_rng(1)
    iterations, edges_s, edges_j = [], [0.0], [0.0]
    for _ in range(count):
        begin_s, works = edges_s[-1], np.exp(sigma * random.standard_normal(MICROBATCHES))
        computations = []
        for microbatch, work in enumerate(works):
            for length_s, power_w in ((UNIT_S * (work if follows else 1.0), COMPUTING_W), (0.05, WAITING_W)):
                edges_s.append(edges_s[-1] + length_s * (1 + 0.002 * random.standard_normal()))
                edges_j.append(edges_j[-1] + power_w * (edges_s[-1] - edges_s[-2]))
            what = Computation(Kind.FORWARD, microbatch)
            computations.append(FinishedComputation(what, edges_s[-3], edges_s[-2], 1000, is_pure=True))
        total = float(works.sum()) if knows else 0.0
        iterations.append(
            FinishedIteration(begin_s, edges_s[-1], tuple(computations), is_regular=True, work=total)
        )
    ticks_s = np.arange(0.03, edges_s[-1], 0.1)
    energies_j = np.interp(ticks_s, edges_s, edges_j)
    changes = tuple(
        CounterChange(*each, 1e-3) for each in zip(ticks_s.tolist(), energies_j.tolist(), strict=True)
    )
    found = estimate(EstimateRequest(1, tuple(iterations), changes))
    assert found is not None
    return found


@pytest.mark.parametrize("sigma", [0.35, 0.7])
def test_a_known_iterations_work_makes_its_times_comparable(sigma: float) -> None:
    found, blindly = measured(sigma), measured(sigma, knows=False)
    (sample,), (blind,) = found.samples, blindly.samples
    assert sample.time_s == pytest.approx(UNIT_S * found.work / MICROBATCHES, rel=0.005)
    assert sample.energy_j == pytest.approx(COMPUTING_W * sample.time_s, rel=0.03)
    assert sample.time_se_s < 0.005 * sample.time_s < 0.05 * blind.time_s < blind.time_se_s
    assert blindly.work == 0
    assert sample.computation_count == blind.computation_count == 6 * MICROBATCHES


def test_work_that_times_do_not_follow_changes_nothing() -> None:
    (sample,) = measured(0.35, follows=False).samples
    assert sample.time_s == pytest.approx(UNIT_S, rel=0.002)


def test_few_iterations_are_measured_by_their_computations() -> None:
    (sample,), (blind,) = measured(0.35, count=3).samples, measured(0.35, count=3, knows=False).samples
    assert (sample.time_s, sample.time_se_s) == (blind.time_s, blind.time_se_s)
