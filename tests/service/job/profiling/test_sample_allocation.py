"""The allocation of iterations to clocks, on artificial noise that a profiler has to discover."""

import math
from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from perseus.service.domain.measured import JobIteration, StageProfile
from perseus.service.domain.model import HoldClocks, StockIteration
from perseus.service.domain.records import Counters, JobRecord
from perseus.service.domain.specification import Coordinates, OperatingPolicy, Parallelism
from perseus.service.domain.telemetry import EnergyEstimate, EnergySample
from perseus.service.job.command_buffer import CommandBuffer
from perseus.service.job.profiling.profiler import ProfileEnd, Profiler
from perseus.service.job.profiling.sample_allocation import MAX_HOLD_FACTOR, MIN_ITERATIONS, round_error
from perseus.service.job.rules import Rules
from perseus.solver import Kind, Measurement, one_forward_one_backward
from tests.service.service_fakes import CLOCKS_MHZ, energy_j, time_s

ITERATIONS = 4
MICROBATCHES = 6
SHAPE = Parallelism(1, 1, 1)
SCHEDULE = one_forward_one_backward(1, MICROBATCHES)
RULES = Rules(profile_iterations=ITERATIONS, profile_accuracy_percent=1e-7)
KINDS = Kind.FORWARD, Kind.BACKWARD


class NoisyJob:
    """A job of one stage whose energies have their own relative noise at each clock."""

    def __init__(self, noise: Mapping[int, float], seed: int, rules: Rules = RULES) -> None:
        self.record = JobRecord(OperatingPolicy())
        self.profiler = Profiler(self.record, Counters(), SHAPE, SCHEDULE, rules, CommandBuffer())
        self._noise = noise
        self._random = np.random.default_rng(seed)
        self.iteration_counts: dict[int, int] = {}
        self.reported_unmeasured: set[Coordinates] = set()

    def hold(self, clock_mhz: int, iteration_count: int) -> list[EnergyEstimate]:
        """Yield the rank's estimate for a clock after each of so many iterations."""
        shape = (len(KINDS), iteration_count * MICROBATCHES)
        drawn = 1 + self._noise[clock_mhz] * self._random.normal(size=shape)
        return [self._estimate(clock_mhz, drawn[:, : (n + 1) * MICROBATCHES]) for n in range(iteration_count)]

    def _estimate(self, clock_mhz: int, drawn: NDArray[np.float64]) -> EnergyEstimate:
        count = drawn.shape[1]
        samples = []
        for kind, own in zip(KINDS, drawn, strict=True):
            true_s, true_j = time_s(0, kind, clock_mhz), energy_j(0, kind, clock_mhz)
            error_j = true_j * float(own.std(ddof=1)) / math.sqrt(count)
            found_j = true_j * float(own.mean())
            samples.append(EnergySample(kind, 0, clock_mhz, count, true_s, 1e-9, found_j, error_j))
        return EnergyEstimate(1, count // MICROBATCHES, tuple(samples), 60.0, 0.1)

    def profile(self) -> None:
        """Run until profiling ends."""
        held = self.profiler.next_round(None, [CLOCKS_MHZ])
        number = 0
        while isinstance(held, HoldClocks):
            (clock_mhz,) = held.clocks_mhz
            estimates = iter(self.hold(clock_mhz, 10 * ITERATIONS))
            following: HoldClocks | ProfileEnd = held
            while following is held:
                number += 1
                self.iteration_counts[clock_mhz] = self.iteration_counts.get(clock_mhz, 0) + 1
                iteration = JobIteration(number, (1,), True, 0.8, (1.0,))
                self.profiler.take_iteration(iteration, True, (), StockIteration(0.8, 1.0))
                self.profiler.take_estimate(Coordinates(0, 0, 0), next(estimates))
                following = self.profiler.next_round(held, [CLOCKS_MHZ])
                if following is held and self.iteration_counts[clock_mhz] >= MIN_ITERATIONS:
                    self.reported_unmeasured.update(self.profiler.unmeasured_ranks(held, [CLOCKS_MHZ]))
            held = following

    def error(self, clocks_mhz: list[int], counts: Mapping[int, float]) -> float:
        """Return the root of the clocks' summed squared errors, in joules, if held for so many iterations."""
        errors_j = [
            energy_j(0, kind, mhz) * self._noise[mhz] / math.sqrt(counts[mhz])
            for kind in KINDS
            for mhz in clocks_mhz
        ]
        return math.hypot(*errors_j)


@pytest.mark.parametrize("seed", range(5))
def test_with_noisier_clocks_errors_are_smaller_for_the_same_iterations(seed: int) -> None:
    noise = {mhz: 0.05 if n % 3 == 1 else 0.01 for n, mhz in enumerate(CLOCKS_MHZ)}
    job = NoisyJob(noise, seed)
    job.profile()
    clocks_mhz = list(job.iteration_counts)
    assert len(clocks_mhz) >= 4
    even = sum(job.iteration_counts.values()) / len(clocks_mhz)
    spread = job.error(clocks_mhz, job.iteration_counts)
    assert spread < 0.9 * job.error(clocks_mhz, dict.fromkeys(clocks_mhz, even))


@pytest.mark.parametrize("seed", range(5))
def test_equally_noisy_clocks_get_the_configured_iterations(seed: int) -> None:
    job = NoisyJob(dict.fromkeys(CLOCKS_MHZ, 0.02), seed)
    job.profile()
    counts = job.iteration_counts.values()
    assert sum(counts) / len(counts) == pytest.approx(ITERATIONS, abs=1)
    assert max(counts) <= 2 * ITERATIONS


def test_an_accurate_clock_is_left_as_soon_as_its_errors_can_be_believed() -> None:
    job = NoisyJob(dict.fromkeys(CLOCKS_MHZ, 1e-4), 0, Rules(profile_iterations=ITERATIONS))
    job.profile()
    assert set(job.iteration_counts.values()) == {2}


def test_noise_neither_holds_a_clock_for_ever_nor_gives_it_up() -> None:
    noise = {mhz: 0.001 if mhz == CLOCKS_MHZ[0] else 0.5 for mhz in CLOCKS_MHZ}
    job = NoisyJob(noise, 0)
    job.profile()
    assert max(job.iteration_counts.values()) == MAX_HOLD_FACTOR * ITERATIONS
    assert job.record.given_up_clocks == ()
    assert job.reported_unmeasured == set(), "a higher accuracy is measured all the same"


def test_noise_does_not_exceed_the_budget() -> None:
    noise = {mhz: 0.001 if mhz == CLOCKS_MHZ[0] else 0.05 for mhz in CLOCKS_MHZ}
    job = NoisyJob(
        noise,
        0,
        Rules(
            profile_iterations=ITERATIONS,
            profile_accuracy_percent=1e-7,
            profile_budget_iterations=3 * ITERATIONS,
        ),
    )
    job.profile()
    assert sum(job.iteration_counts.values()) == 3 * ITERATIONS
    assert job.profiler.clock_count == 2, "a round cut short by the budget counts"


def _profile(clock_mhz: int, figures: tuple[float, float], error: float) -> StageProfile:
    time_s, energy_j = figures
    one = Measurement(clock_mhz, time_s, energy_j, 1e-9, error)
    return StageProfile(0, clock_mhz, {(0, kind): one for kind in KINDS}, 10.0, 0.0)


def test_noise_of_a_surely_useless_clock_does_not_count() -> None:
    schedule = one_forward_one_backward(1, 1)
    measured = [_profile(1400, (1.0, 200.0), 1.0), _profile(1000, (1.4, 150.0), 1.0)]
    near, dear = _profile(1200, (1.2, 178.0), 3.0), _profile(1200, (1.2, 250.0), 3.0)
    both = math.sqrt(2) * 3.0
    assert round_error([near], measured, schedule).error_j == pytest.approx(both)
    assert round_error([near], measured, schedule).energy_j == pytest.approx(356.0)
    assert round_error([dear], measured, schedule).error_j == 0.0
    assert round_error([dear], measured[:1], schedule).error_j == 0.0, "both slower and costlier than another"
    assert round_error([dear], [], schedule).error_j == pytest.approx(both), "nothing to compare it with"


def test_an_unreported_error_does_not_count_as_zero() -> None:
    schedule = one_forward_one_backward(1, 1)
    assert round_error([_profile(1200, (1.2, 178.0), 0.0)], [], schedule).error_j is None
