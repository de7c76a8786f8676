"""Bringing back what dead agents left, for as long as an agent runs.

Every agent looks after the records that nobody holds, from its start to its end, of whatever GPU of the node.
It leaves those GPUs alone that it serves itself: their record, if there is one, is their own to see to.
"""

import asyncio
from collections.abc import Callable
from typing import NoReturn

import structlog

from perseus.agent.gpu import Gpu, GpuError, GpuNotFoundError, RecordError
from perseus.agent.restore.records import RecordFolder, restore_found

_log = structlog.get_logger(__name__)

_RETRY_S = 0.5
_ATTEMPTS = 6


class Restorer:
    """Looks through the records for GPUs to bring back, which `open_gpu` opens; every `retry_s`."""

    def __init__(
        self, records: RecordFolder, open_gpu: Callable[[str], Gpu], *, retry_s: float = _RETRY_S
    ) -> None:
        self._records = records
        self._open_gpu = open_gpu
        self._retry_s = retry_s
        # GPUs that are being opened to be served, or are served.
        self._taken: set[str] = set()
        self._restoring = asyncio.Lock()
        # What was said of GPUs that could not be brought back, so that it is said once.
        self._not_restored: dict[str, str] = {}

    def is_taken(self, gpu_uuid: str) -> bool:
        """Whether a GPU is to be left alone, as it is served or about to be."""
        return gpu_uuid in self._taken

    async def take(self, gpu_uuid: str, open_gpu: Callable[[str], Gpu]) -> Gpu:
        """Open a GPU to serve it, once nothing is being restored; it is left alone until `give_back`.

        `GpuError` if it can't be opened; it is not taken then.
        """
        self._taken.add(gpu_uuid)
        try:
            async with self._restoring:
                return await asyncio.to_thread(open_gpu, gpu_uuid)
        except GpuError:
            self._taken.discard(gpu_uuid)
            raise

    def give_back(self, gpu_uuid: str) -> None:
        """A GPU is no longer served."""
        self._taken.discard(gpu_uuid)

    async def keep_restoring(self) -> NoReturn:
        """Bring back whatever is left by whoever dies, until cancelled."""
        while True:
            await self._restore()
            await asyncio.sleep(self._retry_s)

    async def restore_all(self) -> None:
        """Bring back what is left, trying for a while. `RecordError` if a GPU can't be brought back."""
        for _ in range(_ATTEMPTS):
            await self._restore()
            if not self._not_restored:
                return
            await asyncio.sleep(self._retry_s)
        raise RecordError("; ".join(self._not_restored.values()))

    async def _restore(self) -> None:
        async with self._restoring:
            try:
                done = await asyncio.to_thread(
                    restore_found, self._records, self._open_gpu, but=frozenset(self._taken)
                )
            except RecordError as error:
                self._note_not_restored({"": str(error)})
                return
            self._note_not_restored(
                {
                    each.gpu_uuid: str(each.error)
                    for each in done
                    # A GPU that is not found may be another agent's, with which this one shares the folder.
                    if each.error is not None and not isinstance(each.error, GpuNotFoundError)
                }
            )
            for each in done:
                if each.error is None:
                    _log.info("GPU restored", gpu=each.gpu_uuid)

    def _note_not_restored(self, reasons: dict[str, str]) -> None:
        for gpu_uuid, reason in reasons.items():
            if self._not_restored.get(gpu_uuid) != reason:
                _log.error("GPU not restored", gpu=gpu_uuid, reason=reason)
        self._not_restored = reasons
