"""The published figures of a run, as plain values; None means unknown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perseus.service.domain.measured import JobIteration, MeasuredTimeline, Period, Saving
from perseus.service.domain.model import Rank, RankState
from perseus.service.domain.profiling import ProfilingCost
from perseus.service.domain.stall import Stall
from perseus.solver import Frontier


@dataclass(frozen=True, slots=True)
class Totals:
    """Complete iterations since the coordinator loaded the run, and the gaps before them.

    `time_s` is of the slowest rank, `energy_j` of all GPUs.
    """

    regular_count: int = 0
    irregular_count: int = 0
    time_s: float = 0.0
    energy_j: float = 0.0

    def with_iteration(self, iteration: JobIteration) -> "Totals":
        """Return the totals with one more iteration."""
        return Totals(
            regular_count=self.regular_count + iteration.is_regular,
            irregular_count=self.irregular_count + (not iteration.is_regular),
            time_s=self.time_s + iteration.iteration_time_s + iteration.gap_time_s,
            energy_j=self.energy_j + sum(iteration.pipeline_energy_j) + iteration.gap_energy_j,
        )


@dataclass(frozen=True, slots=True)
class RunFigures:
    """A run's figures at one moment.

    Attributes:
        stall: why it makes no progress; None if it does.
        latest: the latest complete iteration.
        power_w: in that iteration; unknown once a rank has been lost since.
        totals: of all complete iterations.
        period: the measurements under the clocks offered now.
        saving: of that period against stock.
        predicted_time_s: the iteration time that the plans predict.
        straggler_time_s: T' of the slowest straggler.
        switch_count: how often pipelines were switched to other plans.
        saved_energy_j: against stock, since the coordinator loaded the run.
        profiling_cost: the cost of profiling since it began or was renewed.
    """

    stall: Stall | None = None
    latest: JobIteration | None = None
    power_w: float | None = None
    totals: Totals | None = None
    period: Period | None = None
    saving: Saving | None = None
    predicted_time_s: float | None = None
    straggler_time_s: float | None = None
    switch_count: int | None = None
    saved_energy_j: float | None = None
    profiling_cost: ProfilingCost | None = None


@dataclass(frozen=True, slots=True)
class RankColumns:
    """Consecutive ranks, ordered by pipeline, stage and tensor, as parallel columns.

    Attributes:
        state: whether each is served.
        iteration: the highest that each reported.
        clock_mhz: time-weighted mean clock of its stage's computations in the latest iteration; 0 at stock.
        slowness: computation time of its stage in the job's latest complete iteration, over the time in its
            plan, or without one over the median of all pipelines.
        power_w: mean power of its GPU in that iteration.
    """

    state: Sequence[RankState]
    iteration: Sequence[int | None]
    clock_mhz: Sequence[float | None]
    slowness: Sequence[float | None]
    power_w: Sequence[float | None]

    @classmethod
    def of_ranks(cls, ranks: Sequence[Rank]) -> "RankColumns":
        """Return the columns of ranks without measurements."""
        nothing = (None,) * len(ranks)
        return cls(
            state=[rank.state for rank in ranks],
            iteration=[rank.iteration if rank.iteration >= 0 else None for rank in ranks],
            clock_mhz=nothing,
            slowness=nothing,
            power_w=nothing,
        )

    def cut(self, first_index: int, count: int) -> "RankColumns":
        """Return up to `count` ranks from an index on."""
        own = slice(first_index, first_index + count)
        return RankColumns(
            self.state[own], self.iteration[own], self.clock_mhz[own], self.slowness[own], self.power_w[own]
        )


@dataclass(frozen=True, slots=True, eq=False)
class LastMeasured:
    """The latest measurements and frontier of a run that has ended.

    All are kept in memory for the runs that ended last; the frontier and two of the timelines are stored.

    Attributes:
        frontier: of the job's plans.
        timelines: the latest complete iteration of each pipeline that has one.
        baseline: the timeline kept from the stock baseline.
        columns: all ranks.
    """

    frontier: Frontier | None
    timelines: Mapping[int, MeasuredTimeline]
    baseline: MeasuredTimeline | None
    columns: RankColumns

    @property
    def shown(self) -> MeasuredTimeline | None:
        """The timeline that is stored: the first pipeline's that has one."""
        return self.timelines[min(self.timelines)] if self.timelines else None
