"""How far jobs without plans are held down where plans alone can't keep a feed's limit.

Jobs without plans (their baseline is measured, they are profiled, at stock) draw what they like, and others
make room for that as far as their owners allow. What is missing then is taken from their clocks: power falls
at least as fast as the clock where voltage falls with it, so a share of the power is had by no more than the
same share of the highest clock. Below that, where it does not, the limit may not be kept, which is said.
"""

import math
from collections.abc import Iterable

STEP = 0.05
"""Of the highest clock: noise is not to move ceilings, as each change spoils an iteration."""


class ClockShares:
    """Of each limited feed, the share of their highest clocks that jobs without plans may have."""

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}

    def look(self, feed: str, free_w: float, left_w: float) -> None:
        """Take what they draw if nothing holds them down, and what is left to them.

        Shares fall at once, and rise when there is room for more than a step.
        """
        share = math.inf if free_w <= 0 else max(0.0, left_w) / free_w
        before = self._shares.get(feed, 1.0)
        if before <= share < before + 2 * STEP and before < 1:
            return
        self._shares[feed] = 1.0 if share >= 1 else math.floor(share / STEP) * STEP

    def release(self, limited: Iterable[str]) -> None:
        """Hold nobody down on any other than these feeds."""
        self._shares = {feed: self._shares[feed] for feed in limited if feed in self._shares}

    def share(self, feeds: Iterable[str]) -> float:
        """Return the share of a job's highest clock that it may have on its feeds; 1 if all."""
        return min((self._shares.get(feed, 1.0) for feed in feeds), default=1.0)
