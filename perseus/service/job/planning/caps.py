"""Clocks that GPUs do not reach because of a power limit or heat. Part of the state machine.

Large GPUs run into their power limit all the time, and a profile measured under it is valid: its times
include the capping. So a capped clock matters only if iterations are slower than planned (the guard would
report a violated prediction, or a pipeline is a straggler). Then every rank is checked: a rank explains the
slowness if its GPU was capped in all of its latest iterations and reached less than its stage's planned
clock. The highest clock that it reached becomes the stage's limit; the stage is planned without higher ones
(`ranks.usable_clocks`), and stock is measured again, as it is no faster either.

While a stage is profiled, a clock that its ranks do not reach can't be measured: the energy counter then
shows another clock. So during profiling a cap counts at once.

Only requesting these clocks again shows whether the cause has passed. So they are retried after growing
delays (`retry_delay`).
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from perseus.service.domain.model import Clocks, stage_clocks
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.telemetry import IterationColumns
from perseus.service.job.ranks.usable_clocks import MIN_CLOCKS, UsableClocks
from perseus.service.job.retry_delay import RetryDelay

CAPPING_REASONS = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
"""NVML's bits for reasons to cap a clock: power cap, slowdown, heat (two), power brake."""


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
    """Tracks the ranks whose GPUs are held below their clocks; it keeps nothing about the others."""

    def __init__(self, iteration_count: int) -> None:
        """Begin without caps.

        Args:
            iteration_count: the number of latest iterations in all of which a rank must have been capped.
        """
        self._iteration_count = iteration_count
        self._delay = RetryDelay()
        self._held: dict[Coordinates, _Held] = {}

    def take(self, rank: Coordinates, rows: IterationColumns) -> None:
        """Take a rank's iterations."""
        if not (any(rows.clock_event_reasons) or any(rows.has_clock_change)):  # as nearly always
            self._held.pop(rank, None)
            return
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
        """Return the caps that keep ranks of these pipelines from clocks that their stages can do without.

        Args:
            clocks: each pipeline's clocks.
            usable_mhz: each stage's usable clocks so far.
            pipelines: the slow ones; empty for all.
        """
        caps = []
        for rank, held in self._held.items():
            if len(held.clocks_mhz) < self._iteration_count or (pipelines and rank.pipeline not in pipelines):
                continue
            planned = stage_clocks(clocks[rank.pipeline], rank.stage)
            planned_mhz = planned if isinstance(planned, int) else max(planned)
            # A capped clock fluctuates; the lowest value over the iterations can be relied on.
            reached_mhz = min(held.clocks_mhz)
            is_needed = planned_mhz <= usable_mhz[rank.stage][-MIN_CLOCKS:][0]
            if reached_mhz < planned_mhz and not is_needed:
                caps.append(Cap(rank, reached_mhz, planned_mhz, held.reasons))
        return tuple(caps)

    def hold(self, now_s: float) -> float:
        """Exclude clocks from now on; return for how long."""
        self._held.clear()
        return self._delay.begin(now_s)

    def is_over(self, now_s: float) -> bool:
        """Return True once when the exclusion of clocks has ended."""
        return self._delay.is_over(now_s)

    def forget(self, ranks: Collection[Coordinates]) -> None:
        """Forget ranks that are gone: they may return on other GPUs."""
        for rank in ranks:
            self._held.pop(rank, None)

    def restart(self) -> None:
        """Discard all caps, as they belonged to other GPU limits."""
        self._delay = RetryDelay()
        self._held.clear()
