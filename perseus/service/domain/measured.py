"""A job's measurements as values: profiles of stages, iterations, the report's periods, a timeline."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from perseus.service.domain.model import JobState
from perseus.service.domain.moments import standard_error
from perseus.service.domain.pairs import NO_PAIRS, Pair, PairSums
from perseus.service.domain.student_t import interval_factor
from perseus.service.domain.telemetry import ComputationColumns
from perseus.solver import Kind, Measurement

StageKey = tuple[int, Kind]
"""(chunk, kind): computations of a stage that share it share their measurements."""


@dataclass(frozen=True, slots=True)
class StageProfile:
    """One stage at one clock, measured on all its ranks and merged. Energies and powers are the stage's.

    The blocking power is None if no rank reported it (a stage may hardly ever wait).
    """

    stage: int
    clock_mhz: int
    measurements: Mapping[StageKey, Measurement]
    blocking_power_w: float | None
    blocking_power_se_w: float


@dataclass(frozen=True, slots=True)
class KnownProfile:
    """A run's profiles of a stage's work at all its clocks; `stage` is the stage that asked for them."""

    stage: int
    profiles: tuple[StageProfile, ...]
    source_job_id: str
    source_run_number: int


@dataclass(frozen=True, slots=True)
class JobIteration:
    """One iteration of the whole job.

    Attributes:
        versions: of each pipeline's plan; None if the stages of some pipeline ran different plans.
        skipped_count: iterations since the previous one that some rank never reported.
        gap_time_s: the gap since the previous iteration, of the rank with the longest.
        gap_energy_j: of all GPUs in that gap.
        gap_slowed_time_s: the most time that clocks can have added to that gap, of any rank.
        is_at_stock: all its ranks were certainly at stock.
        state: the job state in which the newest of its clocks were offered.
        unmeasured_rank_count: ranks whose energy is unknown and missing from all figures here.
        has_clock_change: clocks changed during the iteration of some rank, so that its figures mean nothing.
        relative_work: the most that a rank states, or that follows from counted work; 1 if there is neither.
        work: the most that a hook counted, relative to its stage's typical; 0 if none did.
    """

    iteration: int
    versions: tuple[int, ...] | None
    is_regular: bool
    iteration_time_s: float
    pipeline_energy_j: tuple[float, ...]
    skipped_count: int = 0
    gap_time_s: float = 0.0
    gap_energy_j: float = 0.0
    gap_slowed_time_s: float = 0.0
    is_at_stock: bool = False
    state: JobState = JobState.STOCK
    has_straggler: bool = False
    unmeasured_rank_count: int = 0
    has_clock_change: bool = False
    relative_work: float = 1.0
    work: float = 0.0


MIN_PAIRS = 3
"""Blocks at stock from which on a comparison says more than one with earlier stock."""

MAX_PERIODS = 64
"""Of a run, kept in memory: the latest. The database has all of them."""


@dataclass(frozen=True, slots=True)
class Period:
    """Consecutive iterations under the same plans: counts, means and sums of squared deviations.

    Its first and last iteration were reported at its start and end time, on the wall clock. Iteration time
    and energy exclude the gaps before iterations, and irregular iterations, which have their own count and
    mean time.
    """

    number: int
    state: JobState
    has_straggler: bool
    versions: tuple[int, ...]
    first_iteration: int
    last_iteration: int
    start_time_s: float
    end_time_s: float
    iteration_count: int
    iteration_time_s: float
    iteration_time_m2: float
    energy_j: float
    energy_m2: float
    pipeline_energy_j: tuple[float, ...]
    gap_time_s: float = 0.0
    gap_energy_j: float = 0.0
    gap_slowed_time_s: float = 0.0
    irregular_count: int = 0
    irregular_time_s: float = 0.0
    latency_cost_percent: float = 0.0
    """Predicted energy that the GPUs' set latency adds under these plans."""
    is_wrong: bool = False
    """A stock baseline that was disturbed: nothing is compared with it."""
    time_pairs: PairSums = NO_PAIRS
    """Iterations under these plans beside blocks at stock; their energies in `energy_pairs`."""
    energy_pairs: PairSums = NO_PAIRS

    @property
    def is_baseline(self) -> bool:
        """Whether it is a stock baseline."""
        return self.state is JobState.BASELINE

    @property
    def iteration_time_se_s(self) -> float:
        """Standard error of the mean iteration time; 0 for a single iteration."""
        return standard_error(self.iteration_time_m2, self.iteration_count)

    @property
    def energy_se_j(self) -> float:
        """Standard error of the mean energy; 0 for a single iteration."""
        return standard_error(self.energy_m2, self.iteration_count)

    @property
    def iteration_time_margin_s(self) -> float | None:
        """Half the 95 % interval of the mean iteration time; None for a single iteration."""
        return self._margin(self.iteration_time_se_s)

    @property
    def energy_margin_j(self) -> float | None:
        """Half the 95 % interval of the mean energy; None for a single iteration."""
        return self._margin(self.energy_se_j)

    def _margin(self, se: float) -> float | None:
        return interval_factor(self.iteration_count - 1) * se if self.iteration_count > 1 else None

    def compared_with(self, pair: Pair) -> "Period":
        """Return the period with one more block at stock beside it."""
        energy_pairs = self.energy_pairs
        if pair.stock_energy_j:
            energy_pairs = energy_pairs.with_pair(pair.planned_energy_j, pair.stock_energy_j)
        time_pairs = self.time_pairs.with_pair(pair.planned_time_s, pair.stock_time_s)
        return replace(self, time_pairs=time_pairs, energy_pairs=energy_pairs)

    @property
    def stock(self) -> "Period | None":
        """What was at stock in this period: itself, or the blocks beside it, each as one value; or None."""
        if self.is_baseline:
            return self
        time, energy = self.time_pairs, self.energy_pairs
        if time.count < MIN_PAIRS:
            return None
        has_energy = energy.count >= MIN_PAIRS  # a rank's may be unknown now and then
        return replace(
            self,
            state=JobState.BASELINE,
            iteration_count=energy.count if has_energy else time.count,
            iteration_time_s=time.stock / time.count,
            iteration_time_m2=max(0.0, time.stock_square - time.stock**2 / time.count),
            energy_j=energy.stock / energy.count if has_energy else 0.0,
            energy_m2=max(0.0, energy.stock_square - energy.stock**2 / max(1, energy.count)),
        )

    def with_irregular(self, time_s: float, iteration: int) -> "Period":
        """Return the period with one more irregular iteration."""
        count = self.irregular_count + 1
        return replace(
            self,
            last_iteration=max(self.last_iteration, iteration),
            irregular_count=count,
            irregular_time_s=self.irregular_time_s + (time_s - self.irregular_time_s) / count,
        )

    def extended(self, iteration: JobIteration, wall_time_s: float) -> "Period":
        """Return the period with one more iteration (Welford's update), reported at this time."""
        count = self.iteration_count + 1
        energy_j = sum(iteration.pipeline_energy_j)
        time_step_s = iteration.iteration_time_s - self.iteration_time_s
        energy_step_j = energy_j - self.energy_j
        time_s = self.iteration_time_s + time_step_s / count
        mean_energy_j = self.energy_j + energy_step_j / count
        return replace(
            self,
            # Trainers that resume from a checkpoint repeat iterations.
            first_iteration=min(self.first_iteration, iteration.iteration),
            last_iteration=max(self.last_iteration, iteration.iteration),
            end_time_s=wall_time_s,
            iteration_count=count,
            iteration_time_s=time_s,
            iteration_time_m2=self.iteration_time_m2 + time_step_s * (iteration.iteration_time_s - time_s),
            energy_j=mean_energy_j,
            energy_m2=self.energy_m2 + energy_step_j * (energy_j - mean_energy_j),
            pipeline_energy_j=tuple(
                mean_j + (new_j - mean_j) / count
                for mean_j, new_j in zip(self.pipeline_energy_j, iteration.pipeline_energy_j, strict=True)
            ),
            gap_time_s=self.gap_time_s + (iteration.gap_time_s - self.gap_time_s) / count,
            gap_energy_j=self.gap_energy_j + (iteration.gap_energy_j - self.gap_energy_j) / count,
            gap_slowed_time_s=(
                self.gap_slowed_time_s + (iteration.gap_slowed_time_s - self.gap_slowed_time_s) / count
            ),
        )


@dataclass(frozen=True, slots=True)
class Saving:
    """A period against stock, in percent of that; None if a figure is unknown.

    `baseline_number` is the period that was at stock: an earlier one, or the period itself if blocks at stock
    ran beside it.

    Standard errors, and margins (half of 95 % intervals), are unknown if either has a single iteration,
    energies if none was measured.
    """

    baseline_number: int
    energy_percent: float | None
    energy_se_percent: float | None
    slowdown_percent: float
    slowdown_se_percent: float | None
    energy_margin_percent: float | None
    slowdown_margin_percent: float | None


def compared(period: Period, stock: Period | None) -> Saving | None:
    """Compare a period with the blocks at stock beside it, if they suffice; else with earlier stock."""
    if period.is_baseline:
        return None
    time, energy = period.time_pairs, period.energy_pairs
    if time.count < MIN_PAIRS:
        return None if stock is None or stock.is_wrong else saving(period, stock)
    has_energy = energy.count >= MIN_PAIRS
    return Saving(
        baseline_number=period.number,
        energy_percent=100 * (1 - energy.ratio) if has_energy else None,
        energy_se_percent=_percent(energy.ratio_se) if has_energy else None,
        slowdown_percent=100 * (time.ratio - 1),
        slowdown_se_percent=_percent(time.ratio_se),
        energy_margin_percent=_percent(energy.ratio_margin()) if has_energy else None,
        slowdown_margin_percent=_percent(time.ratio_margin()),
    )


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def saving(period: Period, baseline: Period) -> Saving:
    """Compare a period with another one at stock."""
    counts = (period.iteration_count, baseline.iteration_count)
    slowdown = _relative(
        mean=period.iteration_time_s,
        se=period.iteration_time_se_s,
        reference=baseline.iteration_time_s,
        reference_se=baseline.iteration_time_se_s,
        counts=counts,
    )
    has_energy = period.energy_j > 0 and baseline.energy_j > 0
    energy = (
        _relative(
            mean=period.energy_j,
            se=period.energy_se_j,
            reference=baseline.energy_j,
            reference_se=baseline.energy_se_j,
            counts=counts,
        )
        if has_energy
        else None
    )
    return Saving(
        baseline_number=baseline.number,
        energy_percent=-energy[0] if energy is not None else None,
        energy_se_percent=energy[1] if energy is not None else None,
        slowdown_percent=slowdown[0],
        slowdown_se_percent=slowdown[1],
        energy_margin_percent=energy[2] if energy is not None else None,
        slowdown_margin_percent=slowdown[2],
    )


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """One iteration of one pipeline; `stages[s]` holds the computations of stage `s`, tensor rank 0."""

    iteration: int
    iteration_time_s: float
    stages: tuple[ComputationColumns, ...]


class Powers:
    """The profiled mean power of computations, of a stage's GPUs together.

    Power is interpolated between measured clocks; beyond them, the nearest applies. Stock counts as the
    highest clock.
    """

    def __init__(self, profiles: Iterable[StageProfile]) -> None:
        known: dict[tuple[int, StageKey], dict[int, float]] = {}
        for profile in profiles:
            for key, measurement in profile.measurements.items():
                by_clock = known.setdefault((profile.stage, key), {})
                by_clock[profile.clock_mhz] = measurement.energy_j / measurement.time_s
        self._known = {place: sorted(by_clock.items()) for place, by_clock in known.items()}

    def at(self, stage: int, key: StageKey, clock_mhz: int) -> float | None:
        """Return the power at a clock (0 for stock), watts; None if none was measured."""
        known = self._known.get((stage, key))
        if known is None:
            return None
        if clock_mhz == 0 or clock_mhz >= known[-1][0]:
            return known[-1][1]
        above = bisect_left(known, (clock_mhz,))
        (high_mhz, high_w), (low_mhz, low_w) = known[above], known[max(0, above - 1)]
        if high_mhz == low_mhz:
            return high_w
        return low_w + (high_w - low_w) * (clock_mhz - low_mhz) / (high_mhz - low_mhz)


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredTimeline:
    """A pipeline's iteration, and the known powers of its computations.

    `blocking_power_w`: the blocking power of each stage's GPUs together, at stock; empty before the job is
    solved.
    """

    pipeline: int
    timeline: Timeline
    powers: Powers
    blocking_power_w: tuple[float, ...]


def _relative(
    mean: float, se: float, reference: float, reference_se: float, counts: tuple[int, int]
) -> tuple[float, float | None, float | None]:
    """Return by how many percent a mean exceeds a reference mean, and the standard error and margin of that.

    The error of a ratio of independent means, to first order: both contribute, the reference's times the
    ratio. The margin's degrees of freedom are Welch's and Satterthwaite's. Both are None if either mean is of
    a single value; `counts` are their numbers of values.
    """
    ratio = mean / reference
    excess = 100 * (ratio - 1)
    if min(counts) < 2:
        return excess, None, None
    whole = math.hypot(se, ratio * reference_se)
    if not whole:
        return excess, 0.0, 0.0
    share = (se / whole) ** 2
    freedom = 1 / (share**2 / (counts[0] - 1) + (1 - share) ** 2 / (counts[1] - 1))
    se_percent = 100 * whole / reference
    return excess, se_percent, interval_factor(freedom) * se_percent
