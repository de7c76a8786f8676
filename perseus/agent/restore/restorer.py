"""Bringing back what dead agents left, for as long as an agent runs.

Every agent looks after the records that nobody holds, from its start to its end, of whatever GPU of the node.
It leaves those GPUs alone that it serves itself: their record, if there is one, is their own to see to. Each
GPU is seen to by itself, so that one that hangs keeps no other from being brought back, and again and again,
whatever it was that failed.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeVar

import structlog

from perseus.agent.gpu import Gpu, GpuError, GpuInUseError, GpuNotFoundError, RecordError
from perseus.agent.gpu.executor import GpuExecutor
from perseus.agent.restore.records import RecordFolder, restore_found

_log = structlog.get_logger(__name__)


class Closable(Protocol):
    """A GPU, or what has one."""

    def close(self) -> None:
        """Let go of the GPU."""


G = TypeVar("G", bound=Closable)

_RETRY_S = 0.5
_ATTEMPTS = 6


@dataclass(frozen=True, slots=True)
class Restoration:
    """What became of one record: the GPU is back, or why not."""

    gpu_uuid: str
    error: Exception | None


class Restorer:
    """Looks through the records for GPUs to bring back, which `open_gpu` opens; every `retry_s`.

    `patience_s` is as for `RecordFolder.find`.

    Attributes:
        restore_counts: how often each GPU was brought back.
    """

    def __init__(
        self,
        records: RecordFolder,
        open_gpu: Callable[[str], Gpu],
        executor: GpuExecutor,
        *,
        retry_s: float = _RETRY_S,
        timeout_s: float = 0.0,
    ) -> None:
        self.restore_counts: Counter[str] = Counter()
        self._records = records
        self._open_gpu = open_gpu
        self._executor = executor
        self._retry_s = retry_s
        self._timeout_s = timeout_s
        # GPUs that are being opened to be served, are served, or are not closed yet.
        self._taken: set[str] = set()
        self._running: dict[str, asyncio.Task[None]] = {}
        # What was said of GPUs that could not be brought back, so that it is said once.
        self._not_restored: dict[str, str] = {}

    @property
    def not_restored(self) -> Collection[str]:
        """GPUs that could not be brought back, and are tried again."""
        return self._not_restored.keys() - {""}

    def is_taken(self, gpu_uuid: str) -> bool:
        """Whether a GPU is to be left alone, as it is served or about to be."""
        return gpu_uuid in self._taken

    async def take(self, gpu_uuid: str, open_gpu: Callable[[str], G]) -> G:
        """Open a GPU to serve it, once nothing is being done with it; it is left alone until `give_back`.

        `GpuError` if it can't be opened, or is taken already. Whatever is raised, it is not taken by it.
        """
        if gpu_uuid in self._taken:
            raise GpuInUseError(f"GPU {gpu_uuid}: expected one that is free, found it still being served")
        self._taken.add(gpu_uuid)
        try:
            return await self._executor.run(gpu_uuid, lambda: open_gpu(gpu_uuid), lambda gpu: gpu.close())
        except BaseException:
            self._taken.discard(gpu_uuid)
            raise

    async def give_back(self, gpu_uuid: str, close: Callable[[], None]) -> None:
        """A GPU is no longer served, once `close` (which may block) has returned. Raises what that raises.

        `GpuHungError` if it takes too long: the GPU is taken for as long as it does.
        """

        def close_and_release() -> None:
            try:
                close()
            finally:
                self._taken.discard(gpu_uuid)

        await self._executor.run(gpu_uuid, close_and_release)

    async def keep_restoring(self) -> NoReturn:
        """Bring back whatever is left by whoever dies, until cancelled."""
        while True:
            await self._scan()
            await asyncio.sleep(self._retry_s)

    async def restore_once(self) -> list[Restoration]:
        """Try to bring back each GPU whose record nobody holds. `RecordError` if the folder can't be read."""
        found = await asyncio.to_thread(self._records.gpu_uuids)
        done = await asyncio.gather(*map(self._try, found))
        return [each for each in done if each is not None]

    async def restore_all(self) -> None:
        """Bring back what is left, trying for a while. `RecordError` if a GPU can't be brought back."""
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(self._retry_s)
            left = await self._scan()
            await asyncio.gather(*self._running.values())
            if not left and not self._not_restored:
                return
        raise RecordError("; ".join([*self._not_restored.values(), *left]))

    async def _scan(self) -> list[str]:
        """Begin to bring back what is left. Returns what is said of records of GPUs that are served."""
        try:
            found = await asyncio.to_thread(self._records.gpu_uuids)
            self._note("", None)
        except RecordError as error:
            self._note("", error)
            return []
        except Exception as error:  # a mistake of ours; the next look may do better
            self._note("", error)
            return []
        for gpu_uuid in self._not_restored.keys() - {"", *found}:
            self._note(gpu_uuid, None)  # somebody else brought it back
        for gpu_uuid in found:
            if gpu_uuid not in self._taken and gpu_uuid not in self._running:
                self._running[gpu_uuid] = asyncio.create_task(self._restore(gpu_uuid))
        return [f"GPU {uuid}: not closed yet, and so not restored" for uuid in found if uuid in self._taken]

    async def _restore(self, gpu_uuid: str) -> None:
        try:
            done = await self._try(gpu_uuid)
        finally:
            del self._running[gpu_uuid]
        if done is None or isinstance(done.error, GpuNotFoundError):
            # One that is not found may be another agent's, with which this one shares the folder.
            self._note(gpu_uuid, None)
            return
        self._note(gpu_uuid, done.error)
        if done.error is None:
            self.restore_counts[gpu_uuid] += 1
            _log.info("GPU restored", gpu=gpu_uuid)

    async def _try(self, gpu_uuid: str) -> Restoration | None:
        """None if there is nothing to be done, or not by us."""

        def restore() -> bool:
            return gpu_uuid not in self._taken and restore_found(
                self._records, gpu_uuid, self._open_gpu, timeout_s=self._timeout_s
            )

        try:
            is_done = await self._executor.run(gpu_uuid, restore)
        except Exception as error:  # also a mistake of ours: the GPU may be locked all the same
            return Restoration(gpu_uuid, error)
        return Restoration(gpu_uuid, None) if is_done else None

    def _note(self, gpu_uuid: str, error: Exception | None) -> None:
        if error is None:
            self._not_restored.pop(gpu_uuid, None)
            return
        reason = str(error) if isinstance(error, GpuError) else f"GPU {gpu_uuid}: {error!r}"
        if self._not_restored.get(gpu_uuid) != reason:
            _log.error("GPU not restored", gpu=gpu_uuid, reason=reason)
        self._not_restored[gpu_uuid] = reason
