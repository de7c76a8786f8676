"""Which GPUs the ranks of one slot have claimed, in a table of the whole fleet: a GPU runs one rank.

Within a slot, `gpus` refuses a second rank. Between slots the table decides: a principal's GPU has one row,
which belongs to a slot. A GPU is claimed before its rank joins; the row stays while a rank of the slot is
live on it, and passes with the slot to whoever takes it over. Nobody else removes it: only the slot's
coordinator knows which of its ranks are live, so claims of a slot that nobody serves stay.

What is to be written gathers here, and is written by one after the other. Pure.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

from perseus.service.domain.gpu_claims import ClaimChanges, Gpu, Place
from perseus.service.domain.specification import Coordinates


class GpuClaims:
    """The claims of a slot; `held` are those in the table."""

    def __init__(self, slot: int, held: Mapping[Gpu, Place]) -> None:
        self._slot = slot
        self._held = dict(held)
        # Ranks of other slots on GPUs that were wanted here.
        self._elsewhere: dict[Gpu, Place] = {}
        # By GPU, its rank; None if the GPU is to be released.
        self._changes: dict[Gpu, Place | None] = {}

    @property
    def has_changes(self) -> bool:
        """Whether there is something to be written."""
        return bool(self._changes)

    @property
    def job_ids(self) -> set[str]:
        """The jobs that have claims."""
        return {job_id for job_id, _ in self._held.values()}

    def forget_elsewhere(self, gpus: Iterable[Gpu]) -> None:
        """Look anew whether other slots have these GPUs."""
        for gpu in gpus:
            self._elsewhere.pop(gpu, None)

    def want(self, wanted: Mapping[Gpu, Place]) -> bool:
        """Have GPUs claimed of which it is not known whose they are; return whether there are some."""
        unknown = {
            gpu: place
            for gpu, place in wanted.items()
            if gpu not in self._held and gpu not in self._elsewhere
        }
        self._changes |= unknown
        return bool(unknown)

    def elsewhere(self, gpu: Gpu) -> Place | None:
        """Return the rank of another slot that is on a GPU."""
        return self._elsewhere.get(gpu)

    def put(self, gpu: Gpu, place: Place) -> None:
        """Note that a rank has joined on a GPU."""
        if gpu not in self._elsewhere and self._held.get(gpu) != place:
            self._changes[gpu] = place
            if gpu in self._held:
                self._held[gpu] = place

    def sweep(
        self, job_ids: Collection[str], live: Callable[[str], Collection[tuple[Coordinates, str]]]
    ) -> None:
        """Release the GPUs of these jobs on which no rank is live; `live` returns the ranks that are, with
        their GPUs' UUIDs."""
        ranks = {job_id: live(job_id) for job_id in job_ids}
        ended = [
            gpu
            for gpu, (job_id, rank) in self._held.items()
            if job_id in ranks and (rank, gpu[1]) not in ranks[job_id]
        ]
        for gpu in ended:
            del self._held[gpu]
            self._changes[gpu] = None

    def take(self) -> ClaimChanges:
        """Return what is to be written, once."""
        changes, self._changes = self._changes, {}
        return ClaimChanges(
            {gpu: place for gpu, place in changes.items() if place is not None},
            [gpu for gpu, place in changes.items() if place is None],
        )

    def note(self, rows: Mapping[Gpu, tuple[int, Place]]) -> None:
        """Note whose GPUs are, by slot and rank, that were to be claimed; a row may be missing."""
        for gpu, (slot, place) in rows.items():
            if slot != self._slot:
                self._held.pop(gpu, None)
                self._elsewhere[gpu] = place
            elif self._changes.get(gpu, place) is not None:  # otherwise it is about to be released
                self._held[gpu] = place
