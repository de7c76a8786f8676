"""What agents say that GPUs draw, second by second: by whom, until it is too old. Pure.

A reading counts for a GPU whose rank the agent's stream has joined, and for all others only where its
credential is that of the host: no tenant's agent speaks of GPUs that it has nothing to do with. Where the
host's own agent tells of a GPU, that counts; a tenant can say no more than whose job it is. No GPU counts
with more than its model can draw.

Whose power it is, is known when it is asked for: ranks come and go, and a GPU that runs none of them (or one
of a job that is over) counts for its host's feed all the same.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from perseus.service.domain.power_reading import PowerReading, max_power_w

INTERVAL_S = 1.0
"""How often agents are asked to tell."""
KEPT_S = 3.5
"""For how long a reading counts: two may get lost, or be late."""

CONFLICT_W, CONFLICT_SHARE = 50.0, 0.25
"""What two agents may tell apart of one GPU, on average: their seconds are not the same."""

_LATEST_WEIGHT = 0.1
"""Of the latest look, in that average."""

_MIN_PART = 1e-6
"""Of a GPU: counts are made from shares."""


@dataclass(slots=True)
class PowerTotals:
    """What is drawn now, as far as it was told.

    Attributes:
        jobs_w: by job and feed.
        gpu_counts: of the jobs' GPUs in it, by job and feed.
        others_w: by feed, of GPUs that run no rank.
        doubtful_counts: by feed, GPUs that are said to draw more than they can, to run ranks of several jobs,
            to be on several feeds, or to draw this and that.
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
    """What an agent says of one GPU. `job_id`: whose rank it runs there; None for none that counts."""

    feed: str
    is_of_host: bool
    job_id: str | None
    power_w: float
    max_w: float

    @property
    def counted_w(self) -> float:
        return min(self.power_w, self.max_w)


class PowerReadings:
    """The latest reading of each agent. Times are of one clock that never goes back."""

    def __init__(self) -> None:
        self._latest: dict[str, _Reading] = {}
        # Of GPUs that several agents tell of: how much more the first tells than the last, on average.
        self._differences_w: dict[str, float] = {}

    def take(
        self, instance_id: str, feed: str, reading: PowerReading, now_s: float, *, is_of_host: bool
    ) -> None:
        """Take what an agent says, whose host is on a feed; `is_of_host`: its credential is that host's."""
        self._latest[instance_id] = _Reading(now_s, feed, is_of_host, reading)

    def forget(self, instance_id: str) -> None:
        """Let what an agent told count no more: its stream has ended."""
        self._latest.pop(instance_id, None)

    def totals(
        self,
        now_s: float,
        gpus_of: Callable[[str], Mapping[str, JoinedGpu]],
        jobs_on: Callable[[str], Collection[str]],
        counted: Collection[str],
    ) -> PowerTotals:
        """Add up what is drawn.

        `gpus_of` tells the GPUs, by UUID, whose ranks an agent's stream has joined, and none has since;
        `jobs_on` the jobs whose ranks are on a GPU, or were last, whoever says so. One of a job that is not
        `counted` is any other. A GPU that several agents see counts once.
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
    """Count one GPU, of which there is at least one claim."""
    of_host = [claim for claim in claims if claim.is_of_host]
    if of_host:
        claim = max(of_host, key=lambda each: each.counted_w)
        jobs = {each.job_id for each in of_host if each.job_id is not None} or set(jobs_on_it)
        if len(jobs) == 1:
            _add(claim, jobs.pop(), found)
        elif not jobs:
            found.others_w[claim.feed] = found.others_w.get(claim.feed, 0.0) + claim.counted_w
        # Of several each counts with its iterations' share: whose the reading is, nobody knows.
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
    """Return what a job draws on each feed, and whether agents tell of all its GPUs.

    Those that none tells of count with their share of what the latest iteration drew. `gpus`: how many of
    its GPUs are on each feed.
    """
    powers_w, is_whole = dict(reported_w), True
    for feed, count in gpus.items():
        missing = count - reported_counts.get(feed, 0)
        if missing > _MIN_PART:
            is_whole = False
            powers_w[feed] = powers_w.get(feed, 0.0) + missing / count * iteration_w.get(feed, 0.0)
    return powers_w, is_whole
