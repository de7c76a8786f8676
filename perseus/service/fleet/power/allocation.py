"""Chooses a plan for each job so that every feed keeps its limit at the least weighted loss of speed.

The relaxed problem (:mod:`perseus.service.fleet.power.relaxation`) mixes plans, but a job runs one plan at a
time. So the few jobs that it leaves between plans take the fastest plan that draws no more than the mixture,
and the remaining power then goes where it gains most. With one feed, the result is never worse than the best
mixture by more than one piece of one job's hull. Every plan keeps the job's tolerance, not only the average:
points beyond it are never chosen.

With several feeds, the result keeps every limit that mixtures keep, provided that slower points draw no more
on any feed. Where jobs can only trade one feed's power for another's, rounding may miss the choice that keeps
all limits.

If a limit can't be kept, jobs draw the least that their tolerances allow, and the allocation names the jobs
that would have to be paused: slowing beyond a tolerance is the owner's decision, not ours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perseus.service.fleet.power import relaxation
from perseus.service.fleet.power.demand import JobDemand, PowerPoint
from perseus.service.fleet.power.relaxation import Choices, Floats, Relaxed

_DIGITS = 1e-9
"""Relative rounding error by which a sum of powers may exceed a limit."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """An operating point for each job, and whether they keep every limit.

    Attributes:
        operating_points: the point for each planned job.
        power_w: the resulting power of all jobs on each feed that has a limit, or that a job is on.
        excess_w: by how much each limit that can't be kept is exceeded.
        weighted_loss: the sum over planned jobs of weight × (1 − speed).
        bound: the weighted loss of the best mixture of plans: no choice with at most this excess loses less.
        to_pause: a minimal set of jobs that would have to be paused to keep the limits.
        beyond_tolerance: jobs whose fastest plan is slower than their owner allows, regardless of budgets.
    """

    operating_points: Mapping[str, PowerPoint]
    power_w: Mapping[str, float]
    excess_w: Mapping[str, float]
    weighted_loss: float
    bound: float
    to_pause: tuple[str, ...]
    beyond_tolerance: tuple[str, ...]

    @property
    def is_compliant(self) -> bool:
        """Whether the points keep every limit."""
        return not self.excess_w


def allocate(jobs: Sequence[JobDemand], limits_w: Mapping[str, float]) -> Allocation:
    """Choose an operating point for each job that has any.

    Args:
        jobs: all jobs on the feeds; those without points count with their measured power.
        limits_w: limits by feed; a feed without one is unlimited.
    """
    feeds = sorted(limits_w)
    planned = [job for job in jobs if job.points]
    allowed = [job.allowed for job in planned]
    choices = [
        Choices(
            np.array([job.weight * (1 - point.speed) for point in points]),
            np.array([[point.power_w.get(feed, 0.0) for feed in feeds] for point in points]),
        )
        for job, points in zip(planned, allowed, strict=True)
    ]
    given_w = np.array([limits_w[feed] for feed in feeds])
    fixed_w = np.array([sum(j.measured_w.get(feed, 0.0) for j in jobs if not j.points) for feed in feeds])
    chosen, bound = _choose(choices, given_w - fixed_w) if choices else ([], 0.0)
    operating_points = {
        job.job_id: points[k] for job, points, k in zip(planned, allowed, chosen, strict=True)
    }
    power_w = _total_w(jobs, operating_points, feeds)
    excess_w = {
        feed: power_w[feed] - limit_w
        for feed, limit_w in limits_w.items()
        if power_w[feed] > limit_w + _DIGITS * abs(limit_w)
    }
    return Allocation(
        operating_points=operating_points,
        power_w=power_w,
        excess_w=excess_w,
        weighted_loss=float(sum(choice.loss[k] for choice, k in zip(choices, chosen, strict=True))),
        bound=bound,
        to_pause=_jobs_to_pause(jobs, operating_points, excess_w),
        beyond_tolerance=tuple(job.job_id for job in planned if job.is_beyond_tolerance),
    )


def _total_w(
    jobs: Sequence[JobDemand], operating_points: Mapping[str, PowerPoint], feeds: Sequence[str]
) -> dict[str, float]:
    total_w = dict.fromkeys(feeds, 0.0)
    for job in jobs:
        for feed, power_w in _drawn_w(job, operating_points).items():
            total_w[feed] = total_w.get(feed, 0.0) + power_w
    return total_w


def _drawn_w(job: JobDemand, operating_points: Mapping[str, PowerPoint]) -> Mapping[str, float]:
    return operating_points[job.job_id].power_w if job.points else job.measured_w


def _choose(jobs: Sequence[Choices], limits_w: Floats) -> tuple[list[int], float]:
    """Return each job's point, and the loss of the best mixture."""
    if not len(limits_w):
        fastest = [int(np.argmin(job.loss)) for job in jobs]
        return fastest, float(sum(job.loss.min() for job in jobs))
    min_w: Floats = np.sum([job.power_w.min(axis=0) for job in jobs], axis=0)
    limits_w = np.maximum(limits_w, min_w)
    relaxed: Relaxed | None
    if len(limits_w) == 1:
        relaxed = relaxation.relax_one_feed(jobs, float(limits_w[0]))
    else:
        relaxed = relaxation.relax(jobs, limits_w)
        if relaxed is None:  # infeasible: less power on one feed would need more on another
            limits_w = limits_w + relaxation.min_excess_w(jobs, limits_w) * (1 + _DIGITS) + 1e-6
            relaxed = relaxation.relax(jobs, limits_w)
            assert relaxed is not None
    return _filled(jobs, _lowered(jobs, relaxed, limits_w), limits_w), relaxed.loss


def _lowered(jobs: Sequence[Choices], relaxed: Relaxed, limits_w: Floats) -> list[int]:
    """Round mixtures to points, then slow jobs down until the limits hold or nothing helps."""
    scale_w = np.maximum(limits_w, 1.0)
    chosen = [_rounded(job, shares, scale_w) for job, shares in zip(jobs, relaxed.shares, strict=True)]
    total_w: Floats = np.sum([job.power_w[k] for job, k in zip(jobs, chosen, strict=True)], axis=0)
    while True:
        over = np.maximum(0.0, (total_w - limits_w) / scale_w - _DIGITS)
        if not over.any():
            return chosen
        best: tuple[float, int, int] | None = None
        for number, (job, k) in enumerate(zip(jobs, chosen, strict=True)):
            after = np.maximum(0.0, (total_w - job.power_w[k] + job.power_w - limits_w) / scale_w - _DIGITS)
            relieved = over.sum() - after.sum(axis=1)
            prices = np.full(len(relieved), np.inf)
            helps = relieved > 1e-12
            prices[helps] = np.maximum(0.0, job.loss[helps] - job.loss[k]) / relieved[helps]
            index = int(np.argmin(prices))
            if np.isfinite(prices[index]) and (best is None or prices[index] < best[0]):
                best = float(prices[index]), number, index
        if best is None:
            return chosen
        _, number, index = best
        total_w = total_w - jobs[number].power_w[chosen[number]] + jobs[number].power_w[index]
        chosen[number] = index


def _rounded(job: Choices, shares: Sequence[tuple[int, float]], scale_w: Floats) -> int:
    """Return the fastest point that draws no more than a mixture on any feed; else the lower of its parts."""
    if len(shares) == 1:
        return shares[0][0]
    mixed_w = sum(share * job.power_w[k] for k, share in shares)
    losses = np.where(np.all(job.power_w <= mixed_w + _DIGITS * scale_w, axis=1), job.loss, np.inf)
    best = int(np.argmin(losses))
    if np.isfinite(losses[best]):
        return best
    return min((k for k, _ in shares), key=lambda k: float(np.max(job.power_w[k] / scale_w)))


def _filled(jobs: Sequence[Choices], chosen: Sequence[int], limits_w: Floats) -> list[int]:
    """Let jobs run faster, at any of their points, while power is left; the largest gain comes first."""
    filled = list(chosen)
    total_w: Floats = np.sum([job.power_w[k] for job, k in zip(jobs, filled, strict=True)], axis=0)
    # A feed whose limit can't be kept must not be loaded further.
    headroom_w = np.maximum(limits_w * (1 + _DIGITS), total_w)
    while True:
        best: tuple[float, int, int] | None = None
        for number, (job, k) in enumerate(zip(jobs, filled, strict=True)):
            fits = np.all(total_w - job.power_w[k] + job.power_w <= headroom_w, axis=1)
            losses = np.where(fits, job.loss, np.inf)
            index = int(np.argmin(losses))
            gain = float(job.loss[k] - losses[index])
            if gain > 1e-12 and (best is None or gain > best[0]):
                best = gain, number, index
        if best is None:
            return filled
        _, number, index = best
        total_w = total_w - jobs[number].power_w[filled[number]] + jobs[number].power_w[index]
        filled[number] = index


def _jobs_to_pause(
    jobs: Sequence[JobDemand], operating_points: Mapping[str, PowerPoint], excess_w: Mapping[str, float]
) -> tuple[str, ...]:
    """Return jobs whose pause brings every feed to its limit, the least weight per watt first.

    If even that is not enough, return all jobs whose pause would help.
    """
    left_w = dict(excess_w)
    freed_w: dict[str, dict[str, float]] = {}
    for job in jobs:
        drawn_w = _drawn_w(job, operating_points)
        own_w = {
            feed: max(0.0, drawn_w.get(feed, 0.0) - job.paused_power_w.get(feed, 0.0)) for feed in excess_w
        }
        if any(own_w.values()):
            freed_w[job.job_id] = own_w
    weights = {job.job_id: job.weight for job in jobs}

    def price(job_id: str) -> float:
        relieved_w = sum(min(freed_w[job_id][feed], left_w[feed]) for feed in left_w)
        return weights[job_id] / relieved_w if relieved_w > 0 else float("inf")

    paused: list[str] = []
    while any(excess > 0 for excess in left_w.values()):
        candidates = [job_id for job_id in freed_w if job_id not in paused and price(job_id) < float("inf")]
        if not candidates:
            break
        job_id = min(candidates, key=price)
        paused.append(job_id)
        left_w = {feed: max(0.0, excess - freed_w[job_id][feed]) for feed, excess in left_w.items()}
    # A large job chosen late may make a small one chosen early unnecessary.
    for job_id in sorted(paused, key=weights.__getitem__, reverse=True):
        rest = [other for other in paused if other != job_id]
        if all(
            sum(freed_w[other][feed] for other in rest) >= min(excess, sum(freed_w[o][feed] for o in paused))
            for feed, excess in excess_w.items()
        ):
            paused = rest
    return tuple(paused)
