"""Clocks that GPUs do not reach: a power cap or heat holds them lower. Part of the state machine.

Large GPUs meet their power cap all the time, and a profile measured under it holds: the cap is in its times.
So a cap matters only where iterations are slower than planned (the guard says that the promise would be
broken, or a pipeline is a straggler). Then each rank is looked at: one whose GPU was held below its clock in
all of its latest iterations, and reached less than its stage is planned with, explains it. The highest clock
that it reached is what it can do; its stage is planned without those above it (`ranks.usable_clocks`), and
stock is measured again, which is no faster either.

While a stage is profiled, a clock that its ranks are held below can't be measured: what the counter says
then is of another clock. So there a cap counts at once.

Nobody sees whether the cause has passed without asking for those clocks again. So they are, after
`FIRST_HOLD_S`, and where that was in vain after twice as long every time, at most `LONGEST_HOLD_S`.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from perseus.service.domain.model import Clocks, stage_clocks
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.telemetry import IterationColumns
from perseus.service.job.ranks.usable_clocks import MIN_CLOCKS, UsableClocks

CAPPING_REASONS = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
"""NVML's bits of what holds a GPU below its clock: power cap, slowdown, heat (two), power brake."""

INITIAL_HOLD_S = 1800.0
MAX_HOLD_S = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class Cap:
    """A rank's GPU reached `clock_mhz` where its stage is planned with more; `reasons` are NVML's bits."""

    rank: Coordinates
    clock_mhz: int
    planned_mhz: int
    reasons: int


@dataclass(slots=True)
class _Held:
    clocks_mhz: deque[int]
    reasons: int


class CapWatch:
    """Follows the ranks whose GPUs are held below their clocks: nothing is kept of the others.

    Attributes:
        hold_s: for how long clocks are done without from now on.
    """

    def __init__(self, iteration_count: int) -> None:
        """Begin with none.

        Args:
            iteration_count: the latest iterations of a rank, in all of which it must have been held.
        """
        self._iteration_count = iteration_count
        self.hold_s = INITIAL_HOLD_S
        self._held: dict[Coordinates, _Held] = {}
        self._until_s: float | None = None

    def take(self, rank: Coordinates, rows: IterationColumns) -> None:
        """Take a rank's iterations."""
        clocks_mhz = rows.capped_clock_mhz or (0,) * len(rows.iteration)
        touched = rows.has_clock_change or (False,) * len(rows.iteration)
        for reasons, clock_mhz, has_clock_change in zip(
            rows.clock_event_reasons, clocks_mhz, touched, strict=True
        ):
            if has_clock_change:
                continue
            if not (reasons & CAPPING_REASONS and clock_mhz):
                self._held.pop(rank, None)
                continue
            held = self._held.setdefault(rank, _Held(deque(maxlen=self._iteration_count), 0))
            held.clocks_mhz.append(clock_mhz)
            held.reasons = reasons & CAPPING_REASONS

    def explain(
        self,
        clocks: Sequence[Clocks],
        usable_mhz: UsableClocks,
        pipelines: Collection[int],
    ) -> tuple[Cap, ...]:
        """Return the caps that keep ranks of these pipelines from clocks that their stages could do without.

        Args:
            clocks: that each pipeline has.
            usable_mhz: what each stage can have so far.
            pipelines: those that are slow; all if none.
        """
        caps = []
        for rank, held in self._held.items():
            if len(held.clocks_mhz) < self._iteration_count or (pipelines and rank.pipeline not in pipelines):
                continue
            planned = stage_clocks(clocks[rank.pipeline], rank.stage)
            planned_mhz = planned if isinstance(planned, int) else max(planned)
            # A clock wavers under a cap: the least of what it reached in each iteration is there to be had.
            reached_mhz = min(held.clocks_mhz)
            is_needed = planned_mhz <= usable_mhz[rank.stage][-MIN_CLOCKS:][0]
            if reached_mhz < planned_mhz and not is_needed:
                caps.append(Cap(rank, reached_mhz, planned_mhz, held.reasons))
        return tuple(caps)

    def hold(self, now_s: float) -> float:
        """Do without clocks from now on; return for how long."""
        held_s = self.hold_s
        self._until_s = now_s + held_s
        self.hold_s = min(2 * held_s, MAX_HOLD_S)
        self._held.clear()
        return held_s

    def is_over(self, now_s: float) -> bool:
        """Tell, once, that clocks have been done without for long enough."""
        if self._until_s is None or now_s < self._until_s:
            return False
        self._until_s = None
        return True

    def forget(self, ranks: Collection[Coordinates]) -> None:
        """Ranks are gone, and may come back on other GPUs."""
        for rank in ranks:
            self._held.pop(rank, None)

    def restart(self) -> None:
        """What was capped was so under other limits."""
        self.hold_s = INITIAL_HOLD_S
        self._held.clear()
        self._until_s = None
