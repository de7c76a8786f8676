"""An index from GPUs to ranks, over all jobs of a principal: a GPU runs one rank.

Two jobs (or two ranks) that set clocks on one GPU would undo each other's plans, and its energy would count
twice. But a UUID is only an agent's claim: it blocks the GPU only for the agent's own principal, and reveals
the job to nobody else. After a restart, the claim's principal is unknown until the agent is back; until then
it blocks the GPU for every principal that may speak for the job.

The index is only a hint; the rank's job has the truth. So an entry is not removed when its rank leaves, is
lost or finishes, or its job ends: it has no effect then, and is replaced when the GPU or the rank appears
elsewhere. There are never more entries than ranks.
"""

from collections.abc import Callable

from perseus.service.domain.errors import GpuAlreadyServedError
from perseus.service.domain.gpu_claims import Place
from perseus.service.domain.principals import Principal
from perseus.service.domain.specification import Coordinates


class GpuIndex:
    """Finds the rank that is on a GPU.

    `lease_on_gpu_s` returns how much of a rank's lease is left, s, or None if it is no longer on the GPU;
    `principal_of` returns the name of the principal whose agent serves a rank now, "" if none is connected.
    """

    def __init__(
        self,
        lease_on_gpu_s: Callable[[str, Coordinates, str], float | None],
        principal_of: Callable[[str, Coordinates], str],
    ) -> None:
        self._lease_on_gpu_s = lease_on_gpu_s
        self._principal_of = principal_of
        self._jobs: dict[str, dict[Place, None]] = {}
        # By the name of the principal ("" if unknown) and UUID.
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
                and (lease_left_s := self._lease_on_gpu_s(other_job_id, other, gpu_uuid)) is not None
            ):
                raise GpuAlreadyServedError(
                    gpu_uuid=gpu_uuid,
                    job_id=other_job_id,
                    pipeline=other.pipeline,
                    stage=other.stage,
                    tensor=other.tensor,
                    lease_left_s=lease_left_s,
                )

    def put(self, principal_name: str, job_id: str, rank: Coordinates, gpu_uuid: str) -> None:
        """Record that a rank is on a GPU, and on no other; `principal_name` is "" if unknown."""
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
        """Return the jobs with a rank on a GPU, now or last, as claimed by any principal."""
        return {job_id for job_id, _ in self._jobs.get(gpu_uuid, ())}

    def is_last_on(self, principal_name: str, place: Place, gpu_uuid: str) -> bool:
        """Return whether a rank was the last of a principal's on a GPU."""
        return self._places.get((principal_name, gpu_uuid)) == place

    def __len__(self) -> int:
        return len(self._places)
