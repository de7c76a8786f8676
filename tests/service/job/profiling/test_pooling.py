"""Energies that single ranks' counters leave undetermined, from all ranks of a stage."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from perseus.service.domain.bounds import MAX_INFORMATION
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.telemetry import EnergyEstimate, EnergySample
from perseus.service.job.profiling.pooling import complete, is_informative
from perseus.solver import Kind

Array = NDArray[np.float64]

CLOCK_MHZ = 1200
TIMES_S = {Kind.FORWARD: 0.002, Kind.BACKWARD: 0.004}
NEEDED = {(kind, 0) for kind in TIMES_S}
POWERS_W = np.array([280.0, 300.0, 90.0])
"""Forward, backward and waiting."""
SUM = np.array([0.3, 0.5, 0.2])
"""Shares of time: of what every window holds."""
RATIO = np.array([0.5, -0.3, 0.0]) / np.hypot(0.5, 0.3)
"""The direction in which forward and backward change and their sum does not."""


def reported(information: Array, powers_w: Array, seed: int = 0) -> EnergyEstimate:
    """Return an estimate with this information and an error that follows from it; no energy is determined."""
    values, directions = np.linalg.eigh(information)
    draws = np.random.default_rng(seed).standard_normal(len(values))
    vector = information @ powers_w + directions @ (np.sqrt(values.clip(0)) * draws)
    return EnergyEstimate(
        plan_version=1,
        iteration_count=20,
        samples=(),
        blocking_power_w=None,
        blocking_power_se_w=0.0,
        undetermined=tuple(
            EnergySample(kind, 0, CLOCK_MHZ, 20, time_s, 0.0, 0.0, 0.0) for kind, time_s in TIMES_S.items()
        ),
        power_information=tuple(information[np.tril_indices(3)].tolist()),
        power_information_vector=tuple(vector.tolist()),
    )


def about(direction: Array, error_w: float) -> Array:
    """Return the information that the powers' combination has this standard error."""
    return np.outer(direction, direction) / error_w**2


def by_rank(estimates: Sequence[EnergyEstimate]) -> dict[Coordinates, EnergyEstimate]:
    return {Coordinates(pipeline, 0, 0): each for pipeline, each in enumerate(estimates)}


def determined(estimate: EnergyEstimate, error_w: float = 1.0) -> EnergyEstimate:
    """Return an estimate with the energies that its agent finds determined, as it reports them."""
    samples = tuple(
        replace(sample, energy_j=power_w * sample.time_s, energy_se_j=error_w * sample.time_s)
        for sample, power_w in zip(estimate.undetermined, POWERS_W.tolist(), strict=False)
    )
    return replace(estimate, samples=samples, undetermined=())


def powers_w(estimate: EnergyEstimate) -> dict[Kind, float]:
    return {sample.kind: sample.energy_j / sample.time_s for sample in estimate.samples}


SUM_ONLY = about(SUM, 1.0)
WAITING = about(np.array([0.0, 0.0, 1.0]), 2.0)


def test_a_rank_without_the_ratio_gets_it_from_another() -> None:
    lacking = reported(SUM_ONLY + WAITING, POWERS_W)
    other = determined(reported(np.eye(3), POWERS_W, seed=1))
    (rank,) = found = complete(by_rank([lacking, other]), accepts_sums=False)
    assert rank == Coordinates(0, 0, 0), "the other keeps its own"
    (completed,) = found.values()
    assert powers_w(completed) == pytest.approx({Kind.FORWARD: 280.0, Kind.BACKWARD: 300.0}, rel=0.03)
    assert completed.undetermined == ()
    assert completed.blocking_power_w == pytest.approx(90.0, rel=0.1)
    assert completed.iteration_count == lacking.iteration_count


def test_a_gpu_that_draws_more_keeps_its_own_sum() -> None:
    """It is 10 % above the others, whose ratio of forward and backward it gets."""
    own_w = 1.1 * POWERS_W
    others = [determined(reported(np.eye(3), POWERS_W, seed=seed)) for seed in range(1, 5)]
    found = complete(by_rank([reported(SUM_ONLY + WAITING, own_w), *others]), accepts_sums=False)
    (completed,) = found.values()
    assert powers_w(completed) == pytest.approx({Kind.FORWARD: 308.0, Kind.BACKWARD: 330.0}, rel=0.03)


def test_ranks_that_each_lack_something_complete_each_other() -> None:
    """One knows its sum, the other the power of its forwards only; neither has an energy of its own."""
    mixture, of_forward = about(np.array([0.2, 0.7, 0.1]), 1.0), about(np.array([1.0, 0.0, 0.0]), 2.0)
    found = complete(
        by_rank([reported(mixture, POWERS_W), reported(of_forward + WAITING, POWERS_W, seed=1)]),
        accepts_sums=False,
    )
    assert len(found) == 2
    for completed in found.values():
        assert powers_w(completed) == pytest.approx({Kind.FORWARD: 280.0, Kind.BACKWARD: 300.0}, rel=0.1)


def test_a_sum_is_accepted_only_on_request_and_with_errors_of_its_parts() -> None:
    alone = by_rank([reported(SUM_ONLY + WAITING, POWERS_W)])
    assert complete(alone, accepts_sums=False) == {}
    (completed,) = complete(alone, accepts_sums=True).values()
    total_j = sum(sample.energy_j for sample in completed.samples)
    true_j = sum(
        power_w * time_s for power_w, time_s in zip(POWERS_W.tolist(), TIMES_S.values(), strict=False)
    )
    assert total_j == pytest.approx(true_j, rel=0.05)
    for sample, power_w in zip(completed.samples, (300.0, 280.0), strict=True):
        assert abs(sample.energy_j / sample.time_s - power_w) <= 2 * sample.energy_se_j / sample.time_s
        assert sample.energy_se_j >= 0.03 * sample.energy_j


@pytest.mark.parametrize(
    "estimate",
    [
        pytest.param(
            reported(about(np.array([0.2, 0.3, 0.5]), 1.0), POWERS_W),
            id="a sum with an unknown share of much waiting says little of computing",
        ),
        pytest.param(determined(reported(np.eye(3), POWERS_W)), id="all energies are known"),
        pytest.param(
            replace(reported(np.zeros((3, 3)), POWERS_W), power_information_vector=(0.0, 0.0, 0.0)),
            id="no information",
        ),
    ],
)
def test_nothing_is_completed(estimate: EnergyEstimate) -> None:
    assert complete(by_rank([estimate]), accepts_sums=True) == {}


def test_errors_hold_over_many_stages() -> None:
    """GPUs differ, and each rank knows its sum well and the rest badly: errors are as stated or smaller."""
    deviations: list[float] = []
    for seed in range(60):
        random = np.random.default_rng(1000 + seed)
        factors = 1 + 0.05 * random.standard_normal((4, 1)) + 0.02 * random.standard_normal((4, 3))
        own_w = POWERS_W * factors
        weak = about(RATIO, 60.0) + about(np.array([0.0, 0.0, 1.0]), 60.0)
        estimates = by_rank(
            [reported(SUM_ONLY + weak, own, seed=10 * seed + row) for row, own in enumerate(own_w)]
        )
        for rank, completed in complete(estimates, accepts_sums=True).items():
            for sample in completed.samples:
                column = list(TIMES_S).index(sample.kind)
                error_w = sample.energy_se_j / sample.time_s / len(estimates) ** 0.5
                deviations.append((powers_w(completed)[sample.kind] - own_w[rank.pipeline, column]) / error_w)
    assert len(deviations) == 60 * 4 * 2
    assert np.mean(np.abs(deviations) <= 2) >= 0.93
    assert np.sqrt(np.mean(np.square(deviations))) == pytest.approx(1.0, abs=0.3)


informations = st.lists(
    st.tuples(st.lists(st.floats(-1, 1), min_size=3, max_size=3).map(np.array), st.floats(0.1, 1e4)),
    max_size=4,
).map(lambda parts: sum((about(direction, error_w) for direction, error_w in parts), np.zeros((3, 3))))


@given(st.lists(st.tuples(informations, st.integers(0, 99)), min_size=1, max_size=5), st.booleans())
def test_completed_energies_are_possible_and_independent_of_the_order(
    parts: list[tuple[Array, int]], accepts_sums: bool
) -> None:
    """Whatever is known: all needed energies are positive and finite, with an error, or there are none."""
    estimates = by_rank([reported(information, POWERS_W, seed) for information, seed in parts])
    found = complete(estimates, accepts_sums=accepts_sums)
    for completed in found.values():
        assert {(sample.kind, sample.chunk) for sample in completed.samples} == NEEDED
        completed.check()
        assert all(0 < sample.energy_j < np.inf and sample.energy_se_j > 0 for sample in completed.samples)
    turned = complete(dict(reversed(estimates.items())), accepts_sums=accepts_sums)
    assert figures(turned) == pytest.approx(figures(found), rel=1e-4)


def figures(found: Mapping[Coordinates, EnergyEstimate]) -> dict[tuple[Coordinates, Kind], float]:
    return {(rank, sample.kind): sample.energy_j for rank, some in found.items() for sample in some.samples}


def test_only_information_on_just_the_needed_computations_counts() -> None:
    some = reported(SUM_ONLY, POWERS_W)
    assert is_informative(some, NEEDED, CLOCK_MHZ)
    assert is_informative(determined(some), NEEDED, CLOCK_MHZ)
    assert not is_informative(some, NEEDED, CLOCK_MHZ + 15)
    assert not is_informative(some, NEEDED | {(Kind.FIXED, 0)}, CLOCK_MHZ)
    assert not is_informative(some, {(Kind.FORWARD, 0)}, CLOCK_MHZ)
    assert not is_informative(replace(some, power_information=()), NEEDED, CLOCK_MHZ)


impossible = st.builds(
    lambda some, triangle, vector: replace(
        some, power_information=tuple(triangle), power_information_vector=tuple(vector)
    ),
    st.just(reported(SUM_ONLY, POWERS_W)),
    st.lists(st.floats(-MAX_INFORMATION, MAX_INFORMATION), min_size=6, max_size=6),
    st.lists(st.floats(-MAX_INFORMATION, MAX_INFORMATION), min_size=3, max_size=3),
)


@given(st.lists(impossible, min_size=1, max_size=3), st.booleans())
def test_impossible_information_does_no_harm(estimates: list[EnergyEstimate], accepts_sums: bool) -> None:
    """Agents may send any numbers within bounds."""
    for each in estimates:
        each.check()
    for completed in complete(by_rank(estimates), accepts_sums=accepts_sums).values():
        for sample in completed.samples:
            assert 0 < sample.energy_j < np.inf
            assert 0 <= sample.energy_se_j < np.inf


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"power_information": (1.0,) * 5}, "energy.power_information: expected 6 numbers, found 5"),
        ({"power_information": ()}, "energy.power_information: expected 6 numbers, found 0"),
        (
            {"power_information_vector": (1.0,)},
            "energy.power_information_vector: expected 3 numbers, found 1",
        ),
        (
            {"power_information": (), "power_information_vector": ()},
            "energy.undetermined: expected at most 0 of them, found 2",
        ),
        (
            {"samples": (EnergySample(Kind.FORWARD, 0, CLOCK_MHZ, 1, 1.0, 0.0, 1.0, 0.0),) * 63},
            "energy.samples: expected at most 64 of them, found 65",
        ),
    ],
)
def test_information_of_another_size_is_refused(changes: dict[str, Any], found: str) -> None:
    with pytest.raises(InvalidFieldError, match=re.escape(found)):
        replace(reported(SUM_ONLY, POWERS_W), **changes).check()
