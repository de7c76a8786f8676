"""The choice of clocks, on curves measured on real GPUs and on artificial ones."""

import math
from collections import Counter
from collections.abc import Mapping
from functools import cache

import numpy as np
import pytest

from perseus.service.domain.measured import StageProfile
from perseus.service.job.profiling.clock_choice import choose_clocks
from perseus.service.job.profiling.stage_profiles import build_problem, corrected
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
    shares = []
    for made in (first, plan):
        judged = replay(pipeline, made.clocks_mhz)
        shares.append(
            (judged.energy_j / best.energy_j - 1, judged.iteration_time_s / best.iteration_time_s - 1)
        )
    print(
        f"{name}, seed {seed}: {maximum} clocks of {len(clocks_mhz)};",
        *(f"energy {100 * e:+.2f} %, time {100 * t:+.2f} %" for e, t in shares),
        sep="  ",
    )
    more_energy, more_time = shares[-1]
    assert more_energy <= 0.004
    assert more_time <= 0.003


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
