"""A round of profiling: the ranks' measurements under the held clocks. Part of the state machine.

Pipelines that were slow in a round do not count in it, unless all were. An expensive round (one that has used
its share of the extra time) ends with its first complete measurement; others are checked again an iteration
later, until they are accurate enough (`sample_allocation`).

Energies that a rank's counter leaves undetermined are completed from all ranks of its stage (`pooling`), once
all of these have reported. If even that does not determine them, the round goes on.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from perseus.service.domain.measured import StageProfile
from perseus.service.domain.model import STOCK_MHZ, HoldClocks
from perseus.service.domain.profiling import ClockGivenUpReason
from perseus.service.domain.specification import Coordinates, Parallelism
from perseus.service.domain.telemetry import EnergyEstimate
from perseus.service.job.profiling.pooling import complete, is_informative
from perseus.service.job.profiling.sample_allocation import (
    RoundError,
    SampleAllocation,
    effective_count,
    round_error,
)
from perseus.service.job.profiling.stage_profiles import merge, why_not_measured
from perseus.solver import Schedule

Unmeasured = list[tuple[Coordinates, ClockGivenUpReason]]
"""Ranks that are not measured, and why not."""


class Round:
    """The current round, or the last one.

    `counted_mhz`, wherever it is an argument, has the stages that the round measures and the clocks that they
    count as.

    Attributes:
        held_count: how many iterations ran under its clocks.
        disturbed: the pipelines that were slow in it.
        wanted_count: how many iterations every rank has to have measured before the next check.
    """

    def __init__(
        self, parallelism: Parallelism, schedule: Schedule, allocation: SampleAllocation, expensive_s: float
    ) -> None:
        """Create a round; `expensive_s` is the extra time from which on it is expensive."""
        self.held_count = 0
        self.disturbed: set[int] = set()
        self.wanted_count = allocation.min_iterations
        self._parallelism = parallelism
        self._schedule = schedule
        self._allocation = allocation
        self._expensive_s = expensive_s
        # The kinds and chunks that a stage's estimate has to cover.
        self._needed = [frozenset((each.kind, each.chunk) for each in order) for order in schedule.orders]
        self._estimates: dict[Coordinates, EnergyEstimate] = {}
        self._held_s = self._extra_s = 0.0
        # Whether the counted ranks' estimates do not determine all energies, even together.
        self._is_undetermined = False
        # The ranks to measure, and the length of the prefix known to be measured: until the next rank is,
        # no other one needs to be checked.
        self._measured_ranks: list[Coordinates] = []
        self._measured_count = 0

    @property
    def pipelines(self) -> Sequence[int]:
        """The pipelines that were not slow; all of them if all were, as no better ones exist."""
        all_pipelines = range(self._parallelism.pipeline_count)
        return [pipeline for pipeline in all_pipelines if pipeline not in self.disturbed] or all_pipelines

    @property
    def knows_power(self) -> bool:
        """Whether any rank has reported its blocking power."""
        return any(estimate.blocking_power_w is not None for estimate in self._estimates.values())

    @property
    def is_all_disturbed(self) -> bool:
        """Whether all pipelines were slow in it."""
        return len(self.disturbed) == self._parallelism.pipeline_count

    def begin(self, at_stock: Collection[int]) -> None:
        """Begin a round without estimates, except at stock: those stay valid, and newer ones are rarer."""
        self._estimates = {rank: some for rank, some in self._estimates.items() if rank.stage in at_stock}
        self.disturbed.clear()
        self.held_count = 0
        self._is_undetermined = False
        self.wanted_count = self._allocation.min_iterations
        self._held_s = self._extra_s = 0.0
        self._measured_ranks = []

    def forget(self) -> None:
        """Discard all estimates."""
        self._estimates.clear()

    def take_estimate(self, rank: Coordinates, estimate: EnergyEstimate) -> None:
        """Take a rank's estimate for the clock that it holds."""
        self._estimates[rank] = estimate

    def take_iteration(self, time_s: float, extra_s: float, disturbed: Iterable[int]) -> None:
        """Take an iteration under the round's clocks, which took `extra_s` longer than at stock."""
        self.held_count += 1
        self._held_s += time_s
        self._extra_s += extra_s
        self.disturbed.update(disturbed)

    # ------------------------------------------------------------------ measurements

    def effective_count(self, iteration_count: int) -> float:
        """Return as how many iterations the round's count, given their mean time."""
        return effective_count(
            iteration_count, self._held_s / self.held_count if self.held_count else math.inf
        )

    def found(self, stage: int, clock_mhz: int, held: HoldClocks) -> StageProfile:
        """Return a measured stage's measurements, which count as taken at `clock_mhz`."""
        held_mhz = held.clocks_mhz[stage]
        estimates = self._completed(stage, held_mhz, self.pipelines, accepts_sums=True)
        return merge(stage, clock_mhz, estimates, self._parallelism, self.pipelines, held_mhz)

    def found_at_stock(self, stage: int, clock_mhz: int, iteration_count: int) -> StageProfile | None:
        """Return a stage's measurements at stock; None until all pipelines have them."""
        all_pipelines = range(self._parallelism.pipeline_count)
        if self._unmeasured_of(stage, STOCK_MHZ, all_pipelines, iteration_count):
            return None
        estimates = self._completed(stage, STOCK_MHZ, all_pipelines, accepts_sums=False)
        return merge(stage, clock_mhz, estimates, self._parallelism, all_pipelines, STOCK_MHZ)

    def unmeasured(
        self,
        held: HoldClocks,
        counted_mhz: Mapping[int, int],
        iteration_count: int,
        *,
        accepts_sums: bool = False,
    ) -> dict[int, Unmeasured]:
        """Return, by stage, the ranks that have not yet measured `iteration_count` iterations.

        `accepts_sums`: it is enough that the energy of all computations together is determined.
        """
        pipelines = self.pipelines
        found = {
            stage: self._unmeasured_of(
                stage, held.clocks_mhz[stage], pipelines, iteration_count, accepts_sums=accepts_sums
            )
            for stage in counted_mhz
        }
        return {stage: ranks for stage, ranks in found.items() if ranks}

    def _unmeasured_of(
        self,
        stage: int,
        clock_mhz: int,
        pipelines: Sequence[int],
        iteration_count: int,
        *,
        accepts_sums: bool = False,
    ) -> Unmeasured:
        needed, count = self._needed[stage], 1 if self._is_expensive else iteration_count
        estimates = self._completed(stage, clock_mhz, pipelines, accepts_sums=accepts_sums)
        found = (
            (rank, why_not_measured(estimates.get(rank), needed, clock_mhz, count))
            for rank in self._ranks_of(stage, pipelines)
        )
        return [(rank, why) for rank, why in found if why is not None]

    def _completed(
        self, stage: int, clock_mhz: int, pipelines: Sequence[int], *, accepts_sums: bool
    ) -> Mapping[Coordinates, EnergyEstimate]:
        """Return the estimates of a stage's ranks in these pipelines, each completed if it can be."""
        ranks = self._ranks_of(stage, pipelines)
        own = {rank: self._estimates[rank] for rank in ranks if rank in self._estimates}
        informative = {
            rank: some for rank, some in own.items() if is_informative(some, self._needed[stage], clock_mhz)
        }
        return own | complete(informative, accepts_sums=accepts_sums)

    def _ranks_of(self, stage: int, pipelines: Sequence[int]) -> list[Coordinates]:
        return [Coordinates(p, stage, t) for p in pipelines for t in range(self._parallelism.tensor_count)]

    @property
    def _is_expensive(self) -> bool:
        return self._extra_s >= self._expensive_s

    # ------------------------------------------------------------------ end of the round

    def is_waiting(
        self, held: HoldClocks, counted_mhz: Callable[[], Mapping[int, int]], profiles: Sequence[StageProfile]
    ) -> bool:
        """Tell whether a counted rank is not yet measured, or the measurements are not yet accurate enough.

        `profiles` has the earlier measurements. Nearly always, checking a single rank is enough, and
        `counted_mhz` is not called.
        """
        while not self._is_any_awaited(held, counted_mhz):
            counted = counted_mhz()
            self._is_undetermined = bool(self.unmeasured(held, counted, 1))
            if not self._is_undetermined and (
                self._is_expensive or self._allocation.is_enough(*self.judge(held, counted, profiles))
            ):
                return False
            # Only newer estimates can change that.
            self.wanted_count = self._iteration_count(counted) + 1
            self._measured_count = 0
        return True

    def judge(
        self, held: HoldClocks, counted_mhz: Mapping[int, int], profiles: Sequence[StageProfile]
    ) -> tuple[float, RoundError]:
        """Return how many iterations all counted ranks have measured, in effect, and the error."""
        found = [self.found(stage, clock_mhz, held) for stage, clock_mhz in counted_mhz.items()]
        count = self.effective_count(self._iteration_count(counted_mhz))
        return count, round_error(found, profiles, self._schedule)

    def _iteration_count(self, counted_mhz: Iterable[int]) -> int:
        """Return how many iterations all ranks of these stages have measured."""
        ranks = (rank for stage in counted_mhz for rank in self._ranks_of(stage, self.pipelines))
        return min((self._estimates[rank].iteration_count for rank in ranks), default=0)

    def _is_any_awaited(self, held: HoldClocks, counted_mhz: Callable[[], Mapping[int, int]]) -> bool:
        """Tell whether a counted rank has not yet measured as many iterations as wanted."""
        if not self._measured_ranks:
            pipelines = range(self._parallelism.pipeline_count)
            tensors = range(self._parallelism.tensor_count)
            self._measured_ranks = [
                Coordinates(p, s, t) for s in counted_mhz() for p in pipelines for t in tensors
            ]
            self._measured_count = 0
        ranks = self._measured_ranks
        while self._measured_count < len(ranks):
            if self._is_awaited(ranks[self._measured_count], held):
                return True
            self._measured_count += 1
        # Each was measured at some point, but a newer estimate may have undone that.
        undone = next((index for index, rank in enumerate(ranks) if self._is_awaited(rank, held)), None)
        if undone is not None:
            self._measured_count = undone
        return undone is not None

    def _is_awaited(self, rank: Coordinates, held: HoldClocks) -> bool:
        """Tell whether a rank counts and has reported too little. If all pipelines were slow, all count."""
        if rank.pipeline in self.disturbed and not self.is_all_disturbed:
            return False
        estimate, clock_mhz = self._estimates.get(rank), held.clocks_mhz[rank.stage]
        count = 1 if self._is_expensive and not self._is_undetermined else self.wanted_count
        needed = self._needed[rank.stage]
        if estimate is not None and is_informative(estimate, needed, clock_mhz):
            return estimate.iteration_count < count
        return why_not_measured(estimate, needed, clock_mhz, count) is not None
