"""The agents' latest power readings of GPUs, until they are too old. Pure.

An agent's reading counts for a GPU whose rank the agent's stream has joined, and for other GPUs only if the
agent has the host's credential: a tenant's agent can't report GPUs that it does not use. If the host's own
agent reports a GPU, its reading counts; a tenant's agent then only adds which job the GPU runs. No GPU counts
with more power than its model can draw.

Readings are assigned to jobs only when they are added up: ranks come and go, and a GPU without a rank (or
with one of an ended job) still counts for its host's feed.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from perseus.service.domain.power_reading import PowerReading, max_power_w

INTERVAL_S = 1.0
"""How often agents are asked for readings."""
KEPT_S = 3.5
"""How long a reading counts: two may get lost or be late."""

CONFLICT_W, CONFLICT_SHARE = 50.0, 0.25
"""How far two agents' readings of one GPU may differ on average: they don't cover the same seconds."""

_LATEST_WEIGHT = 0.1
"""Weight of the latest difference in that average."""

_MIN_PART = 1e-6
"""Smallest part of a GPU that counts: GPU counts are derived from shares."""


@dataclass(slots=True)
class PowerTotals:
    """The present power, as far as agents reported it.

    Attributes:
        jobs_w: by job and feed.
        gpu_counts: the jobs' GPUs included, by job and feed.
        others_w: by feed, of GPUs that run no rank.
        conflicting_counts: by feed, GPUs that are reported to draw more than they can, to run ranks of
            several jobs, to be on several feeds, or to draw contradictory powers.
    """

    jobs_w: dict[str, dict[str, float]] = field(default_factory=dict)
    gpu_counts: dict[str, dict[str, int]] = field(default_factory=dict)
    others_w: dict[str, float] = field(default_factory=dict)
    conflicting_counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JoinedGpu:
    """The GPU of a rank that an agent's stream has joined."""

    job_id: str
    model: str


@dataclass(frozen=True, slots=True)
class _Reading:
    at_s: float
    feed: str
    is_of_host: bool
    reading: PowerReading


@dataclass(frozen=True, slots=True)
class _Claim:
    """An agent's claim about one GPU. `job_id`: the job of its rank there; None if no counted job."""

    feed: str
    is_of_host: bool
    job_id: str | None
    power_w: float
    max_w: float

    @property
    def counted_w(self) -> float:
        return min(self.power_w, self.max_w)


class PowerReadings:
    """The latest reading of each agent. Times are of one monotonic clock."""

    def __init__(self) -> None:
        self._latest: dict[str, _Reading] = {}
        # Of GPUs that several agents report: the mean difference between the first and the last reading.
        self._differences_w: dict[str, float] = {}

    def take(
        self, instance_id: str, feed: str, reading: PowerReading, now_s: float, *, is_of_host: bool
    ) -> None:
        """Add a reading of an agent on a feed; `is_of_host`: the agent has its host's credential."""
        self._latest[instance_id] = _Reading(now_s, feed, is_of_host, reading)

    def forget(self, instance_id: str) -> None:
        """Drop an agent's reading, as its stream has ended."""
        self._latest.pop(instance_id, None)

    def totals(
        self,
        now_s: float,
        gpus_of: Callable[[str], Mapping[str, JoinedGpu]],
        jobs_on: Callable[[str], Collection[str]],
        counted: Collection[str],
    ) -> PowerTotals:
        """Add up the present power.

        `gpus_of` returns the GPUs, by UUID, whose ranks an agent's stream has joined and no other stream
        since; `jobs_on` returns the jobs with a rank on a GPU, now or last, as claimed by any principal. GPUs
        of jobs that are not `counted` count as running no rank. A GPU that several agents report counts once.
        """
        self._latest = {key: latest for key, latest in self._latest.items() if latest.at_s > now_s - KEPT_S}
        claims: dict[str, list[_Claim]] = {}
        for instance_id, latest in self._latest.items():
            joined = gpus_of(instance_id)
            for gpu_uuid, power_w in zip(latest.reading.gpu_uuids, latest.reading.powers_w, strict=True):
                gpu = joined.get(gpu_uuid)
                if gpu is not None or latest.is_of_host:
                    job_id = None if gpu is None or gpu.job_id not in counted else gpu.job_id
                    max_w = max_power_w("" if gpu is None else gpu.model)
                    claim = _Claim(latest.feed, latest.is_of_host, job_id, power_w, max_w)
                    claims.setdefault(gpu_uuid, []).append(claim)
        found = PowerTotals()
        differences_w = {}
        for gpu_uuid, some in claims.items():
            if len(some) > 1:
                latest_w = some[0].power_w - some[-1].power_w
                before_w = self._differences_w.get(gpu_uuid, 0.0)
                differences_w[gpu_uuid] = before_w + _LATEST_WEIGHT * (latest_w - before_w)
            _count(some, {each for each in jobs_on(gpu_uuid) if each in counted}, found)
            if _is_conflicting(some, differences_w.get(gpu_uuid, 0.0)):
                for feed in {claim.feed for claim in some}:
                    found.conflicting_counts[feed] = found.conflicting_counts.get(feed, 0) + 1
        self._differences_w = differences_w
        return found


def _is_conflicting(claims: list[_Claim], difference_w: float) -> bool:
    if len({claim.feed for claim in claims}) > 1 or any(claim.power_w > claim.max_w for claim in claims):
        return True
    if len({claim.job_id for claim in claims if claim.job_id is not None}) > 1:
        return True
    return abs(difference_w) > max(CONFLICT_W, CONFLICT_SHARE * max(claim.power_w for claim in claims))


def _count(claims: list[_Claim], jobs_on_it: Collection[str], found: PowerTotals) -> None:
    """Count one GPU, which has at least one claim."""
    of_host = [claim for claim in claims if claim.is_of_host]
    if of_host:
        claim = max(of_host, key=lambda each: each.counted_w)
        jobs = {each.job_id for each in of_host if each.job_id is not None} or set(jobs_on_it)
        if len(jobs) == 1:
            _add(claim, jobs.pop(), found)
        elif not jobs:
            found.others_w[claim.feed] = found.others_w.get(claim.feed, 0.0) + claim.counted_w
        # With several jobs, nobody knows whose power it is: each counts with its iterations' share instead.
        return
    for job_id, claim in {each.job_id: each for each in claims}.items():
        if job_id is not None:
            _add(claim, job_id, found)
    if all(claim.job_id is None for claim in claims):
        claim = max(claims, key=lambda each: each.counted_w)
        found.others_w[claim.feed] = found.others_w.get(claim.feed, 0.0) + claim.counted_w


def _add(claim: _Claim, job_id: str, found: PowerTotals) -> None:
    powers_w = found.jobs_w.setdefault(job_id, {})
    powers_w[claim.feed] = powers_w.get(claim.feed, 0.0) + claim.counted_w
    counts = found.gpu_counts.setdefault(job_id, {})
    counts[claim.feed] = counts.get(claim.feed, 0) + 1


def completed_w(
    reported_w: Mapping[str, float],
    reported_counts: Mapping[str, float],
    iteration_w: Mapping[str, float],
    gpus: Mapping[str, float],
) -> tuple[dict[str, float], bool]:
    """Return a job's power on each feed, and whether agents report all its GPUs.

    GPUs without a reading count with their share of the latest iteration's power. `gpus`: how many of the
    job's GPUs are on each feed.
    """
    powers_w, is_whole = dict(reported_w), True
    for feed, count in gpus.items():
        missing = count - reported_counts.get(feed, 0)
        if missing > _MIN_PART:
            is_whole = False
            powers_w[feed] = powers_w.get(feed, 0.0) + missing / count * iteration_w.get(feed, 0.0)
    return powers_w, is_whole
