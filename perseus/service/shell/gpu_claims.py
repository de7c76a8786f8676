"""The claims of this coordinator's ranks on GPUs in the table of the fleet (`fleet.gpu_claims`).

One task writes what has gathered, on a connection of its own: group commits must not wait for other slots.
"""

import asyncio
from collections.abc import Mapping, Set

from perseus.service.domain.errors import GpuAlreadyServedError
from perseus.service.domain.gpu_claims import Gpu, Place
from perseus.service.domain.principals import Principal
from perseus.service.domain.specification import Coordinates
from perseus.service.fleet.gpu_claims import GpuClaims
from perseus.service.job import views
from perseus.service.shell.live_runs import LiveRuns
from perseus.service.shell.writer import GATHERING_S
from perseus.service.storage.sql_store import SqlStore

AGAIN_S = 1.0
"""Between two attempts to write the same changes."""


class ClaimWriter:
    """Claims and releases GPUs for the ranks of one slot of several.

    Attributes:
        claims: whose GPUs are, as far as it is known.
    """

    def __init__(self, store: SqlStore, live: LiveRuns, slot: int) -> None:
        self.claims = GpuClaims(slot, {})
        self._store = store
        self._live = live
        self._slot = slot
        self._has_work = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self._changed_jobs: set[str] = set()

    async def load(self) -> None:
        """Load the claims of the slot; those of ranks that are not live are released at the first tick."""
        self.claims = GpuClaims(self._slot, await self._store.load_gpu_claims(self._slot))
        self._changed_jobs |= self.claims.job_ids

    async def claim(self, wanted: Mapping[Gpu, Place]) -> None:
        """Claim GPUs for ranks that are about to join; then it is known which of them other slots have."""
        self.claims.forget_elsewhere(wanted)
        while self.claims.want(wanted):
            self._waiting.append(written := asyncio.get_running_loop().create_future())
            self._has_work.set()
            await written

    def check(self, principal: Principal, gpu_uuid: str) -> None:
        """Refuse a GPU that a rank of another slot is on.

        Raises:
            GpuAlreadyServedError: names that rank.
        """
        place = self.claims.elsewhere((principal.name, gpu_uuid))
        if place is not None and principal.grant.covers(place[0]):
            job_id, rank = place
            raise GpuAlreadyServedError(
                gpu_uuid=gpu_uuid,
                job_id=job_id,
                pipeline=rank.pipeline,
                stage=rank.stage,
                tensor=rank.tensor,
                lease_left_s=self._live.rules.lease_s,  # its agent was heard lately, or is expected back
            )

    def put(self, gpu: Gpu, place: Place) -> None:
        """Note that a rank has joined on a GPU."""
        self.claims.put(gpu, place)
        self._wake()

    def tick(self) -> None:
        """Release the GPUs of ranks that are not live any more."""
        self.claims.sweep(self._changed_jobs, self._live_gpus)
        self._changed_jobs.clear()
        self._wake()

    def _wake(self) -> None:
        if self.claims.has_changes:
            self._has_work.set()

    def _live_gpus(self, job_id: str) -> Set[tuple[Coordinates, str]]:
        run = self._live.get(job_id)
        return set() if run is None else self._live.read(run, views.live_gpus, lambda _: set())

    async def run(self) -> None:
        """Write what has gathered, until cancelled.

        Raises:
            StoreFailedError: the store failed.
        """
        with self._live.changes() as changed:
            changed |= self._changed_jobs
            self._changed_jobs = changed
            while True:
                await self._has_work.wait()
                await asyncio.sleep(GATHERING_S)
                self._has_work.clear()
                changes, waiting, self._waiting = self.claims.take(), self._waiting, []
                while (rows := await self._store.change_gpu_claims(changes)) is None:  # noqa: ASYNC110
                    await asyncio.sleep(AGAIN_S)
                self.claims.note(rows)
                changed.update(job_id for job_id, _ in changes.claimed.values())
                for written in waiting:
                    if not written.done():
                        written.set_result(None)
