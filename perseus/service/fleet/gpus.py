"""Which rank is on which GPU, over all jobs of a principal: a GPU runs one rank.

Two jobs (or two ranks) that set clocks on one GPU would undo each other's plans, and its energy would count
twice. But a UUID is only what an agent says: it keeps nobody from a GPU but the principal that the agent
comes with, and tells nobody else of the job. After a restart it is not known who said it until its agent is
back: until then it keeps those from the GPU who may speak for the job.

What a rank's job says of it is the truth; here is only where to look. An entry is therefore not taken away
when its rank leaves, is lost or finishes, or its job ends: it says nothing any more then, and makes way when
the GPU or the rank is seen elsewhere. There are never more entries than ranks.
"""

from collections.abc import Callable

from perseus.service.domain.errors import GpuAlreadyServedError
from perseus.service.domain.principals import Principal
from perseus.service.domain.specification import Coordinates

Place = tuple[str, Coordinates]
"""A job's identifier, and one of its ranks."""


class GpuIndex:
    """Finds the rank that is on a GPU.

    `is_on_gpu` tells whether it still is; `principal_of` the name of the principal whose agent serves a rank
    now, "" for none that is connected.
    """

    def __init__(
        self,
        is_on_gpu: Callable[[str, Coordinates, str], bool],
        principal_of: Callable[[str, Coordinates], str],
    ) -> None:
        self._is_on_gpu = is_on_gpu
        self._principal_of = principal_of
        self._jobs: dict[str, dict[Place, None]] = {}
        # By the name of the principal, "" where it was not known, and by UUID.
        self._places: dict[tuple[str, str], Place] = {}
        self._gpus: dict[Place, tuple[str, str]] = {}

    def check(self, principal: Principal, job_id: str, rank: Coordinates, gpu_uuid: str) -> None:
        """Refuse a GPU that another rank is on.

        Raises:
            GpuAlreadyServedError: names that rank.
        """
        for name in (principal.name, ""):
            other_job_id, other = self._places.get((name, gpu_uuid), (job_id, rank))
            if (
                (other_job_id, other) != (job_id, rank)
                and principal.grant.covers(other_job_id)
                and (name or self._principal_of(other_job_id, other)) in ("", principal.name)
                and self._is_on_gpu(other_job_id, other, gpu_uuid)
            ):
                raise GpuAlreadyServedError(
                    gpu_uuid=gpu_uuid,
                    job_id=other_job_id,
                    pipeline=other.pipeline,
                    stage=other.stage,
                    tensor=other.tensor,
                )

    def put(self, principal_name: str, job_id: str, rank: Coordinates, gpu_uuid: str) -> None:
        """Note that a rank is on a GPU, and on no other; `principal_name` is "" where it is not known."""
        place, gpu = (job_id, rank), (principal_name, gpu_uuid)
        before = self._gpus.get(place)
        if before is not None and self._places.get(before) == place:
            del self._places[before]
            self._leave(before[1], place)
        after = self._places.get(gpu)
        if after is not None:
            self._gpus.pop(after, None)
            self._leave(gpu_uuid, after)
        self._places[gpu] = place
        self._gpus[place] = gpu
        self._jobs.setdefault(gpu_uuid, {})[place] = None

    def _leave(self, gpu_uuid: str, place: Place) -> None:
        self._jobs[gpu_uuid].pop(place, None)
        if not self._jobs[gpu_uuid]:
            del self._jobs[gpu_uuid]

    def jobs_on(self, gpu_uuid: str) -> set[str]:
        """Return the jobs whose ranks are on a GPU, or were last, whoever says so."""
        return {job_id for job_id, _ in self._jobs.get(gpu_uuid, ())}

    def is_last_on(self, principal_name: str, place: Place, gpu_uuid: str) -> bool:
        """Whether of a principal's ranks that one was on a GPU last."""
        return self._places.get((principal_name, gpu_uuid)) == place

    def __len__(self) -> int:
        return len(self._places)
