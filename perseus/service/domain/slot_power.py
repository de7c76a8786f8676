"""Power budgets over slots of jobs, as values: what each coordinator publishes, and the shares of all."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from perseus.service.domain.power import FeedStatus


@dataclass(frozen=True, slots=True)
class Curve:
    """The least weighted loss of a slot's jobs over their power on one feed.

    Attributes:
        powers_w: rising, from the least that its jobs can draw to what they draw without limits.
        losses: falling, and convex over power.
        weight: the sum of weights of the jobs in it.
    """

    powers_w: tuple[float, ...] = (0.0,)
    losses: tuple[float, ...] = (0.0,)
    weight: float = 0.0

    def loss(self, power_w: float) -> float:
        """Return the loss at a power; less than the least counts as the least."""
        return float(np.interp(power_w, self.powers_w, self.losses))


@dataclass(frozen=True, slots=True)
class SlotPower:
    """What the coordinator of a slot publishes, or, if it is alone, keeps for its next start.

    Attributes:
        kept_version: of the division that it keeps.
        curves: of each feed that is to be divided.
        statuses: of its part of each feed.
        caps_w: the power caps of whole feeds that have one.
    """

    kept_version: int
    curves: Mapping[str, Curve]
    statuses: Mapping[str, FeedStatus]
    caps_w: Mapping[str, float] = field(default_factory=dict)

    def drawn_w(self, feed: str) -> float:
        """Return the power that its jobs and GPUs on a feed are expected to draw."""
        status = self.statuses.get(feed)
        return 0.0 if status is None else status.managed_w + status.unmanaged_w

    def max_w(self, feed: str) -> float:
        """Return that power without any limit."""
        return self.curves[feed].powers_w[-1] if feed in self.curves else self.drawn_w(feed)


@dataclass(frozen=True, slots=True)
class Division:
    """The share of each slot, by number, in every feed that is divided; versions count up.

    `before`: the shares of the version before, which some may still keep.
    """

    version: int = 0
    shares: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    before: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KnownSlot:
    """A slot as all coordinators see it.

    Attributes:
        power: what was published last; None if nothing ever was.
        is_served: whether it has a coordinator.
        is_of_holder: whether that one has published `power`.
    """

    power: SlotPower | None = None
    is_served: bool = False
    is_of_holder: bool = False
