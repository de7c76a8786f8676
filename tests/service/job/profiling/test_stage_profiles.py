"""Merged measurements, blocking power, interpolation, correction, and energies from all ranks of a stage."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from perseus.agent.link.computation import Rank
from perseus.agent.rank.messages import Telemetry
from perseus.agent.rank.sampling import estimate as agent_estimate
from perseus.agent.stream.telemetry import Batch
from perseus.agent.stream.translate import request
from perseus.emulation.physics import A100_SXM
from perseus.service.api.translate_agents import telemetry_from_proto
from perseus.service.domain.bounds import MAX_INFORMATION
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.measured import StageProfile
from perseus.service.domain.profiling import ClockGivenUpReason
from perseus.service.domain.specification import Coordinates, Parallelism
from perseus.service.domain.telemetry import EnergyEstimate, EnergySample
from perseus.service.job.profiling.pooling import complete, is_informative
from perseus.service.job.profiling.stage_profiles import (
    agree,
    blocking_power_w,
    blocking_powers_w,
    build_problem,
    corrected,
    interpolate,
    is_power_known,
    merge,
    why_not_measured,
)
from perseus.solver import Kind, Measurement, one_forward_one_backward
from tests.agent.counter_simulation import simulate
from tests.service.service_fakes import BLOCKING_POWER_W, energy_j, estimate, time_s

SCHEDULE = one_forward_one_backward(2, 2)
SHAPE = Parallelism(2, 2, 2)
KINDS = (Kind.FORWARD, Kind.BACKWARD)


def estimates(clock_mhz: int) -> dict[Coordinates, EnergyEstimate]:
    return {
        place: estimate(SCHEDULE.orders[place.stage], 1, 3, clock_mhz) for place in SHAPE.all_coordinates()
    }


def scaled(some: EnergyEstimate, time: float, energy: float) -> EnergyEstimate:
    samples = (replace(s, time_s=s.time_s * time, energy_j=s.energy_j * energy) for s in some.samples)
    return replace(some, samples=tuple(samples))


def test_time_is_that_of_the_slowest_tensor_rank_and_energy_their_sum_averaged_over_pipelines() -> None:
    found = estimates(1200)
    found[Coordinates(0, 1, 1)] = scaled(found[Coordinates(0, 1, 1)], time=1.5, energy=3.0)
    profile = merge(1, 1200, found, SHAPE, range(2), 1200)
    measured = profile.measurements[0, Kind.BACKWARD]
    assert measured.time_s == pytest.approx(1.25 * time_s(1, Kind.BACKWARD, 1200))
    assert measured.energy_j == pytest.approx((4 + 2) / 2 * energy_j(1, Kind.BACKWARD, 1200))
    healthy = merge(1, 1200, found, SHAPE, [1], 1200)
    assert healthy.measurements[0, Kind.BACKWARD].time_s == pytest.approx(time_s(1, Kind.BACKWARD, 1200))


def test_blocking_power_is_the_mean_of_the_ranks_that_report_it() -> None:
    found = estimates(1200)
    for place in (Coordinates(0, 0, 0), Coordinates(1, 0, 0)):
        found[place] = replace(found[place], blocking_power_w=None, blocking_power_se_w=0.0)
    assert merge(0, 1200, found, SHAPE, range(2), 1200).blocking_power_w == pytest.approx(
        2 * BLOCKING_POWER_W
    )


@pytest.mark.parametrize(
    ("reported", "powers_w"),
    [
        pytest.param([(0, 100.0, 1.0), (0, 110.0, 3.0)], (101.0,), id="weighted by certainty"),
        pytest.param([(0, 80.0, 0.0), (0, 90.0, 1.0)], (85.0,), id="one without an error"),
        pytest.param([(0, 100.0, 1e-200), (0, 110.0, 1e-6)], (105.0,), id="tiny errors weigh only so much"),
        pytest.param(
            [(0, 100.0, 1.0), (1, 80.0, 1.0), (2, None, 0.0)],
            (100.0, 80.0, 90.0),
            id="a stage that never waits gets the mean of the others",
        ),
    ],
)
def test_blocking_power_is_the_mean_over_the_clocks(
    reported: list[tuple[int, float | None, float]], powers_w: tuple[float, ...]
) -> None:
    profiles = [StageProfile(stage, 1000, {}, power_w, error_w) for stage, power_w, error_w in reported]
    assert blocking_power_w(profiles, len(powers_w)) == pytest.approx(powers_w)


def test_blocking_power_is_known_by_clock_and_a_stage_that_never_waits_gets_the_mean_of_the_others() -> None:
    measured = [
        StageProfile(stage, mhz, {}, power_w, 0.1)
        for stage, *powers_w in ((0, 72.0, 70.0, 84.0), (1, 74.0, None, 80.0), (2, None, None, None))
        for mhz, power_w in zip((700, 900, 1400), powers_w, strict=True)
    ]
    rising, sparse, usual = blocking_powers_w(measured, 3)
    assert rising == pytest.approx({700: 71.0, 900: 71.0, 1400: 84.0}, rel=1e-3), "errors average out"
    assert sparse == pytest.approx({700: 74.0, 1400: 80.0}, rel=1e-3)
    assert usual == pytest.approx({700: 72.5, 900: (71 + 74 + 6 * 2 / 7) / 2, 1400: 82.0}, rel=1e-3)


def test_an_uncertain_blocking_power_is_drawn_to_the_mean_of_all_clocks() -> None:
    measured = [StageProfile(0, 1400, {}, 80.0, 0.1), StageProfile(0, 700, {}, 40.0, 30.0)]
    (by_clock,) = blocking_powers_w(measured, 1)
    assert 75 < by_clock[700] < by_clock[1400]
    assert by_clock[1400] == pytest.approx(80.0, rel=1e-3)


def test_a_problem_has_blocking_powers_by_clock_where_they_differ() -> None:
    found = [
        merge(stage, mhz, estimates(mhz), SHAPE, range(2), mhz) for stage in range(2) for mhz in (1000, 1400)
    ]
    assert build_problem(found, SCHEDULE, ((1400, 1000),) * 2).blocking_powers_w == ()
    found = [
        replace(profile, blocking_power_w=0.1 * profile.clock_mhz) if profile.stage else profile
        for profile in found
    ]
    problem = build_problem(found, SCHEDULE, ((1400, 1000),) * 2)
    at_stock_w, least_w = problem.stock_blocking_power_w[1], problem.blocking_power_w[1]
    assert (at_stock_w, least_w) == pytest.approx((140.0, 100.0), rel=1e-2)
    assert problem.blocking_power_w[0] == problem.stock_blocking_power_w[0]


def test_unreported_power_is_assumed_and_never_0() -> None:
    found = estimates(1200)
    unreported = {place: replace(one, blocking_power_w=None) for place, one in found.items()}
    profiles = [merge(stage, 1200, unreported, SHAPE, range(2), 1200) for stage in range(2)]
    assert [profile.blocking_power_w for profile in profiles] == [None, None]
    assert not is_power_known(profiles)
    min_w = [min(m.energy_j / m.time_s for m in some.measurements.values()) for some in profiles]
    assert blocking_power_w(profiles, 2) == pytest.approx([0.25 * power_w for power_w in min_w])
    known = [profiles[0], merge(1, 1200, found, SHAPE, range(2), 1200)]
    assert is_power_known(known)
    assert blocking_power_w(known, 2) == pytest.approx((2 * BLOCKING_POWER_W,) * 2)


def test_an_estimate_with_impossible_energy_is_not_a_measurement_yet() -> None:
    order = SCHEDULE.orders[0]
    good = estimate(order, 1, 3, 1200)
    needed = {(each.kind, each.chunk) for each in order}
    assert why_not_measured(good, needed, 1200, 3) is None
    assert why_not_measured(None, needed, 1200, 3) is ClockGivenUpReason.NO_ESTIMATE
    more = needed | {(Kind.FIXED, 0)}
    for wanted, clock_mhz, count in ((needed, 1200, 4), (needed, 1300, 3), (more, 1200, 3)):
        incomplete = why_not_measured(good, wanted, clock_mhz, count)
        assert incomplete is ClockGivenUpReason.INCOMPLETE_ESTIMATE
    for energy in (-1.0, 0.0):
        found = scaled(good, time=1.0, energy=energy)
        assert why_not_measured(found, needed, 1200, 3) is ClockGivenUpReason.NO_ENERGY


def at(clock_mhz: int, time_s: float, energy_j: float) -> Measurement:
    return Measurement(clock_mhz, time_s, energy_j)


def test_between_clocks_time_is_linear_in_the_cycle_time() -> None:
    measured = [at(1000, 0.3, 30.0), at(2000, 0.2, 40.0)]
    between = interpolate(measured, 1500)
    # A fixed 0.1 s, and 0.2 s at 1000 MHz that shrinks with the clock.
    assert between.time_s == pytest.approx(0.1 + 0.2 / 1.5)
    assert 30.0 < between.energy_j < 40.0


def test_beyond_noisy_clocks_no_figure_falls_to_zero() -> None:
    measured = [Measurement(1000, 0.3, 0.2), Measurement(1300, 0.1, 1.0)]
    below, above = interpolate(measured, 900), interpolate(measured, 1800)
    assert below.energy_j == 0.2
    assert below.time_s == pytest.approx(0.396, abs=0.001)
    assert above.energy_j > 1.0
    assert above.time_s == 0.1


def test_the_problem_holds_interpolated_clocks_between_the_measured_ones_only() -> None:
    profiles = [
        StageProfile(stage, mhz, {(0, kind): at(mhz, 100 / mhz, 10.0) for kind in KINDS}, 5.0, 0.0)
        for stage in range(2)
        for mhz in (1000, 1400)
    ]
    problem = build_problem(profiles, SCHEDULE, [(1500, 1400, 1200, 1000, 900)] * 2)
    assert {m.clock_mhz for m in problem.profiles[1, 0, Kind.FORWARD]} == {1400, 1200, 1000}


@given(st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3), st.floats(0.0, 0.1))
def test_no_clock_of_a_problem_is_slower_than_a_lower_one_unless_it_surely_is(
    times_s: list[float], error_s: float
) -> None:
    clocks_mhz = (1000, 1200, 1400)
    profiles = [
        StageProfile(stage, mhz, {(0, kind): Measurement(mhz, s, 10.0, error_s) for kind in KINDS}, 5.0, 0.0)
        for stage in range(2)
        for mhz, s in zip(clocks_mhz, times_s, strict=True)
    ]
    problem = build_problem(profiles, SCHEDULE, [clocks_mhz[::-1]] * 2)
    for measured in problem.profiles.values():
        found_s = [m.time_s for m in sorted(measured, key=lambda m: m.clock_mhz)]
        for lower_s, higher_s in pairwise(found_s):
            assert lower_s >= higher_s or (error_s and higher_s - lower_s > 3 * error_s), (
                "unless it surely is"
            )
        assert sum(found_s) == pytest.approx(sum(times_s)), "what contradicts gets its mean"


def test_a_correction_replaces_updated_clocks_and_scales_the_rest() -> None:
    key = (0, Kind.FORWARD)
    profiles = [StageProfile(0, mhz, {key: at(mhz, 100 / mhz, 10.0)}, 5.0, 0.0) for mhz in (1000, 2000)]
    newer = corrected(profiles, {(0, 1500, key): 0.08})
    assert [profile.clock_mhz for profile in newer] == [1000, 1500, 2000]
    times_s = [profile.measurements[key].time_s for profile in newer]
    assert times_s == pytest.approx([0.12, 0.08, 0.06])
    assert newer[0].measurements[key].energy_j == pytest.approx(12.0)
    assert newer[0].blocking_power_w == 5.0


def test_profiles_agree_only_if_they_have_a_clock_in_common_and_all_figures_are_close() -> None:
    key = (0, Kind.FORWARD)

    def profile(mhz: int, time_s: float, energy_j: float) -> list[StageProfile]:
        return [StageProfile(0, mhz, {key: at(mhz, time_s, energy_j)}, 5.0, 0.0)]

    ours = profile(1000, 0.1, 10.0)
    assert agree(ours, profile(1000, 0.101, 10.5), 0.02, 0.1)
    assert not agree(ours, profile(1000, 0.103, 10.0), 0.02, 0.1)
    assert not agree(ours, profile(1000, 0.1, 12.0), 0.02, 0.1)
    assert not agree(ours, profile(1100, 0.1, 10.0), 0.02, 0.1)


# ---------------------------------------------------------------------- what single ranks leave undetermined


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


def test_a_gpu_that_draws_more_keeps_its_own_sum() -> None:
    """It is 10 % above the others, whose ratio of forward and backward it gets."""
    own_w = 1.1 * POWERS_W
    others = [determined(reported(np.eye(3), POWERS_W, seed=seed)) for seed in range(1, 5)]
    lacking = reported(SUM_ONLY + WAITING, own_w)
    ((rank, completed),) = complete(by_rank([lacking, *others]), accepts_sums=False).items()
    assert rank == Coordinates(0, 0, 0), "the others keep their own"
    assert completed.undetermined == ()
    assert completed.iteration_count == lacking.iteration_count
    assert completed.blocking_power_w == pytest.approx(99.0, rel=0.1)
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


ACTIVITY = {"forward": 0.85, "backward": 0.95}
SIMULATED_W = {
    **{key: A100_SXM.power_w(activity, CLOCK_MHZ) for key, activity in ACTIVITY.items()},
    "wait": A100_SXM.blocking_power_w(CLOCK_MHZ),
}
WITH_GAPS = [("forward", 0.005), ("backward", 0.01), ("wait", 0.0015), ("gap", 0.003)]
IN_STEP = [("forward", 0.005), ("wait", 0.005), ("backward", 0.01), ("wait", 0.005)]
"""An iteration takes a quarter of the counter's period."""


def from_counter(
    program: list[tuple[str, float]], duration_noise: float, pipeline: int, seed: int
) -> EnergyEstimate:
    """Return an agent's estimate from a simulated counter, as it arrives over the wire."""
    simulation = simulate(
        program, seed=seed, iterations=100, duration_noise=duration_noise, power_w=SIMULATED_W
    )
    made = agent_estimate(simulation.request(100, CLOCK_MHZ))
    telemetry = Telemetry(Rank("job", pipeline, 0, 0), (), (), made, None)
    arrived = telemetry_from_proto(request(Batch(1, telemetry, 0)).telemetry, "agent").batch.energy
    assert arrived is not None
    return arrived


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("program", "duration_noise", "is_sum_needed"),
    [
        pytest.param(WITH_GAPS, (0.01, 0.02), False, id="short iterations with gaps"),
        pytest.param(IN_STEP, (0.0, 0.03), False, id="one rank is in step with its counter"),
        pytest.param(IN_STEP, (0.0, 0.0), True, id="the whole stage is"),
    ],
)
def test_computations_much_shorter_than_the_counters_windows_have_energies(
    program: list[tuple[str, float]], duration_noise: tuple[float, ...], is_sum_needed: bool, seed: int
) -> None:
    estimates = by_rank(
        [
            from_counter(program, noise, pipeline, 10 * seed + pipeline)
            for pipeline, noise in enumerate(duration_noise)
        ]
    )
    without_sums = {**estimates, **complete(estimates, accepts_sums=False)}
    assert all(bool(each.undetermined) == is_sum_needed for each in without_sums.values())
    true_j = sum(SIMULATED_W[key] * time_s for key, time_s in program if key in ACTIVITY)
    for each in {**estimates, **complete(estimates, accepts_sums=is_sum_needed)}.values():
        assert {(sample.kind, sample.chunk) for sample in each.samples} == NEEDED
        sum_j = sum(sample.energy_j for sample in each.samples)
        assert sum_j == pytest.approx(true_j, rel=0.1 if is_sum_needed else 0.05)
