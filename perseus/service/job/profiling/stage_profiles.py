"""From the agents' estimates to stage profiles, and from those to the solver's problem.

All ranks of a stage hold one clock; their agents estimate time and energy of each kind of computation by
regression. Once all estimates are good, they are merged: the largest time and the sum of the energies over
the tensor-parallel ranks, then the mean over the pipelines.

A plan may use clocks that were never measured: between two measured clocks, time and energy are interpolated
linearly in the cycle time (1 / clock). Plans then verify interpolated clocks once, in force
(`planning.drift`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from statistics import fmean

from perseus.service.domain.measured import StageKey, StageProfile
from perseus.service.domain.profiling import ClockGivenUpReason
from perseus.service.domain.specification import Coordinates, Parallelism
from perseus.service.domain.telemetry import EnergyEstimate, EnergySample
from perseus.service.job.ranks.usable_clocks import UsableClocks, stages_at_stock
from perseus.solver import (
    BlockingPower,
    Kind,
    Measurement,
    Pipeline,
    ProfileKey,
    Schedule,
    interpolate_clocks,
    shrink_profiles,
)

ASSUMED_BLOCKING_SHARE = 0.25
"""Unmeasured blocking power is assumed to be this share of the least power of the computations.

The published A100 and A40 draw 0.36 and 0.40 of it.
"""

_MIN_J = 1e-9
"""Smallest energy of a valid sample."""

_CLOCKS_DIFFER = 0.1
"""Blocking powers at different clocks differ by about this share."""

_MIN_SE_W = 1e-6
"""Smallest standard error of a power, so that none outweighs all others for good."""

_MIN_SHARE = 1e-6
"""Smallest standard error of a time, as a share of it, likewise."""

_SURE = 3.0
"""Standard errors by which a lower clock has to be faster to be taken for faster."""


def why_not_measured(
    estimate: EnergyEstimate | None,
    needed: Set[tuple[Kind, int]],
    clock_mhz: int,
    iteration_count: int,
) -> ClockGivenUpReason | None:
    """Return why an estimate does not cover the needed computations at the clock; None if it does.

    `needed` has kinds and chunks; `iteration_count` is the number of iterations that it has to cover.

    Early estimates may be impossible (an energy of 0 or less, while few counter windows are in) and count as
    not yet measured.
    """
    if estimate is None:
        return ClockGivenUpReason.NO_ESTIMATE
    energies_j = {(s.kind, s.chunk): s.energy_j for s in estimate.samples if s.clock_mhz == clock_mhz}
    if estimate.iteration_count < iteration_count or not needed <= energies_j.keys():
        return ClockGivenUpReason.INCOMPLETE_ESTIMATE
    if any(energies_j[key] < _MIN_J for key in needed):
        return ClockGivenUpReason.NO_ENERGY
    return None


def merge(
    stage: int,
    clock_mhz: int,
    estimates: Mapping[Coordinates, EnergyEstimate],
    parallelism: Parallelism,
    pipelines: Sequence[int],
    held_mhz: int,
) -> StageProfile:
    """Merge the estimates of a stage's ranks in these pipelines, which held a clock or stock.

    Each rank must be measured (`why_not_measured`). The result counts as measured at `clock_mhz`.
    """
    rows = [
        [estimates[Coordinates(pipeline, stage, tensor)] for tensor in range(parallelism.tensor_count)]
        for pipeline in pipelines
    ]
    samples = [[_samples_at(estimate, held_mhz) for estimate in row] for row in rows]
    measurements: dict[StageKey, Measurement] = {}
    for key in samples[0][0]:
        found = [[by_key[key] for by_key in row] for row in samples]
        slowest = [max(row, key=lambda sample: sample.time_s) for row in found]
        time_s, time_se_s = _mean([(sample.time_s, sample.time_se_s) for sample in slowest])
        energy_j, energy_se_j = _mean(
            [_sum([(sample.energy_j, sample.energy_se_j) for sample in row]) for row in found]
        )
        measurements[key] = Measurement(
            clock_mhz=clock_mhz,
            time_s=time_s,
            energy_j=energy_j,
            time_se_s=time_se_s,
            energy_se_j=energy_se_j,
        )
    reported = [
        (estimate.blocking_power_w, estimate.blocking_power_se_w)
        for row in rows
        for estimate in row
        if estimate.blocking_power_w is not None
    ]
    if not reported:
        return StageProfile(
            stage=stage,
            clock_mhz=clock_mhz,
            measurements=measurements,
            blocking_power_w=None,
            blocking_power_se_w=0.0,
        )
    power_w, power_se_w = _mean(reported)
    count = parallelism.tensor_count
    return StageProfile(
        stage=stage,
        clock_mhz=clock_mhz,
        measurements=measurements,
        blocking_power_w=count * power_w,
        blocking_power_se_w=count * power_se_w,
    )


def is_power_known(profiles: Iterable[StageProfile]) -> bool:
    """Tell whether the blocking power of any stage was measured at any clock."""
    return any(profile.blocking_power_w is not None for profile in profiles)


def blocking_power_w(profiles: Sequence[StageProfile], stage_count: int) -> tuple[float, ...]:
    """Return each stage's blocking power over all clocks, each clock weighted by the inverse of its variance.

    If a clock has no standard error, all clocks weigh the same. Clocks without a measured power are left out.
    A stage that never waits needs no power of its own: it gets the mean of the others.

    If no stage has a measured power (a pipeline of one stage hardly ever waits), it is assumed: for each
    stage, ASSUMED_BLOCKING_SHARE of the least power that any of its computations drew at any clock. Zero
    would be the worst assumption: T_slow falls by up to a third with it. But the assumption errs on the low
    side, because of its use. A computation is slowed only as long as its effective energy falls, which is
    energy minus this power × time: the lower the power, the sooner that ends. So an assumption alone never
    slows a computation to no benefit, and each slowed computation saves at least the predicted energy. An
    assumption that is too low understates the cost of *longer iterations*: T* comes out too late. Therefore
    no pipeline's own target goes beyond stock on an assumption (`planning.planner`); a pipeline that waits
    for a straggler anyway moves up to T_slow, which comes out too early. A limit on average power is compared
    with the assumed power.
    """
    reported_w: dict[int, float] = {}
    for stage in range(stage_count):
        known = [
            (p.blocking_power_w, p.blocking_power_se_w)
            for p in profiles
            if p.stage == stage and p.blocking_power_w is not None
        ]
        if known:
            has_errors = all(se_w for _, se_w in known)
            weights = [1 / max(se_w, _MIN_SE_W) ** 2 if has_errors else 1.0 for _, se_w in known]
            total_w = math.fsum(w * power_w for w, (power_w, _) in zip(weights, known, strict=True))
            reported_w[stage] = total_w / math.fsum(weights)
    if not reported_w:
        return tuple(_assumed_power_w(profiles, stage) for stage in range(stage_count))
    mean_w = math.fsum(reported_w.values()) / len(reported_w)
    return tuple(reported_w.get(stage, mean_w) for stage in range(stage_count))


def _assumed_power_w(profiles: Iterable[StageProfile], stage: int) -> float:
    powers_w = (m.energy_j / m.time_s for p in profiles if p.stage == stage for m in p.measurements.values())
    return ASSUMED_BLOCKING_SHARE * min(powers_w, default=0.0)


def blocking_powers_w(profiles: Sequence[StageProfile], stage_count: int) -> tuple[dict[int, float], ...]:
    """Return each stage's blocking power by clock; that of `blocking_power_w` at a single clock if assumed.

    Uncertain powers are drawn towards the stage's mean. A waiting GPU draws no less at a higher clock:
    neighbouring clocks whose powers contradict that, by their errors, get their mean.
    """
    means_w = blocking_power_w(profiles, stage_count)
    found: dict[int, dict[int, float]] = {}
    for profile in sorted(profiles, key=lambda p: p.clock_mhz):
        if profile.blocking_power_w is not None:
            mean_w = means_w[profile.stage]
            trust = 1 / (1 + (profile.blocking_power_se_w / (_CLOCKS_DIFFER * mean_w)) ** 2)
            power_w = mean_w + trust * (profile.blocking_power_w - mean_w)
            found.setdefault(profile.stage, {})[profile.clock_mhz] = power_w
    rising = {
        stage: dict(zip(by_clock, _rising([*by_clock.values()], [1.0] * len(by_clock)), strict=True))
        for stage, by_clock in found.items()
    }
    clocks_mhz = sorted({mhz for by_clock in rising.values() for mhz in by_clock})
    powers = [BlockingPower(by_clock) for by_clock in rising.values()]
    usual = {mhz: fmean(power.at_w(mhz) for power in powers) for mhz in clocks_mhz}
    return tuple(rising.get(stage, usual) or {1: means_w[stage]} for stage in range(stage_count))


def _rising(values: Sequence[float], weights: Sequence[float], sure: float = math.inf) -> list[float]:
    """Return values that never fall, and differ from these as little as possible, in weighted squares.

    Weights are inverse variances if a fall by more than `sure` standard errors is to stay.
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight, and how many values
    for value, weight in zip(values, weights, strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1:
            (one, first, count), (other, second, more) = pools[-2:]
            if not 0 < one - other <= sure * math.sqrt(1 / first + 1 / second):
                break
            mean = (first * one + second * other) / (first + second)
            pools[-2:] = [(mean, first + second, count + more)]
    return [mean for mean, _, count in pools for _ in range(count)]


def _with_falling_times(measured: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """Return measurements, by rising clock: no clock is slower than a lower one, unless it surely is.

    What looks like it is noise, or other work, and gets the common mean of the times that contradict each
    other. But there are such GPUs: on an A40 the backward passes of GPT-3 take 6 % longer at 1005 MHz than at
    960 (the profile published with Perseus' paper).
    """
    has_errors = all(m.time_se_s for m in measured)
    weights = [1 / max(m.time_se_s, _MIN_SHARE * m.time_s) ** 2 if has_errors else 1.0 for m in measured]
    times_s = _rising([-m.time_s for m in measured], weights, _SURE if has_errors else math.inf)
    return tuple(replace(m, time_s=-time_s) for m, time_s in zip(measured, times_s, strict=True))


def interpolate(measured: Sequence[Measurement], clock_mhz: int) -> Measurement:
    """Return a measurement at a clock between (or a little beyond) at least two measured ones.

    `measured` is sorted by clock. Linear in 1 / clock; standard errors are those of the two neighbouring
    clocks. Beyond them the line of noisy figures may fall to zero: then the nearest clock's figure counts.
    """
    right = next(
        (i for i in range(1, len(measured)) if measured[i].clock_mhz >= clock_mhz), len(measured) - 1
    )
    low, high = measured[right - 1], measured[right]
    share = (1 / clock_mhz - 1 / high.clock_mhz) / (1 / low.clock_mhz - 1 / high.clock_mhz)

    def between(name: str) -> float:
        at_high: float = getattr(high, name)
        at_low: float = getattr(low, name)
        value = at_high + share * (at_low - at_high)
        return value if value > 0 else min(at_high, at_low)

    return Measurement(
        clock_mhz=clock_mhz,
        time_s=between("time_s"),
        energy_j=between("energy_j"),
        time_se_s=max(low.time_se_s, high.time_se_s),
        energy_se_j=max(low.energy_se_j, high.energy_se_j),
    )


def curves(profiles: Iterable[StageProfile], stage: int) -> dict[StageKey, list[Measurement]]:
    """Return the measurements of each kind of computation of a stage, by rising clock."""
    found: dict[StageKey, list[Measurement]] = {}
    for profile in profiles:
        if profile.stage == stage:
            for key, measurement in profile.measurements.items():
                found.setdefault(key, []).append(measurement)
    return {key: sorted(some, key=lambda m: m.clock_mhz) for key, some in found.items()}


def build_problem(profiles: Sequence[StageProfile], schedule: Schedule, clocks_mhz: UsableClocks) -> Pipeline:
    """Return the solver's problem, from at least two measured clocks of each stage.

    Measurements are shrunk to their expected values given their errors, and no clock is slower than a lower
    one unless it surely is. Of a stage's `clocks_mhz`, plans use those that were measured or, interpolated,
    lie in between; of a stage that stays at stock, the highest measured one. A FIXED computation takes the
    mean of its times over the clocks.
    """
    by_key: dict[ProfileKey, tuple[Measurement, ...]] = {}
    fixed_s: dict[ProfileKey, float] = {}
    at_stock = stages_at_stock(clocks_mhz)
    shrunk = shrink_profiles(
        {
            (stage, *key): tuple(found)
            for stage in range(schedule.stage_count)
            for key, found in curves(profiles, stage).items()
        }
    )
    for (stage, chunk, kind), measured in shrunk.items():
        if kind is Kind.FIXED:
            fixed_s[stage, chunk, kind] = math.fsum(m.time_s for m in measured) / len(measured)
        elif stage in at_stock:
            by_key[stage, chunk, kind] = (measured[-1],)
        else:
            measured = _with_falling_times(measured)
            lowest_mhz, highest_mhz = measured[0].clock_mhz, measured[-1].clock_mhz
            between_mhz = [mhz for mhz in clocks_mhz[stage] if lowest_mhz < mhz < highest_mhz]
            by_key[stage, chunk, kind] = tuple(
                m for m in interpolate_clocks(measured, between_mhz) if m.clock_mhz in clocks_mhz[stage]
            )
    powers_w = blocking_powers_w(profiles, schedule.stage_count)
    differ = any(len({*by_clock.values()}) > 1 for by_clock in powers_w)
    return Pipeline(
        schedule=schedule,
        profiles=by_key,
        blocking_power_w=tuple(min(by_clock.values()) for by_clock in powers_w),
        blocking_powers_w=powers_w if differ else (),
        fixed_times_s={
            c: fixed_s[c.stage, c.chunk, c.kind] for c in schedule.computations if c.kind is Kind.FIXED
        },
    )


def agree(
    measured: Iterable[StageProfile], others: Iterable[StageProfile], time_share: float, energy_share: float
) -> bool:
    """Tell whether two sets of profiles have common clocks and agree at all of them, within the shares."""
    by_place = {(profile.stage, profile.clock_mhz): profile for profile in others}
    shared = [
        (one, by_place[one.stage, one.clock_mhz])
        for one in measured
        if (one.stage, one.clock_mhz) in by_place
    ]
    return bool(shared) and all(
        (other := theirs.measurements.get(key)) is not None
        and abs(other.time_s - m.time_s) <= time_share * m.time_s
        and abs(other.energy_j - m.energy_j) <= energy_share * m.energy_j
        for ours, theirs in shared
        for key, m in ours.measurements.items()
    )


def corrected(
    profiles: Iterable[StageProfile], times_s: Mapping[tuple[int, int, StageKey], float]
) -> tuple[StageProfile, ...]:
    """Return the profiles with newer times, by (stage, clock, key); the power is kept.

    Other clocks of the same computation change by the mean ratio of the updated ones. An interpolated clock
    with a new time counts as measured from now on.
    """
    found: dict[tuple[int, int], StageProfile] = {}
    profiles = tuple(profiles)
    for stage in {profile.stage for profile in profiles}:
        own = [profile for profile in profiles if profile.stage == stage]
        for key, measured in curves(own, stage).items():
            newer_s = {mhz: time_s for (at, mhz, of), time_s in times_s.items() if (at, of) == (stage, key)}
            ratios = [time_s / interpolate(measured, mhz).time_s for mhz, time_s in newer_s.items()]
            ratio = math.fsum(ratios) / len(ratios) if ratios else 1.0
            for m in [
                *measured,
                *(interpolate(measured, mhz) for mhz in newer_s.keys() - {m.clock_mhz for m in measured}),
            ]:
                own_ratio = newer_s[m.clock_mhz] / m.time_s if m.clock_mhz in newer_s else ratio
                newer = replace(m, time_s=own_ratio * m.time_s, energy_j=own_ratio * m.energy_j)
                entry = found.setdefault(
                    (stage, m.clock_mhz),
                    StageProfile(
                        stage=stage,
                        clock_mhz=m.clock_mhz,
                        measurements={},
                        blocking_power_w=None,
                        blocking_power_se_w=0.0,
                    ),
                )
                found[stage, m.clock_mhz] = replace(entry, measurements={**entry.measurements, key: newer})
        for profile in own:
            place = stage, profile.clock_mhz
            found[place] = replace(profile, measurements=found[place].measurements)
    return tuple(found[place] for place in sorted(found))


def _samples_at(estimate: EnergyEstimate, clock_mhz: int) -> dict[StageKey, EnergySample]:
    return {(s.chunk, s.kind): s for s in estimate.samples if s.clock_mhz == clock_mhz}


def _sum(figures: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Sum independent (value, standard error) pairs."""
    return math.fsum(value for value, _ in figures), math.sqrt(math.fsum(error**2 for _, error in figures))


def _mean(figures: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Average independent (value, standard error) pairs."""
    value, error = _sum(figures)
    return value / len(figures), error / len(figures)
