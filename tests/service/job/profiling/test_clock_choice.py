"""The choice of clocks, on measured curves and on artificial ones, and how long they are held."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from perseus.service.domain.measured import JobIteration, StageProfile
from perseus.service.domain.model import HoldClocks, StockIteration
from perseus.service.domain.records import Counters, JobRecord
from perseus.service.domain.specification import Coordinates, OperatingPolicy, Parallelism
from perseus.service.domain.telemetry import EnergyEstimate, EnergySample
from perseus.service.job.command_buffer import CommandBuffer
from perseus.service.job.profiling.clock_choice import choose_clocks
from perseus.service.job.profiling.profiler import ProfileEnd, Profiler
from perseus.service.job.profiling.sample_allocation import MAX_HOLD_FACTOR, MIN_ITERATIONS, round_error
from perseus.service.job.profiling.stage_profiles import blocking_power_w, build_problem, corrected
from perseus.service.job.rules import Rules
from perseus.solver import (
    Kind,
    Measurement,
    Pipeline,
    Plan,
    ProfileKey,
    Schedule,
    one_forward_one_backward,
    plan_at,
    read_profile_csv,
    replay,
)
from tests.published_data import PUBLISHED_DATA
from tests.service.service_fakes import CLOCKS_MHZ, energy_j, time_s

MICROBATCHES = 8
PIPELINES = 4
HELD_ITERATIONS = 5
VERIFIED_ITERATIONS = 20
NOISE = 0.01  # of a computation's time, and of its energy
ACCURACY = 0.003
MAX_CLOCKS = 12
POWERS_W = {"gpt3-175b-a100-sxm": 83.64, "gpt3-175b-a40": 70.38}

Truth = Mapping[ProfileKey, Mapping[int, Measurement]]


def fastest_plan(pipeline: Pipeline) -> Plan:
    """Return the plan at T_min."""
    fastest = {key: min(some, key=lambda m: m.time_s).clock_mhz for key, some in pipeline.profiles.items()}
    clocks_mhz = {c: fastest[c.stage, c.chunk, c.kind] for c in pipeline.schedule.computations}
    return plan_at(pipeline, replay(pipeline, clocks_mhz).iteration_time_s)


@cache
def reference(name: str) -> tuple[Truth, Pipeline, Plan]:
    """Return the true curves, and the plan from a complete and noiseless profile."""
    path = PUBLISHED_DATA / "profiles" / f"{name}.csv"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    profiles = read_profile_csv(path, gpus_per_stage=8)
    pipeline = Pipeline(one_forward_one_backward(8, MICROBATCHES), profiles, (8 * POWERS_W[name],) * 8)
    truth = {key: {m.clock_mhz: m for m in some} for key, some in profiles.items()}
    return truth, pipeline, fastest_plan(pipeline)


class NoisyCluster:
    """Measures stages at clocks: the mean over many computations, each with its own noise."""

    def __init__(self, truth: Truth, power_w: float, seed: int) -> None:
        self._truth = truth
        self._power_w = power_w
        self._random = np.random.default_rng(seed)

    def sample(self, key: ProfileKey, clock_mhz: int, count: int) -> Measurement:
        true, error = self._truth[key][clock_mhz], NOISE / math.sqrt(count)
        time_s, energy_j = (
            float(value * (1 + error * self._random.normal())) for value in (true.time_s, true.energy_j)
        )
        return Measurement(clock_mhz, time_s, energy_j, error * time_s, error * energy_j)

    def hold(self, stage: int, clock_mhz: int) -> StageProfile:
        count = MICROBATCHES * PIPELINES * HELD_ITERATIONS
        return StageProfile(
            stage,
            clock_mhz,
            {
                (0, kind): self.sample((stage, 0, kind), clock_mhz, count)
                for kind in (Kind.FORWARD, Kind.BACKWARD)
            },
            self._power_w,
            0.01 * self._power_w,
        )

    def run(self, plan: Plan) -> dict[tuple[int, int, tuple[int, Kind]], float]:
        """Return mean times under a plan, as `corrected` takes them."""
        used = Counter((c.stage, c.chunk, c.kind, mhz) for c, mhz in plan.clocks_mhz.items())
        return {
            (stage, mhz, (chunk, kind)): self.sample(
                (stage, chunk, kind), mhz, count * PIPELINES * VERIFIED_ITERATIONS
            ).time_s
            for (stage, chunk, kind, mhz), count in used.items()
        }


def profile(cluster: NoisyCluster, schedule: Schedule, clocks_mhz: list[int]) -> list[StageProfile]:
    """Measure the chosen clocks until they are enough; never more than MOST_CLOCKS at a stage."""
    profiles: list[StageProfile] = []
    for _ in range(MAX_CLOCKS):
        choice = choose_clocks(profiles, schedule, [clocks_mhz] * schedule.stage_count, barred=())
        if choice.uncertainty <= ACCURACY:
            break
        profiles += [cluster.hold(stage, mhz) for stage, mhz in enumerate(choice.clocks_mhz)]
    return profiles


@pytest.mark.parametrize(
    "seed",
    [0, *(pytest.param(seed, marks=pytest.mark.slow("once more, with other noise")) for seed in (1, 2))],
)
@pytest.mark.parametrize("name", POWERS_W)
def test_few_noisy_clocks_lead_to_nearly_the_plan_of_all(name: str, seed: int) -> None:
    truth, pipeline, best = reference(name)
    clocks_mhz = sorted(next(iter(truth.values())), reverse=True)
    cluster = NoisyCluster(truth, 8 * POWERS_W[name], seed)
    profiles = profile(cluster, pipeline.schedule, clocks_mhz)
    maximum = max(Counter(one.stage for one in profiles).values())
    assert maximum <= MAX_CLOCKS
    first = fastest_plan(build_problem(profiles, pipeline.schedule, [clocks_mhz] * 8))
    verified = corrected(profiles, cluster.run(first))
    plan = fastest_plan(build_problem(verified, pipeline.schedule, [clocks_mhz] * 8))
    judged = replay(pipeline, plan.clocks_mhz)
    assert judged.energy_j <= 1.004 * best.energy_j
    assert judged.iteration_time_s <= 1.003 * best.iteration_time_s


@pytest.mark.parametrize("name", POWERS_W)
def test_an_assumed_blocking_power_is_lower_than_the_measured_one(name: str) -> None:
    """The lower it is, the less computations are slowed: so an assumption slows none to no benefit."""
    truth, *_ = reference(name)
    cluster = NoisyCluster(truth, 0.0, seed=0)
    held = [cluster.hold(stage, mhz) for stage in range(8) for mhz in truth[stage, 0, Kind.FORWARD]]
    assumed_w = blocking_power_w([replace(each, blocking_power_w=None) for each in held], 8)
    assert len(assumed_w) == 8
    assert all(0 < power_w < 8 * POWERS_W[name] for power_w in assumed_w)


def chosen(measured_mhz: list[int], barred_mhz: list[int]) -> int:
    """Return the clock that a single stage with ten clocks measures next; 0 for none."""
    schedule = one_forward_one_backward(1, 1)
    profiles = [
        StageProfile(
            0,
            mhz,
            {
                (0, kind): Measurement(mhz, 1000 / mhz, 100 + (mhz / 100) ** 2)
                for kind in (Kind.FORWARD, Kind.BACKWARD)
            },
            60.0,
            1.0,
        )
        for mhz in measured_mhz
    ]
    clocks_mhz = list(range(1000, 0, -100))
    barred = {(0, mhz) for mhz in barred_mhz}
    (clock_mhz,) = choose_clocks(profiles, schedule, [clocks_mhz], barred).clocks_mhz
    return clock_mhz


def test_a_clock_that_cannot_be_measured_ends_the_descent() -> None:
    assert chosen([], []) == 1000
    assert chosen([], [1000]) == 900, "is it the clock or the rank?"
    assert chosen([], [1000, 900]) == 0
    assert chosen([900], [1000]) == 500
    assert chosen([1000], [500]) == 600, "only above"
    assert chosen([1000], [500, 600]) == 1000, "nothing new"
    assert chosen([1000, 500], [400]) > 500
    assert chosen([1000, 500], [700]) not in (700, 1000)


# ---------------------------------------------------------------------- the iterations of each clock


ITERATIONS = 4
MICROBATCH_COUNT = 6
SHAPE = Parallelism(1, 1, 1)
SCHEDULE = one_forward_one_backward(1, MICROBATCH_COUNT)
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
        shape = (len(KINDS), iteration_count * MICROBATCH_COUNT)
        drawn = 1 + self._noise[clock_mhz] * self._random.normal(size=shape)
        return [
            self._estimate(clock_mhz, drawn[:, : (n + 1) * MICROBATCH_COUNT]) for n in range(iteration_count)
        ]

    def _estimate(self, clock_mhz: int, drawn: NDArray[np.float64]) -> EnergyEstimate:
        count = drawn.shape[1]
        samples = []
        for kind, own in zip(KINDS, drawn, strict=True):
            true_s, true_j = time_s(0, kind, clock_mhz), energy_j(0, kind, clock_mhz)
            error_j = true_j * float(own.std(ddof=1)) / math.sqrt(count)
            found_j = true_j * float(own.mean())
            samples.append(EnergySample(kind, 0, clock_mhz, count, true_s, 1e-9, found_j, error_j))
        return EnergyEstimate(1, count // MICROBATCH_COUNT, tuple(samples), 60.0, 0.1)

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
