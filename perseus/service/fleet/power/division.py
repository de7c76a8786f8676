"""Divides feeds over slots of jobs: the coordinator of each keeps its share as if it were a feed. Pure.

A coordinator is to the fleet what a job is to a coordinator: it offers its *curve*, the weighted loss of
speed of all its jobs over their power. Hulls of jobs that are on one feed each add up exactly, so the least
loss of the whole feed comes from equal marginal losses of all slots.

A share is a part of the feed, not a number of watts. Every coordinator knows the feed's budgets and ramps,
and keeps its part of the power cap that follows from them: a limit falls everywhere at once, also while
nobody divides. Whichever division a coordinator has read last, the shares in use must add up to 1 at most. So
a division is replaced only once all coordinators keep it, and a share rises only into what others have given
up by then.

A slot that nobody serves gets what its GPUs drew last, within its share: they go on under their last plans.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perseus.service.domain.power import FeedStatus
from perseus.service.domain.slot_power import Curve, Division, KnownSlot
from perseus.service.fleet.power import relaxation
from perseus.service.fleet.power.demand import JobDemand
from perseus.service.fleet.power.feed_watch import FIRST_MARGIN, MIN_WINDOW_S
from perseus.service.fleet.power.relaxation import Choices, Floats

MAX_POINTS = 32
"""Points of a published curve. Between them it counts as straight, which is no less than the real loss."""

MARGIN = 2 * FIRST_MARGIN
"""The part of a limit that plans leave at most; each slot gets the same."""

MIN_GAIN = 0.0005
"""The gain in speed that is worth a new division, as a share of the sum of weights: new shares are new
limits, under which plans are measured anew."""

UNPLANNED_ROOM = 1.05
"""What jobs without plans get of what they draw, as they may draw more at any time."""

_MIN_PART = 0.001
"""Smallest part of a limit that counts."""

_DIGITS = 1e-9


@dataclass(frozen=True, slots=True)
class Hull:
    """The hull of one job's weighted loss over its planned power on a feed: its least point, and its pieces.

    Attributes:
        least_w, most_loss: at the least power that its owner's tolerance allows.
        added_w, saved: `[K]`, the power that each piece adds, and the loss that it saves.
        weight: of the job.
    """

    least_w: float
    most_loss: float
    added_w: Floats
    saved: Floats
    weight: float

    @classmethod
    def of(cls, demand: JobDemand, feed: str) -> "Hull":
        """Return the hull of a job that has points on a feed."""
        points = demand.allowed
        powers_w = np.array([point.power_w[feed] for point in points])
        losses = np.array([demand.weight * (1 - point.speed) for point in points])
        kept = relaxation.lower_hull(powers_w, losses)
        added_w, saved = np.diff(powers_w[kept]), -np.diff(losses[kept])
        return cls(float(powers_w[kept[0]]), float(losses[kept[0]]), added_w, saved, demand.weight)


def added_up(fixed_w: float, hulls: Sequence[tuple[Hull, float, float]]) -> Curve:
    """Return the sum of jobs' hulls: their pieces by slope.

    Args:
        fixed_w: power that belongs to no hull.
        hulls: each with factors of its power, and of its loss and weight.
    """
    added_w = np.concatenate([[], *(ratio * hull.added_w for hull, ratio, _ in hulls)])
    saved = np.concatenate([[], *(part * hull.saved for hull, _, part in hulls)])
    order = np.argsort(-saved / added_w, kind="stable")
    least_w = fixed_w + sum(ratio * hull.least_w for hull, ratio, _ in hulls)
    most_loss = sum(part * hull.most_loss for hull, _, part in hulls)
    powers_w = least_w + np.cumsum([0.0, *added_w[order]])
    losses = most_loss - np.cumsum([0.0, *saved[order]])
    kept = np.unique(np.linspace(0, len(powers_w) - 1, MAX_POINTS).round().astype(int))
    weight = sum(part * hull.weight for hull, _, part in hulls)
    return Curve(tuple(powers_w[kept].tolist()), tuple(losses[kept].tolist()), weight)


def divided(curves: Sequence[Curve], limit_w: float) -> tuple[float, ...]:
    """Return the share of each curve's slot, with equal marginal losses.

    What nobody needs, and what is missing for the least of all, is spread in proportion.
    """
    if limit_w <= sum(curve.powers_w[0] for curve in curves):
        powers_w = [curve.powers_w[0] for curve in curves]
    else:
        choices = [Choices(np.array(c.losses), np.array(c.powers_w)[:, None]) for c in curves]
        mixed = relaxation.relax_one_feed(choices, limit_w).shares
        powers_w = [
            sum(part * curve.powers_w[k] for k, part in parts)
            for curve, parts in zip(curves, mixed, strict=True)
        ]
    total_w = sum(powers_w)
    return tuple(float(power_w / total_w) if total_w else 1 / len(curves) for power_w in powers_w)


class Divider:
    """The coordinator that divides: that of slot 0. It goes on from the division that was stored last."""

    def __init__(self, division: Division) -> None:
        self.division = division
        self._divided_w: dict[str, float] = {}
        self._worth_since_s: dict[str, float] = {}

    def divide(self, slots: Sequence[KnownSlot], caps_w: Mapping[str, float], now_s: float) -> Division:
        """Return the division to publish now.

        Args:
            slots: by number.
            caps_w: by feed, the power to divide: its power cap, or the limit that is to come.
            now_s: the time.
        """
        if any(self._is_behind(slot) for slot in slots):
            return self.division
        shares = {}
        for feed, cap_w in caps_w.items():
            if (own := self._shares(feed, slots, cap_w, now_s)) is not None:
                shares[feed] = own
        if shares != self.division.shares:
            self.division = Division(self.division.version + 1, shares, self.division.shares)
        return self.division

    def _is_behind(self, slot: KnownSlot) -> bool:
        """Return whether a coordinator may keep an older division.

        One that just took over has not said, but may have read it.
        """
        if not slot.is_served:
            return False
        return not slot.is_of_holder or slot.power is None or slot.power.kept_version < self.division.version

    def _shares(
        self, feed: str, slots: Sequence[KnownSlot], cap_w: float, now_s: float
    ) -> tuple[float, ...] | None:
        current = self.division.shares.get(feed)
        usable_w = (1 - MARGIN) * cap_w
        curves: dict[int, Curve] = {}
        goal = [0.0] * len(slots)
        for number, slot in enumerate(slots):
            if not slot.is_served:
                # Its coordinator may have ended before it kept the present division.
                kept = [
                    some[feed][number]
                    for some in (self.division.shares, self.division.before)
                    if feed in some
                ]
                drawn_w = 0.0 if slot.power is None else slot.power.drawn_w(feed)
                goal[number] = min(max(kept, default=1 / len(slots)), drawn_w / max(cap_w, _DIGITS))
            elif slot.power is None or (feed in slot.power.statuses and feed not in slot.power.curves):
                return current  # it does not know the limit yet
            else:
                curves[number] = slot.power.curves.get(feed, Curve())  # without: it knows no such feed
        left = max(0.0, 1 - sum(goal))
        for number, share in zip(curves, divided([*curves.values()], left * usable_w), strict=True):
            goal[number] = left * share
        is_worth_it = current is None or self._is_worth_it(feed, curves, usable_w, (current, goal), now_s)
        if is_worth_it:
            self._divided_w[feed] = cap_w
            self._worth_since_s.pop(feed, None)
        if current is None:
            return tuple(goal)
        # Whoever keeps the current shares while others keep the next ones, they must add up to 1 at most:
        # shares fall at once, and rise into what is free already.
        rises = {number: max(0.0, goal[number] - current[number]) for number in curves}
        rise = sum(rises.values())
        free = 1 - sum(current[n] if n in curves else max(current[n], goal[n]) for n in range(len(slots)))
        part = min(1.0, free / rise) if free > _DIGITS and rise > 0 else 0.0
        return tuple(
            current[number] + part * rises[number]
            if number in curves and (rises[number] or not is_worth_it)
            else goal[number]
            for number in range(len(slots))
        )

    def _is_worth_it(
        self,
        feed: str,
        curves: Mapping[int, Curve],
        usable_w: float,
        shares: tuple[Sequence[float], Sequence[float]],
        now_s: float,
    ) -> bool:
        """Return whether to go from shares to others: at once if the least of a slot is more than its share,
        or the power cap moves; otherwise once it was worthwhile for a whole window."""
        missing_w, losses = [], []
        for some in shares:
            each = [(curve, some[number] * usable_w) for number, curve in curves.items()]
            missing_w.append(sum(max(0.0, curve.powers_w[0] - power_w) for curve, power_w in each))
            losses.append(sum(curve.loss(power_w) for curve, power_w in each))
        if missing_w[0] - missing_w[1] > _MIN_PART * usable_w:
            return True
        if losses[0] - losses[1] <= MIN_GAIN * sum(curve.weight for curve in curves.values()):
            self._worth_since_s.pop(feed, None)
            return False
        cap_w = usable_w / (1 - MARGIN)
        moved_w = abs(cap_w - self._divided_w.setdefault(feed, cap_w))
        since_s = self._worth_since_s.setdefault(feed, now_s)
        return moved_w > _MIN_PART * usable_w or now_s >= since_s + MIN_WINDOW_S


def whole_status(parts: Sequence[FeedStatus], limit_w: float, power_cap_w: float) -> FeedStatus:
    """Return the status of a feed from those of its parts: it keeps its limit if they all keep theirs."""
    judged_w = [part.judged_w for part in parts if part.judged_w is not None]
    judged_means_w = [part.judged_mean_w for part in parts if part.judged_mean_w is not None]
    return FeedStatus(
        feed=parts[0].feed,
        limit_w=None if limit_w == math.inf else limit_w,
        in_transition=any(part.in_transition for part in parts),
        is_compliant=all(part.is_compliant for part in parts),
        to_pause=tuple(job_id for part in parts for job_id in part.to_pause),
        beyond_tolerance=tuple(job_id for part in parts for job_id in part.beyond_tolerance),
        measured_w=sum(part.measured_w for part in parts),
        managed_w=sum(part.managed_w for part in parts),
        unmanaged_w=sum(part.unmanaged_w for part in parts),
        power_cap_w=None if power_cap_w == math.inf else power_cap_w,
        held=tuple(job_id for part in parts for job_id in part.held),
        judged_w=sum(judged_w) if len(judged_w) == len(parts) else None,
        judged_mean_w=sum(judged_means_w) if len(judged_means_w) == len(parts) else None,
        judged_s=min(part.judged_s for part in parts),
        is_above_power_cap=any(part.is_above_power_cap for part in parts),
        conflicting_gpu_count=sum(part.conflicting_gpu_count for part in parts),
    )
