"""A round of profiling: what ranks have measured under the clocks that are held. Part of the state machine.

Pipelines that were slow in a round do not count in it, unless all were. A round that is dear (it has taken
its share of the extra time) is content with the first iteration that is measured whole; others are looked at
again, an iteration later, until they are known well enough (`effort`).
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
    """The round that goes on, or the last one.

    What it measures is said in `counted_mhz`: the stages, and the clocks that they count as.

    Attributes:
        held_count: how many iterations ran under its clocks.
        disturbed: the pipelines that were slow in it.
        wanted_count: how many iterations every rank has to have measured before it is looked at again.
    """

    def __init__(
        self, parallelism: Parallelism, schedule: Schedule, allocation: SampleAllocation, expensive_s: float
    ) -> None:
        """`effort` says what is measured well enough, and `dear_s` what extra time makes a round dear."""
        self.held_count = 0
        self.disturbed: set[int] = set()
        self.wanted_count = allocation.min_iterations
        self._parallelism = parallelism
        self._schedule = schedule
        self._allocation = allocation
        self._expensive_s = expensive_s
        # What a stage's estimate has to cover.
        self._needed = [frozenset((each.kind, each.chunk) for each in order) for order in schedule.orders]
        self._estimates: dict[Coordinates, EnergyEstimate] = {}
        self._extra_s = 0.0
        # The ranks that it measures, and how many of them, from the first on, were when they were looked at:
        # while the next one is not, none of the others needs a look.
        self._measured_ranks: list[Coordinates] = []
        self._measured_count = 0

    @property
    def pipelines(self) -> Sequence[int]:
        """Pipelines that were not slow; all of them if all were, as then there is nothing better to go by."""
        everybody = range(self._parallelism.pipeline_count)
        return [pipeline for pipeline in everybody if pipeline not in self.disturbed] or everybody

    @property
    def is_all_disturbed(self) -> bool:
        """Whether all pipelines were slow in it."""
        return len(self.disturbed) == self._parallelism.pipeline_count

    def begin(self, at_stock: Collection[int]) -> None:
        """Forget what was estimated; but at stock it stays true, and newer estimates come more rarely."""
        self._estimates = {rank: some for rank, some in self._estimates.items() if rank.stage in at_stock}
        self.disturbed.clear()
        self.held_count = 0
        self.wanted_count = self._allocation.min_iterations
        self._extra_s = 0.0
        self._measured_ranks = []

    def forget(self) -> None:
        """What was estimated is of no use any more."""
        self._estimates.clear()

    def take_estimate(self, rank: Coordinates, estimate: EnergyEstimate) -> None:
        """Take what a rank's counter says of the clock that it holds."""
        self._estimates[rank] = estimate

    def take_iteration(self, extra_s: float, disturbed: Iterable[int]) -> None:
        """Take an iteration that ran under its clocks, so much longer than at stock."""
        self.held_count += 1
        self._extra_s += extra_s
        self.disturbed.update(disturbed)

    # ------------------------------------------------------------------ what is measured

    def found(self, stage: int, clock_mhz: int, held: HoldClocks) -> StageProfile:
        """Return what is measured of a stage, which counts as being at a clock."""
        shape = self._parallelism
        held_mhz = held.clocks_mhz[stage]
        return merge(stage, clock_mhz, self._estimates, shape, self.pipelines, held_mhz)

    def found_at_stock(self, stage: int, clock_mhz: int, iteration_count: int) -> StageProfile | None:
        """Return what all pipelines have measured of a stage at stock, if they have."""
        everybody = range(self._parallelism.pipeline_count)
        if self._unmeasured_of(stage, STOCK_MHZ, everybody, iteration_count):
            return None
        return merge(stage, clock_mhz, self._estimates, self._parallelism, everybody, STOCK_MHZ)

    def unmeasured(
        self, held: HoldClocks, counted_mhz: Mapping[int, int], iteration_count: int
    ) -> dict[int, Unmeasured]:
        """Return the stages that have ranks without so many measured iterations, and these ranks."""
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

    # ------------------------------------------------------------------ whether it goes on

    def is_waiting(
        self, held: HoldClocks, counted_mhz: Callable[[], Mapping[int, int]], profiles: Sequence[StageProfile]
    ) -> bool:
        """Tell whether a rank that counts is not yet measured, or all are not well enough.

        `profiles` are what was measured before. Nearly always a single look at a rank is enough, and what is
        counted not asked for.
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
        """Return how many iterations all that count have measured, and with what error."""
        pipelines, tensors = self.pipelines, range(self._parallelism.tensor_count)
        found = [self.found(stage, clock_mhz, held) for stage, clock_mhz in counted_mhz.items()]
        ranks = (Coordinates(p, stage, t) for p in pipelines for stage in counted_mhz for t in tensors)
        iteration_count = min((self._estimates[rank].iteration_count for rank in ranks), default=0)
        return iteration_count, round_error(found, profiles, self._schedule)

    def _is_any_awaited(self, held: HoldClocks, counted_mhz: Callable[[], Mapping[int, int]]) -> bool:
        """Tell whether a rank that counts has not yet measured as many iterations as wanted."""
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
        # All were measured at one time or another; a newer estimate may have undone that.
        undone = next((index for index, rank in enumerate(ranks) if self._is_awaited(rank, held)), None)
        if undone is not None:
            self._measured_count = undone
        return undone is not None

    def _is_awaited(self, rank: Coordinates, held: HoldClocks) -> bool:
        """Tell whether a rank counts and is not measured. If all pipelines were slow, all of them count."""
        if rank.pipeline in self.disturbed and not self.is_all_disturbed:
            return False
        return self._why_not_measured(rank, held.clocks_mhz[rank.stage], self.wanted_count) is not None
