"""A round of profiling: the ranks' measurements under the held clocks. Part of the state machine.

Pipelines that were slow in a round do not count in it, unless all were. An expensive round (one that has used
its share of the extra time) ends with its first complete measurement; others are checked again an iteration
later, until they are accurate enough (`sample_allocation`).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from perseus.service.domain.measured import StageProfile
from perseus.service.domain.model import STOCK_MHZ, HoldClocks
from perseus.service.domain.profiling import ClockGivenUpReason
from perseus.service.domain.specification import Coordinates, Parallelism
from perseus.service.domain.telemetry import EnergyEstimate
from perseus.service.job.profiling.sample_allocation import RoundError, SampleAllocation, round_error
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
        self._extra_s = 0.0
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
    def is_all_disturbed(self) -> bool:
        """Whether all pipelines were slow in it."""
        return len(self.disturbed) == self._parallelism.pipeline_count

    def begin(self, at_stock: Collection[int]) -> None:
        """Begin a round without estimates, except at stock: those stay valid, and newer ones are rarer."""
        self._estimates = {rank: some for rank, some in self._estimates.items() if rank.stage in at_stock}
        self.disturbed.clear()
        self.held_count = 0
        self.wanted_count = self._allocation.min_iterations
        self._extra_s = 0.0
        self._measured_ranks = []

    def forget(self) -> None:
        """Discard all estimates."""
        self._estimates.clear()

    def take_estimate(self, rank: Coordinates, estimate: EnergyEstimate) -> None:
        """Take a rank's estimate for the clock that it holds."""
        self._estimates[rank] = estimate

    def take_iteration(self, extra_s: float, disturbed: Iterable[int]) -> None:
        """Take an iteration under the round's clocks, which took `extra_s` longer than at stock."""
        self.held_count += 1
        self._extra_s += extra_s
        self.disturbed.update(disturbed)

    # ------------------------------------------------------------------ measurements

    def found(self, stage: int, clock_mhz: int, held: HoldClocks) -> StageProfile:
        """Return a stage's measurements, which count as taken at `clock_mhz`."""
        shape = self._parallelism
        held_mhz = held.clocks_mhz[stage]
        return merge(stage, clock_mhz, self._estimates, shape, self.pipelines, held_mhz)

    def found_at_stock(self, stage: int, clock_mhz: int, iteration_count: int) -> StageProfile | None:
        """Return a stage's measurements at stock; None until all pipelines have them."""
        all_pipelines = range(self._parallelism.pipeline_count)
        if self._unmeasured_of(stage, STOCK_MHZ, all_pipelines, iteration_count):
            return None
        return merge(stage, clock_mhz, self._estimates, self._parallelism, all_pipelines, STOCK_MHZ)

    def unmeasured(
        self, held: HoldClocks, counted_mhz: Mapping[int, int], iteration_count: int
    ) -> dict[int, Unmeasured]:
        """Return, by stage, the ranks that have not yet measured `iteration_count` iterations."""
        pipelines = self.pipelines
        found = {
            stage: self._unmeasured_of(stage, held.clocks_mhz[stage], pipelines, iteration_count)
            for stage in counted_mhz
        }
        return {stage: ranks for stage, ranks in found.items() if ranks}

    def _unmeasured_of(
        self, stage: int, clock_mhz: int, pipelines: Sequence[int], iteration_count: int
    ) -> Unmeasured:
        ranks = (Coordinates(p, stage, t) for p in pipelines for t in range(self._parallelism.tensor_count))
        found = ((rank, self._why_not_measured(rank, clock_mhz, iteration_count)) for rank in ranks)
        return [(rank, why) for rank, why in found if why is not None]

    def _why_not_measured(
        self, rank: Coordinates, clock_mhz: int, iteration_count: int
    ) -> ClockGivenUpReason | None:
        count = 1 if self._is_expensive else iteration_count
        return why_not_measured(self._estimates.get(rank), self._needed[rank.stage], clock_mhz, count)

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
            if self._is_expensive or self._allocation.is_enough(*self.judge(held, counted_mhz(), profiles)):
                return False
            self.wanted_count += 1
            self._measured_count = 0
        return True

    def judge(
        self, held: HoldClocks, counted_mhz: Mapping[int, int], profiles: Sequence[StageProfile]
    ) -> tuple[int, RoundError]:
        """Return how many iterations all counted ranks have measured, and the error."""
        pipelines, tensors = self.pipelines, range(self._parallelism.tensor_count)
        found = [self.found(stage, clock_mhz, held) for stage, clock_mhz in counted_mhz.items()]
        ranks = (Coordinates(p, stage, t) for p in pipelines for stage in counted_mhz for t in tensors)
        iteration_count = min((self._estimates[rank].iteration_count for rank in ranks), default=0)
        return iteration_count, round_error(found, profiles, self._schedule)

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
        """Tell whether a rank counts and is not measured. If all pipelines were slow, all of them count."""
        if rank.pipeline in self.disturbed and not self.is_all_disturbed:
            return False
        return self._why_not_measured(rank, held.clocks_mhz[rank.stage], self.wanted_count) is not None
