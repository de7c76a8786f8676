"""Which rank is on which GPU, over all jobs: a GPU runs one rank.

Two jobs (or two ranks) that set clocks on one GPU would undo each other's plans, and its energy would count
twice. What a rank's job says of it is the truth; here is only where to look. An entry is therefore not taken
away when its rank leaves, is lost or finishes, or its job ends: it says nothing any more then, and makes way
when the GPU or the rank is seen elsewhere. There are never more entries than ranks.
"""

from collections.abc import Callable

from perseus.service.domain.errors import GpuAlreadyServedError
from perseus.service.domain.specification import Coordinates

Place = tuple[str, Coordinates]
"""A job's identifier, and one of its ranks."""


class GpuIndex:
    """Finds the rank that is on a GPU. `is_on_gpu` tells whether it still is."""

    def __init__(self, is_on_gpu: Callable[[str, Coordinates, str], bool]) -> None:
        self._is_on_gpu = is_on_gpu
        self._places: dict[str, Place] = {}
        self._gpus: dict[Place, str] = {}

    def check(self, job_id: str, rank: Coordinates, gpu_uuid: str) -> None:
        """Refuse a GPU that another rank is on.

        Raises:
            GpuAlreadyServedError: names that rank.
        """
        place = self._places.get(gpu_uuid)
        if place is None or place == (job_id, rank):
            return
        other_job_id, other = place
        if self._is_on_gpu(other_job_id, other, gpu_uuid):
            raise GpuAlreadyServedError(
                gpu_uuid=gpu_uuid,
                job_id=other_job_id,
                pipeline=other.pipeline,
                stage=other.stage,
                tensor=other.tensor,
            )

    def put(self, job_id: str, rank: Coordinates, gpu_uuid: str) -> None:
        """Note that a rank is on a GPU, and on no other."""
        place = (job_id, rank)
        before = self._gpus.get(place)
        if before is not None and self._places.get(before) == place:
            del self._places[before]
        after = self._places.get(gpu_uuid)
        if after is not None:
            self._gpus.pop(after, None)
        self._places[gpu_uuid] = place
        self._gpus[place] = gpu_uuid

    def job_on(self, gpu_uuid: str) -> str | None:
        """Return the job of the rank that was on a GPU last; None if none is known."""
        place = self._places.get(gpu_uuid)
        return None if place is None else place[0]

    def __len__(self) -> int:
        return len(self._places)
