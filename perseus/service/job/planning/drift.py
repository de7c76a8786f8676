"""Detects computations that do not take their planned time. Part of the state machine.

Agents keep estimating while plans are in force. Every `BLOCK` iterations, the estimated times of computations
that ran at one clock throughout are compared with the times that the plan was made with. A difference on all
pipelines is drift; on a single pipeline it is a straggler. The first block verifies the clocks that were
interpolated and never measured.

These estimates cover all iterations under a plan, so they follow slowly when the work itself changes. After a
prediction violation, `changed_work` therefore examines the latest iteration by itself.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from perseus.service.domain.measured import StageKey, Timeline
from perseus.service.domain.specification import Coordinates, Parallelism
from perseus.service.domain.telemetry import KINDS, EnergyEstimate
from perseus.solver import Pipeline

BLOCK = 20
"""Iterations between two checks."""

DRIFT_SHARE = 0.02
"""Share by which a computation's time has to be off to count as drift."""

VERIFICATION_SHARE = 0.005
"""The same, for an interpolated clock."""

_MIN_COUNT = 5
"""Computations that a sample needs to count."""

_ERRORS = 3.0
"""Differences within this many standard errors are noise."""

CHANGED_RATIO = 1.1
"""Ratio of measured to planned time from which on the work itself must have changed."""

Place = tuple[int, int, StageKey]
"""Stage, clock and (chunk, kind)."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Computations whose times are off.

    `times_s` has all measured times, `worst` the place of the largest error.
    """

    times_s: Mapping[Place, float]
    worst: Place
    worst_ratio: float

    @property
    def stage(self) -> int:
        """The stage with the largest error."""
        return self.worst[0]


class DriftWatch:
    """Compares the estimates under the plans in force with the times that the plans were made with."""

    def __init__(self, parallelism: Parallelism) -> None:
        self._parallelism = parallelism
        self._estimates: dict[Coordinates, EnergyEstimate] = {}
        self._versions: tuple[int, ...] | None = None
        self._iteration_count = 0

    def take_estimate(self, rank: Coordinates, estimate: EnergyEstimate) -> None:
        """Take a rank's measurements under its current plan."""
        self._estimates[rank] = estimate

    def is_due(self, versions: tuple[int, ...] | None) -> bool:
        """Count an iteration; return whether it completes a block under the same plans."""
        if versions != self._versions:
            self._versions = versions
            self._iteration_count = 0
        self._iteration_count += 1
        return self._iteration_count % BLOCK == 0

    def restart(self) -> None:
        """Discard the estimates gathered so far."""
        self._estimates.clear()
        self._versions = None

    def check(
        self, problem: Pipeline, measured: Collection[tuple[int, int]], ignored: Collection[int]
    ) -> Drift | None:
        """Compare the estimates with the planned times; return the drift, if there is any.

        `measured` has the (stage, clock) pairs that were measured, `ignored` the pipelines with a reason to
        be slow.
        """
        planned_s = {
            (stage, m.clock_mhz, (chunk, kind)): m.time_s
            for (stage, chunk, kind), some in problem.profiles.items()
            for m in some
        }
        figures = {place: pair for place, pair in self._times_s(ignored).items() if place in planned_s}
        off = {}
        for place, (time_s, error_s) in figures.items():
            share = DRIFT_SHARE if place[:2] in measured else VERIFICATION_SHARE
            difference_s = abs(time_s - planned_s[place])
            if difference_s > share * planned_s[place] + _ERRORS * error_s:
                off[place] = difference_s / planned_s[place]
        if not off:
            return None
        times_s = {place: time_s for place, (time_s, _) in figures.items()}
        worst = max(off, key=off.__getitem__)
        return Drift(times_s, worst, times_s[worst] / planned_s[worst])

    def _times_s(self, ignored: Collection[int]) -> dict[Place, tuple[float, float]]:
        """Return the median over the pipelines of the slowest tensor rank's time, if most report it.

        The largest standard error comes with it.
        """
        slowest_s: dict[Place, dict[int, tuple[float, float]]] = {}
        for rank, estimate in self._estimates.items():
            if rank.pipeline in ignored:
                continue
            for sample in estimate.samples:
                if sample.computation_count < _MIN_COUNT:
                    continue
                own_s = slowest_s.setdefault((rank.stage, sample.clock_mhz, (sample.chunk, sample.kind)), {})
                figure = sample.time_s, sample.time_se_s
                own_s[rank.pipeline] = max(own_s.get(rank.pipeline, figure), figure)
        needed = (self._parallelism.pipeline_count - len(ignored) + 1) // 2
        return {
            place: (
                median(time_s for time_s, _ in own_s.values()),
                max(error_s for _, error_s in own_s.values()),
            )
            for place, own_s in slowest_s.items()
            if len(own_s) >= needed
        }


def changed_work(problem: Pipeline, timelines: Iterable[Timeline]) -> tuple[int, float] | None:
    """Return the stage that most exceeds its planned time and the ratio, if at least `CHANGED_RATIO`.

    `timelines` has the latest iteration of each pipeline. A stage's ratio is the smallest over the pipelines,
    because a single slow pipeline is a straggler. A pipeline's ratio is the median over the microbatches of
    one kind of computation, of those that began at a clock of the profile.
    """
    planned_s = {
        (stage, m.clock_mhz, (chunk, kind)): m.time_s
        for (stage, chunk, kind), some in problem.profiles.items()
        for m in some
    }
    ratios: dict[tuple[int, StageKey], list[float]] = {}
    for timeline in timelines:
        for stage, rows in enumerate(timeline.stages):
            own: dict[StageKey, list[float]] = {}
            for kind, chunk, time_s, mhz in zip(
                rows.kind, rows.chunk, rows.duration_s, rows.clock_mhz, strict=True
            ):
                key = chunk, KINDS[kind]
                if (expected_s := planned_s.get((stage, mhz, key))) is not None:
                    own.setdefault(key, []).append(time_s / expected_s)
            for key, some in own.items():
                ratios.setdefault((stage, key), []).append(median(some))
    worst = max(((min(some), stage) for (stage, _), some in ratios.items()), default=(0.0, 0))
    return (worst[1], worst[0]) if worst[0] >= CHANGED_RATIO else None
