"""Keeps a job without a plan at or below the maximum clock of a power budget. Part of the state machine.

Stock under a maximum clock replaces stock, and differs from it: measurements there never count as the stock
baseline. Plans stay as they are. Two things wait until the maximum clock is lifted:

- the stock baseline;
- a round of profiling with higher clocks, or with a stage at stock, which is higher than any clock.

Measurements in the meantime may show the effect of the maximum clock rather than that of the plans;
`is_comparable` decides which iterations still count. Iterations in which clocks were changed, by an urgent
offer or a maximum clock, never do.
"""

from collections.abc import Iterable

from perseus.service.domain.commands import SendMaxClock
from perseus.service.domain.measured import JobIteration
from perseus.service.domain.model import (
    STOCK,
    STOCK_MHZ,
    Clocks,
    HoldClocks,
    JobState,
    MaxClock,
    RankState,
    StockClocks,
)
from perseus.service.domain.records import JobRecord
from perseus.service.job.command_buffer import CommandBuffer
from perseus.service.job.planning.offers import OfferBoard
from perseus.service.job.ranks.rank_table import RankTable
from perseus.service.job.ranks.usable_clocks import stages_at_stock

_WAITING = {JobState.BASELINE: "the stock baseline is", JobState.PROFILING: "higher clocks are"}


class MaxClockEnforcer:
    """A job's maximum clock and its consequences.

    Attributes:
        deferred_round: the round of profiling that waits until the maximum clock is lifted, if any.
    """

    def __init__(
        self, record: JobRecord, ranks: RankTable, offers: OfferBoard, buffer: CommandBuffer
    ) -> None:
        self.deferred_round: HoldClocks | None = None
        self._record = record
        self._ranks = ranks
        self._offers = offers
        self._buffer = buffer

    @property
    def max_clock(self) -> MaxClock | None:
        """The maximum clock where no plan is in force; None without one."""
        return self._record.max_clock

    @property
    def stock(self) -> StockClocks:
        """The clocks that currently replace stock."""
        return STOCK if self.max_clock is None else StockClocks(self.max_clock.clock_mhz)

    def order(self, max_clock: MaxClock | None) -> bool:
        """Take another maximum clock, or None, and send it to the ranks; return whether it has changed."""
        if max_clock == self.max_clock:
            return False
        self._record.max_clock = max_clock
        for rank in self._ranks:
            if rank.state is RankState.CONNECTED:
                self._buffer.do(SendMaxClock(rank.coordinates, rank.instance_id, max_clock))
        return True

    def offer_stock(self, *, is_urgent: bool = False) -> None:
        """Set stock, under the maximum clock if there is one, as the desired clocks of all pipelines."""
        self._offers.set_desired(range(len(self._offers)), self.stock, is_urgent=is_urgent)

    def hold(self, round_: HoldClocks) -> None:
        """Let all pipelines hold the clocks of a round; or defer it, if they exceed the maximum clock."""
        max_clock = self.max_clock
        is_above = max_clock is not None and any(
            clock_mhz == STOCK_MHZ or clock_mhz > max_clock.clock_mhz for clock_mhz in round_.clocks_mhz
        )
        self.deferred_round = round_ if is_above else None
        if is_above:
            self.offer_stock(is_urgent=True)
        else:
            self._offers.set_desired(range(len(self._offers)), round_)

    def why_waiting(self, state: JobState) -> str | None:
        """Return what waits until the maximum clock is lifted in a state; None if nothing does."""
        is_waiting = state is JobState.BASELINE or self.deferred_round is not None
        if self.max_clock is None or not is_waiting:
            return None
        return (
            f"{_WAITING[state]} measured once the maximum clock of {self.max_clock.clock_mhz} MHz is lifted"
        )

    def is_comparable(self, iteration: JobIteration) -> bool:
        """Tell whether an iteration can show anything about plans and pipelines.

        Iterations in which clocks changed can't, nor those in which only some pipelines have their new
        clocks. Under a maximum clock, iterations that left their plan were slowed by it, and so is a stage
        that stays at stock.
        """
        if iteration.has_clock_change or self._offers.is_urgent:
            return False
        if self.max_clock is None:
            return True
        return iteration.is_regular and not stages_at_stock(self._ranks.usable_clocks_mhz())

    def validate(self, state: JobState, offered: Iterable[Clocks]) -> None:
        """Check the invariants."""
        assert self.deferred_round is None or (state is JobState.PROFILING and self.max_clock is not None)
        for clocks in offered:
            if isinstance(clocks, StockClocks):
                assert clocks == self.stock
            elif isinstance(clocks, HoldClocks) and self.max_clock is not None:
                assert all(0 < clock_mhz <= self.max_clock.clock_mhz for clock_mhz in clocks.clocks_mhz)
