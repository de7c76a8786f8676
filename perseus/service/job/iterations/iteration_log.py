"""Finished iterations: assembled from their ranks, and summed up for the report.

An iteration of a pipeline is complete when all its ranks have reported it; one of the job, when all pipelines
have. The report counts complete iterations of the job only. It consists of *periods* (running sums over
consecutive iterations under the same plans), so its size does not grow with the length of the training.
Memory holds the latest periods and the database all of them; apart from these, only the few rows of
incomplete iterations need to be stored.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perseus.service.domain.bounds import MAX_COUNT
from perseus.service.domain.figures import Totals
from perseus.service.domain.measured import MAX_PERIODS, JobIteration, Period, Saving, compared
from perseus.service.domain.model import (
    NO_VERSION,
    STOCK,
    JobState,
    PipelineOffer,
    PlannedClocks,
)
from perseus.service.domain.pairs import Pair
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.telemetry import IterationColumns
from perseus.v1 import job_pb2

OPEN_LIMIT = 256
"""Incomplete iterations kept; older ones will never be complete, because an agent dropped their rows.

But those beyond what is plausible make way first, or one rank's mistake would close all real ones.
"""

_LABEL_LIMIT = 64


@dataclass(slots=True, eq=False)
class _Open:
    """An incomplete iteration: one entry per rank, pipeline by pipeline, and the number of missing ranks.

    These are lists, as entries are written one by one; a complete iteration is evaluated as arrays.
    """

    missing_count: int
    missing_counts: list[int]
    """By pipeline."""
    is_seen: list[bool]
    version: list[int]
    duration_s: list[float]
    energy_j: list[float]
    is_regular: list[bool]
    gap_time_s: list[float]
    gap_energy_j: list[float]
    gap_slowed_time_s: list[float]
    has_clock_change: bool = False
    relative_work: float = 0.0
    work: float = 0.0


class _Label(NamedTuple):
    """The job's state for which a version was offered, and whether its clocks are stock's."""

    state: JobState
    is_stock: bool


_UNKNOWN = _Label(JobState.STOCK, is_stock=False)
"""For a version that is not known (any more)."""


class IterationLog:
    """Assembles iterations, and keeps the report's periods.

    Attributes:
        closed_through: the highest iteration that takes no more rows, -1 if none.
        periods: the latest periods of the report, about `MAX_PERIODS`.
        latest_baseline: the latest measurements at stock as a period, if there are any, even if it is wrong.
        iteration_time_s: that of the latest complete iteration of the job, 0 before the first.
        latest: that iteration.
        is_latest_current: whether no rank has been lost since.
        totals: sums over all complete iterations assembled here.
    """

    def __init__(self, ranks: Sequence[Coordinates], periods: Sequence[Period] = ()) -> None:
        self.closed_through = -1
        self.periods: list[Period] = []
        self.latest_baseline: Period | None = None
        self.iteration_time_s = 0.0
        self.latest: JobIteration | None = None
        self.is_latest_current = False
        self.totals = Totals()
        self._index = {rank: index for index, rank in enumerate(ranks)}
        self._pipeline_count = ranks[-1].pipeline + 1
        self._ranks_per_pipeline = len(ranks) // self._pipeline_count
        self._stage_count = ranks[-1].stage + 1
        # By pipeline: the version of the plan that each tuple of stage versions makes up.
        self._plans: list[dict[tuple[int, ...], int]] = [
            {(NO_VERSION,) * self._stage_count: NO_VERSION} for _ in range(self._pipeline_count)
        ]
        self._open: dict[int, _Open] = {}
        self._latest: _Open | None = None
        self._latest_iteration: int | None = None
        self._key: tuple[tuple[int, ...], bool] | None = None
        # Irregular iterations without a period yet: their key, count and mean time.
        self._irregular: tuple[tuple[tuple[int, ...], bool], int, float] | None = None
        self._restored_through: int | None = None
        # Whether a disturbance spoils the stock baseline that is being measured.
        self._is_disturbed = False
        self._labels: dict[int, _Label] = {NO_VERSION: _Label(JobState.BASELINE, is_stock=True)}
        # By version of a plan: the percentage that the GPUs' set latency adds to its energy, if not 0.
        self._latency_costs: dict[int, float] = {}
        self._straggler_since: list[tuple[int, bool]] = []

    def label(self, pipeline: int, offer: PipelineOffer, state: JobState) -> None:
        """Record a pipeline's offer, and the job's state that it was made for."""
        version, plans = offer.version, self._plans[pipeline]
        # The latest last: a plan comes back after each block at stock beside it.
        version = plans[offer.stage_versions] = plans.pop(offer.stage_versions, version)
        for oldest in list(plans)[:-_LABEL_LIMIT]:
            del plans[oldest]
        if isinstance(offer.clocks, PlannedClocks) and offer.clocks.latency_cost_percent:
            self._latency_costs[version] = offer.clocks.latency_cost_percent
            for old in sorted(self._latency_costs)[:-_LABEL_LIMIT]:
                del self._latency_costs[old]
        if state is JobState.BASELINE and offer.clocks != STOCK:
            state = JobState.STOCK  # measurements under a maximum clock are no baseline
        label = _Label(state, offer.clocks == STOCK)
        self._labels.pop(version, None)
        self._labels[version] = label
        for old in [each for each in list(self._labels)[:-_LABEL_LIMIT] if each != NO_VERSION]:
            del self._labels[old]

    def mark_straggler(self, first_iteration: int, has_straggler: bool) -> None:
        """Record whether there is a known straggler from this iteration on."""
        self._straggler_since = [mark for mark in self._straggler_since if mark[0] < first_iteration][
            -_LABEL_LIMIT:
        ]
        self._straggler_since.append((first_iteration, has_straggler))

    def restore(self, periods: Sequence[Period]) -> None:
        """Continue with a stored report.

        The plans of the latest iteration are not stored, unless it is the last one of the last period: in
        that case the next iteration is not the first one under its plans.
        """
        self.latest_baseline = _latest_baseline(periods)
        self.periods = list(periods[-MAX_PERIODS:])
        if self.periods:
            last = self.periods[-1]
            self._key, self._restored_through = (last.versions, last.has_straggler), last.last_iteration

    def restart(self) -> None:
        """Forget incomplete iterations: the job may resume at an earlier iteration."""
        self.closed_through = -1
        self.is_latest_current = False
        self._open.clear()
        self._latest_iteration = None
        self._key = self._restored_through = self._irregular = None
        has_straggler = self._has_straggler_at(2**63)
        self._straggler_since = [(-1, True)] if has_straggler else []

    def silent_ranks(self) -> list[Coordinates]:
        """Return the ranks that have not reported the oldest open iteration; all ranks if there is none."""
        oldest = self._open[min(self._open)].is_seen if self._open else [False] * len(self._index)
        return self._of(~np.array(oldest))

    def irregular_ranks(self) -> list[Coordinates]:
        """Return the ranks whose latest complete iteration was irregular."""
        return self._of(~np.array(self._latest.is_regular)) if self._latest else []

    def ranks_under_others(self, offers: Iterable[PipelineOffer]) -> list[Coordinates]:
        """Return the ranks whose latest complete iteration ran under another version than these."""
        if self._latest is None:
            return []
        by_stage = self._by_stage(self._latest.version)
        offered = np.array([offer.stage_versions for offer in offers])
        return self._of((by_stage != offered[:, :, np.newaxis]).ravel())

    def _of(self, is_meant: NDArray[np.bool_]) -> list[Coordinates]:
        return [rank for rank, index in self._index.items() if is_meant[index]]

    def last_placed(self, numbers: Iterable[int]) -> int | None:
        """Return the last iteration that finds place if these are opened, too; None if all do."""
        opened = sorted({*self._open, *(number for number in numbers if number > self.closed_through)})
        return opened[OPEN_LIMIT - 1] if len(opened) > OPEN_LIMIT else None

    def add(
        self, rank: Coordinates, rows: IterationColumns, wall_time_s: float, plausible: int = MAX_COUNT
    ) -> tuple[list[job_pb2.IterationSummary], list[JobIteration]]:
        """Take one rank's rows, reported at this time. `plausible`: no rank can be farther; -1 if unknown.

        Returns the iterations of pipelines, and of the job, that they complete.
        """
        del self.periods[:-MAX_PERIODS]  # not where they are made: before, they have to be stored
        index = self._index[rank]
        first = rank.pipeline * self._ranks_per_pipeline
        own = slice(first, first + self._ranks_per_pipeline)
        summaries, complete = [], []
        numbers = rows.iteration
        # Nearly every batch has one row.
        for row in (0,) if len(numbers) == 1 else sorted(range(len(numbers)), key=numbers.__getitem__):
            iteration = numbers[row]
            if iteration <= self.closed_through:
                continue
            entry = self._open_entry(iteration, plausible)
            if entry.is_seen[index]:
                continue
            entry.is_seen[index] = True
            entry.missing_count -= 1
            entry.missing_counts[rank.pipeline] -= 1
            entry.version[index] = rows.plan_version[row]
            entry.duration_s[index] = rows.duration_s[row]
            entry.energy_j[index] = rows.energy_j[row]
            entry.is_regular[index] = rows.is_regular[row]
            if rows.gap_time_s:
                entry.gap_time_s[index] = rows.gap_time_s[row]
            if rows.gap_energy_j:
                entry.gap_energy_j[index] = rows.gap_energy_j[row]
            if rows.gap_slowed_time_s:
                entry.gap_slowed_time_s[index] = rows.gap_slowed_time_s[row]
            if rows.relative_work:
                entry.relative_work = max(entry.relative_work, rows.relative_work[row])
            if rows.work:
                entry.work = max(entry.work, rows.work[row])
            entry.has_clock_change |= bool(rows.has_clock_change) and rows.has_clock_change[row]
            if not entry.missing_counts[rank.pipeline]:
                summaries.append(
                    job_pb2.IterationSummary(
                        pipeline=rank.pipeline,
                        iteration=iteration,
                        plan_version=max(entry.version[own]),
                        iteration_time_s=max(entry.duration_s[own]),
                        energy_j=math.fsum(entry.energy_j[own]),
                    )
                )
            if not entry.missing_count:
                complete.append(self._close(iteration, entry, wall_time_s))
        return summaries, complete

    def latest_period(self) -> tuple[Period, Saving | None] | None:
        """Return the last period of the report, if there is one, and its saving against stock."""
        if not self.periods:
            return None
        return self.periods[-1], compared(self.periods[-1], self.latest_baseline)

    @property
    def has_planned_since_baseline(self) -> bool:
        """Whether a period under plans follows the latest stock baseline; True without a baseline."""
        stock = self.latest_baseline
        return stock is None or any(
            period.state is JobState.PLANNED and period.number >= stock.number for period in self.periods
        )

    def mark_disturbance(self, *, is_disturbed: bool) -> Period | None:
        """Record whether something disturbs the current baseline; return its period, if that has changed."""
        self._is_disturbed = is_disturbed
        if not is_disturbed or not self.periods or not self.periods[-1].is_baseline:
            return None
        return None if self.periods[-1].is_wrong else self.refute_baseline()

    def refute_baseline(self) -> Period:
        """Compare nothing with the latest baseline any more, and return it."""
        assert self.latest_baseline is not None
        wrong = self.latest_baseline = replace(self.latest_baseline, is_wrong=True)
        self.periods = [wrong if period.number == wrong.number else period for period in self.periods]
        return wrong

    def rank_powers_w(self, first_index: int, count: int) -> list[float | None]:
        """Return the mean power, in watts, of `count` ranks from an index on in the latest iteration.

        It is unknown once a rank has been lost since.
        """
        if self._latest is None or not self.is_latest_current:
            return [None] * count
        own = slice(first_index, first_index + count)
        rows = zip(self._latest.energy_j[own], self._latest.duration_s[own], strict=True)
        return [energy_j / duration_s if energy_j else None for energy_j, duration_s in rows]

    def _open_entry(self, iteration: int, plausible: int) -> _Open:
        entry = self._open.get(iteration)
        if entry is None:
            count = len(self._index)
            entry = self._open[iteration] = _Open(
                count,
                [self._ranks_per_pipeline] * self._pipeline_count,
                [False] * count,
                [NO_VERSION] * count,
                [0.0] * count,
                [0.0] * count,
                [False] * count,
                [0.0] * count,
                [0.0] * count,
                [0.0] * count,
            )
            if len(self._open) > OPEN_LIMIT:
                newest = max(self._open)
                if newest > plausible:
                    del self._open[newest]
                else:
                    self._close_through(min(self._open))
        return entry

    def _close_through(self, iteration: int) -> None:
        self.closed_through = max(self.closed_through, iteration)
        for old in [number for number in self._open if number <= iteration]:
            del self._open[old]

    def _close(self, iteration: int, entry: _Open, wall_time_s: float) -> JobIteration:
        self._close_through(iteration)
        before = iteration - 1 if self._latest_iteration is None else self._latest_iteration
        self._latest, self._latest_iteration = entry, iteration
        versions = self._versions(entry)
        # If the stages do not make up one plan, each has its own label.
        labels = [self._labels.get(one, _UNKNOWN) for one in sorted(set(versions or entry.version))]
        complete = JobIteration(
            iteration=iteration,
            versions=versions,
            is_regular=all(entry.is_regular),
            iteration_time_s=max(entry.duration_s),
            pipeline_energy_j=tuple(
                np.array(entry.energy_j).reshape(self._pipeline_count, -1).sum(axis=1).tolist()
            ),
            skipped_count=iteration - 1 - before,
            gap_time_s=max(entry.gap_time_s),
            gap_energy_j=math.fsum(entry.gap_energy_j),
            gap_slowed_time_s=max(entry.gap_slowed_time_s),
            is_at_stock=all(label.is_stock for label in labels),
            state=labels[-1].state,
            has_straggler=self._has_straggler_at(iteration),
            unmeasured_rank_count=entry.energy_j.count(0.0),
            has_clock_change=entry.has_clock_change,
            relative_work=entry.relative_work or 1.0,
            work=entry.work,
        )
        self.iteration_time_s = complete.iteration_time_s
        self.latest, self.totals = complete, self.totals.with_iteration(complete)
        self.is_latest_current = True
        self._count(complete, wall_time_s)
        return complete

    def _by_stage(self, versions: Sequence[int]) -> NDArray[np.int64]:
        """Return per-rank versions as an array of shape (pipelines, stages, tensor-parallel ranks)."""
        return np.array(versions, np.int64).reshape(self._pipeline_count, self._stage_count, -1)

    def _versions(self, entry: _Open) -> tuple[int, ...] | None:
        """Return the version of each pipeline's plan, if all its ranks followed it."""
        by_stage = self._by_stage(entry.version)
        if (by_stage != by_stage[:, :, :1]).any():
            return None
        versions = [
            plans.get(tuple(own)) for plans, own in zip(self._plans, by_stage[:, :, 0].tolist(), strict=True)
        ]
        known = [version for version in versions if version is not None]
        return tuple(known) if len(known) == len(versions) else None

    def _count(self, complete: JobIteration, wall_time_s: float) -> None:
        """Add an iteration to the report, unless it is the first under its plans, or its clocks changed.

        Irregular ones only add to the count and time kept beside the regular ones before or after them.
        """
        if complete.versions is None or complete.has_clock_change:
            return
        if complete.is_at_stock and complete.state is JobState.PLANNED:
            self._key = None  # a block at stock beside plans: these go on after it
            return
        key = (complete.versions, complete.has_straggler)
        if not complete.is_regular:
            self._count_irregular(complete, key)
            return
        previous, self._key = self._key, key
        through, self._restored_through = self._restored_through, None
        if through is not None and complete.iteration != through + 1:
            return
        if previous is None or previous[0] != complete.versions:
            return
        last = self.periods[-1] if self.periods else None
        # A baseline that is measured where the job was at stock already is a period of its own.
        # So is one after a disturbance.
        is_new_baseline = (
            complete.state is JobState.BASELINE
            and last is not None
            and (not last.is_baseline or (last.is_wrong and not self._is_disturbed))
        )
        if last is not None and (last.versions, last.has_straggler) == key and not is_new_baseline:
            self.periods[-1] = last.extended(complete, wall_time_s)
            self._note_baseline()
            return
        irregular, self._irregular = self._irregular, None
        is_of_period = irregular is not None and irregular[0] == key
        self.periods.append(
            Period(
                number=last.number + 1 if last is not None else 0,
                state=complete.state,
                has_straggler=key[1],
                versions=complete.versions,
                first_iteration=complete.iteration,
                last_iteration=complete.iteration,
                start_time_s=wall_time_s,
                end_time_s=wall_time_s,
                iteration_count=1,
                iteration_time_s=complete.iteration_time_s,
                iteration_time_m2=0.0,
                energy_j=sum(complete.pipeline_energy_j),
                energy_m2=0.0,
                pipeline_energy_j=complete.pipeline_energy_j,
                gap_time_s=complete.gap_time_s,
                gap_energy_j=complete.gap_energy_j,
                gap_slowed_time_s=complete.gap_slowed_time_s,
                irregular_count=irregular[1] if irregular is not None and is_of_period else 0,
                irregular_time_s=irregular[2] if irregular is not None and is_of_period else 0.0,
                latency_cost_percent=math.fsum(self._latency_costs.get(own, 0.0) for own in complete.versions)
                / len(complete.versions),
            )
        )
        self._note_baseline()

    def _note_baseline(self) -> None:
        self.latest_baseline = self.periods[-1].stock or self.latest_baseline

    def compare(self, pair: Pair, versions: tuple[int, ...]) -> Period | None:
        """Take a block at stock beside the plans of these versions; return their period if it is the last."""
        if not self.periods or self.periods[-1].versions != versions:
            return None
        self.periods[-1] = self.periods[-1].compared_with(pair)
        self._note_baseline()
        return self.periods[-1]

    def _count_irregular(self, complete: JobIteration, key: tuple[tuple[int, ...], bool]) -> None:
        last = self.periods[-1] if self.periods else None
        if last is not None and (last.versions, last.has_straggler) == key:
            self.periods[-1] = last.with_irregular(complete.iteration_time_s, complete.iteration)
            return
        found = self._irregular
        of, count, time_s = found if found is not None and found[0] == key else (key, 0, 0.0)
        mean_s = time_s + (complete.iteration_time_s - time_s) / (count + 1)
        self._irregular = (of, count + 1, mean_s)

    def _has_straggler_at(self, iteration: int) -> bool:
        known = False
        for first_iteration, has_straggler in self._straggler_since:
            if first_iteration <= iteration:
                known = has_straggler
        return known

    def validate(self) -> None:
        """Check the invariants."""
        assert len(self._open) <= OPEN_LIMIT
        assert all(iteration > self.closed_through for iteration in self._open)
        for entry in self._open.values():
            assert 0 < entry.missing_count == entry.is_seen.count(False) == sum(entry.missing_counts)
            by_pipeline = np.array(entry.is_seen).reshape(self._pipeline_count, -1)
            assert (~by_pipeline).sum(axis=1).tolist() == entry.missing_counts
        assert all(earlier.number + 1 == later.number for earlier, later in pairwise(self.periods))
        assert all(earlier[0] < later[0] for earlier, later in pairwise(self._straggler_since))


def report(periods: Sequence[Period], first_number: int) -> Iterator[tuple[Period, Saving | None]]:
    """Yield a run's periods from a number on, each compared with stock beside it or, else, before it."""
    stock: Period | None = None
    for period in periods:
        stock = period.stock or stock
        if period.number >= first_number:
            yield period, compared(period, stock)


def _latest_baseline(periods: Sequence[Period]) -> Period | None:
    return next((period.stock for period in reversed(periods) if period.stock is not None), None)
