"""What is left out of telemetry while agents send more than the coordinator takes in time. Pure.

First the rows of computations (they show timelines, and find stragglers), then the sums of iterations, too
(they make up the report, and the evidence for plans). Every fourth iteration is taken whole, the same for all
ranks: an iteration of the job is complete only with all of them. What came first is left out first, as
messages are taken in order.
"""

import enum
from collections.abc import Sequence

KEPT_EVERY = 4
"""Iterations whose number this divides are taken whole."""

_BUSY_SHARE = 0.9
_BUSY_TICKS = (2, 5)
"""There is an overload if the loop has work for this share of the time, for so many ticks in a row: before
rows are left out, and from then on before sums are. All agents' return after a restart is over by then."""

_RESUMED_SHARE = 0.9
"""More is taken again once agents send less than this share of what could be taken before."""

_GROWTH = 1.02
"""How much more could be taken, by assumption, after each tick: what else the machine did may have ended."""


class Part(enum.Enum):
    """What is left out of a batch."""

    ROWS = "rows"
    SUMS = "sums"


class Thinning:
    """Decides what to leave out, tick by tick (one per second)."""

    def __init__(self) -> None:
        # For each part that is left out now: how many batches a second were taken before.
        self._capacities_per_s: list[float] = []
        self._busy_ticks = 0

    @property
    def part(self) -> Part | None:
        """The most that is left out now."""
        return list(Part)[len(self._capacities_per_s) - 1] if self._capacities_per_s else None

    def tick(self, busy_share: float, batches_per_s: float) -> None:
        """Take for which share of the time the loop had work, and how many batches a second were taken."""
        self._capacities_per_s = [_GROWTH * capacity_per_s for capacity_per_s in self._capacities_per_s]
        self._busy_ticks = self._busy_ticks + 1 if busy_share >= _BUSY_SHARE else 0
        part_count = len(self._capacities_per_s)
        if part_count < len(Part) and self._busy_ticks >= _BUSY_TICKS[part_count]:
            self._capacities_per_s.append(batches_per_s)
            self._busy_ticks = 0
        elif (
            self._capacities_per_s
            and not self._busy_ticks
            and batches_per_s < _RESUMED_SHARE * self._capacities_per_s[-1]
        ):
            self._capacities_per_s.pop()

    def left_out(self, iterations: Sequence[int]) -> Part | None:
        """Return what is left out of a rank's batch of these iterations."""
        if not self._capacities_per_s or not iterations:
            return None
        return None if any(iteration % KEPT_EVERY == 0 for iteration in iterations) else self.part
