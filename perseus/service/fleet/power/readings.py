"""What agents say that GPUs draw, second by second: by whom, until it is too old. Pure.

Whose power it is, is known when it is asked for: ranks come and go, and a GPU that runs none of them (or one
of a job that is over) counts for its host's feed all the same.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from perseus.service.domain.power_reading import PowerReading

INTERVAL_S = 1.0
"""How often agents are asked to tell."""
KEPT_S = 3.5
"""For how long a reading counts: two may get lost, or be late."""

_LEAST_PART = 1e-6
"""Of a GPU: counts are made from shares."""


@dataclass(slots=True)
class Drawn:
    """What is drawn now, as far as it was told.

    Attributes:
        jobs_w: by job and feed.
        gpu_counts: of the jobs' GPUs in it, by job and feed.
        others_w: by feed, of GPUs that run no rank.
    """

    jobs_w: dict[str, dict[str, float]] = field(default_factory=dict)
    gpu_counts: dict[str, dict[str, int]] = field(default_factory=dict)
    others_w: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Told:
    at_s: float
    feed: str
    reading: PowerReading


class PowerReadings:
    """The latest reading of each agent. Times are of one clock that never goes back."""

    def __init__(self) -> None:
        self._told: dict[str, _Told] = {}

    def take(self, instance_id: str, feed: str, reading: PowerReading, now_s: float) -> None:
        """Take what an agent says, whose host is on a feed."""
        self._told[instance_id] = _Told(now_s, feed, reading)

    def drawn(
        self,
        now_s: float,
        job_on: Callable[[str], str | None],
        job_ids_of: Callable[[str], Collection[str]],
        counted: Collection[str],
    ) -> Drawn:
        """Add up what is drawn.

        `job_on` tells the job of the rank that a GPU runs, or ran last; `job_ids_of` the jobs of which an
        agent serves ranks: it can't speak for others. A GPU of a job that is not `counted` is any other. One
        that several agents see, and none of them serves, counts once.
        """
        self._told = {key: told for key, told in self._told.items() if told.at_s > now_s - KEPT_S}
        found, others = Drawn(), dict[str, tuple[str, float]]()
        for instance_id, told in self._told.items():
            feed, own_job_ids = told.feed, job_ids_of(instance_id)
            for gpu_uuid, power_w in zip(told.reading.gpu_uuids, told.reading.powers_w, strict=True):
                job_id = job_on(gpu_uuid)
                if job_id is None or job_id not in counted:
                    others[gpu_uuid] = (feed, power_w)
                elif job_id in own_job_ids:
                    powers_w = found.jobs_w.setdefault(job_id, {})
                    powers_w[feed] = powers_w.get(feed, 0.0) + power_w
                    counts = found.gpu_counts.setdefault(job_id, {})
                    counts[feed] = counts.get(feed, 0) + 1
        for feed, power_w in others.values():
            found.others_w[feed] = found.others_w.get(feed, 0.0) + power_w
        return found


def completed_w(
    told_w: Mapping[str, float],
    told_counts: Mapping[str, float],
    iteration_w: Mapping[str, float],
    gpus: Mapping[str, float],
) -> tuple[dict[str, float], bool]:
    """Return what a job draws on each feed, and whether agents tell of all its GPUs.

    Those that none tells of count with their share of what the latest iteration drew. `gpus`: how many of
    its GPUs are on each feed.
    """
    powers_w, is_whole = dict(told_w), True
    for feed, count in gpus.items():
        missing = count - told_counts.get(feed, 0)
        if missing > _LEAST_PART:
            is_whole = False
            powers_w[feed] = powers_w.get(feed, 0.0) + missing / count * iteration_w.get(feed, 0.0)
    return powers_w, is_whole
