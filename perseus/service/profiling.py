"""Profiling, the simple way: a descending sweep over the clocks that all of the job's GPUs have.

Every rank holds the same clock; its agent estimates time and energy of each kind of computation by
regression. Once all ranks have a good estimate, they are merged into what the solver plans on: per stage,
the largest time and the sum of the energies over its tensor-parallel ranks, then the mean over the
pipelines. The sweep ends when slower clocks have cost every stage more effective energy three times in a
row, or when no clock is left.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from perseus.service.model import Gpu
from perseus.service.specification import Coordinates, Parallelism
from perseus.service.telemetry import EnergyEstimate, EnergySample
from perseus.solver import Computation, Kind, Measurement, Pipeline, ProfileKey, Schedule

RISES_TO_END = 3
"""Rises of a stage's effective energy in a row that end the sweep: one or two may be noise."""


@dataclass(frozen=True, slots=True)
class ClockProfile:
    """One clock, measured on all ranks and merged. Energies and powers are those of whole stages.

    A stage's blocking power is 0 where no rank of it told what it is (it may hardly ever wait).
    """

    clock_mhz: int
    measurements: Mapping[ProfileKey, Measurement]
    blocking_power_w: tuple[float, ...]
    blocking_power_se_w: tuple[float, ...]


def common_clocks_mhz(gpus: Iterable[Gpu]) -> tuple[int, ...]:
    """Return the clocks that all GPUs have, highest first."""
    sets = [set(gpu.supported_clocks_mhz) for gpu in gpus]
    return tuple(sorted(set.intersection(*sets), reverse=True)) if sets else ()


def is_measured(
    estimate: EnergyEstimate, order: Iterable[Computation], clock_mhz: int, iteration_count: int
) -> bool:
    """Tell whether an estimate covers the order at the clock, over enough iterations.

    Early estimates may be impossible (energy of 0 or less, while few counter windows are in): not yet
    measured.
    """
    good = {
        (sample.kind, sample.chunk)
        for sample in estimate.samples
        if sample.clock_mhz == clock_mhz and sample.energy_j > 0
    }
    needed = {(computation.kind, computation.chunk) for computation in order}
    return estimate.iteration_count >= iteration_count and needed <= good


def merge(
    clock_mhz: int,
    estimates: Mapping[Coordinates, EnergyEstimate],
    parallelism: Parallelism,
    schedule: Schedule,
) -> ClockProfile:
    """Merge the estimates of all ranks at one clock. Each must be measured (`is_measured`)."""
    samples: dict[tuple[Coordinates, Kind, int], EnergySample] = {
        (rank, sample.kind, sample.chunk): sample
        for rank, estimate in estimates.items()
        for sample in estimate.samples
        if sample.clock_mhz == clock_mhz
    }
    pipelines, tensors = range(parallelism.pipeline_count), range(parallelism.tensor_count)
    measurements: dict[ProfileKey, Measurement] = {}
    blocking_power_w: list[float] = []
    blocking_power_se_w: list[float] = []
    for stage, order in enumerate(schedule.orders):
        rows = [[Coordinates(pipeline, stage, tensor) for tensor in tensors] for pipeline in pipelines]
        for kind, chunk in sorted({(computation.kind, computation.chunk) for computation in order}):
            found = [[samples[rank, kind, chunk] for rank in row] for row in rows]
            slowest = [max(row, key=lambda sample: sample.time_s) for row in found]
            time_s, time_se_s = _mean([(sample.time_s, sample.time_se_s) for sample in slowest])
            energy_j, energy_se_j = _mean(
                [_sum([(sample.energy_j, sample.energy_se_j) for sample in row]) for row in found]
            )
            measurements[stage, chunk, kind] = Measurement(
                clock_mhz, time_s, energy_j, time_se_s, energy_se_j
            )
        determined = [
            (estimate.blocking_power_w, estimate.blocking_power_se_w)
            for row in rows
            for rank in row
            if (estimate := estimates[rank]).blocking_power_w > 0
        ]
        power_w, power_se_w = _mean(determined) if determined else (0.0, 0.0)
        blocking_power_w.append(parallelism.tensor_count * power_w)
        blocking_power_se_w.append(parallelism.tensor_count * power_se_w)
    return ClockProfile(clock_mhz, measurements, tuple(blocking_power_w), tuple(blocking_power_se_w))


def blocking_power_w(profiles: Sequence[ClockProfile]) -> tuple[float, ...]:
    """Return each stage's blocking power over all clocks, each clock weighted by the inverse of its variance.

    Where a clock comes without a standard error, all weigh the same. Clocks that do not tell a stage's power
    are left out. A stage that never waits needs no power of its own: it gets the mean of the others, 0 if no
    stage has one.
    """
    powers_w: list[float | None] = []
    for values_w, errors_w in zip(
        zip(*(profile.blocking_power_w for profile in profiles), strict=True),
        zip(*(profile.blocking_power_se_w for profile in profiles), strict=True),
        strict=True,
    ):
        known = [pair for pair in zip(values_w, errors_w, strict=True) if pair[0] > 0]
        weights = [1 / error_w**2 if all(e for _, e in known) else 1.0 for _, error_w in known]
        total_w = math.fsum(w * value_w for w, (value_w, _) in zip(weights, known, strict=True))
        powers_w.append(total_w / math.fsum(weights) if known else None)
    told_w = [power_w for power_w in powers_w if power_w is not None]
    mean_w = math.fsum(told_w) / len(told_w) if told_w else 0.0
    return tuple(mean_w if power_w is None else power_w for power_w in powers_w)


def has_swept_enough(profiles: Sequence[ClockProfile], schedule: Schedule) -> bool:
    """Tell whether every stage's effective energy rose at each of the last clocks. Highest clock first."""
    if len(profiles) <= RISES_TO_END:
        return False
    power_w = blocking_power_w(profiles)
    for stage, order in enumerate(schedule.orders):
        counts = Counter((stage, computation.chunk, computation.kind) for computation in order)
        effective_j = [
            sum(
                count
                * (profile.measurements[key].energy_j - power_w[stage] * profile.measurements[key].time_s)
                for key, count in counts.items()
            )
            for profile in profiles[-RISES_TO_END - 1 :]
        ]
        if not all(faster_j < slower_j for faster_j, slower_j in pairwise(effective_j)):
            return False
    return True


def build_problem(profiles: Sequence[ClockProfile], schedule: Schedule) -> Pipeline:
    """Return what the solver has to solve, from at least one measured clock.

    A FIXED computation takes the mean of its times over the clocks.
    """
    by_key = {
        key: tuple(profile.measurements[key] for profile in profiles) for key in profiles[0].measurements
    }
    fixed_times_s = {
        computation: math.fsum(m.time_s for m in by_key[computation.stage, computation.chunk, Kind.FIXED])
        / len(profiles)
        for computation in schedule.computations
        if computation.kind is Kind.FIXED
    }
    return Pipeline(
        schedule=schedule,
        profiles={key: some for key, some in by_key.items() if key[2] is not Kind.FIXED},
        blocking_power_w=blocking_power_w(profiles),
        fixed_times_s=fixed_times_s,
    )


def _sum(figures: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Add independent (value, standard error) figures up."""
    return math.fsum(value for value, _ in figures), math.sqrt(math.fsum(error**2 for _, error in figures))


def _mean(figures: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Average independent (value, standard error) figures."""
    value, error = _sum(figures)
    return value / len(figures), error / len(figures)
