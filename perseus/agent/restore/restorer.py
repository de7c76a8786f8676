"""Restoring the GPUs of dead agents, for as long as an agent runs.

Every agent restores GPUs whose records nobody holds, from its start to its end, for all GPUs of the node. It
skips the GPUs that it serves itself: `GuardedGpu` handles their records. It restores each GPU independently,
so that one that hangs does not block the others, and retries after any failure.
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
    """A GPU, or an object that owns one."""

    def close(self) -> None:
        """Close the GPU."""


G = TypeVar("G", bound=Closable)

_RETRY_S = 0.5
_ATTEMPTS = 6


@dataclass(frozen=True, slots=True)
class Restoration:
    """The outcome for one record; `error` is None if the GPU was restored."""

    gpu_uuid: str
    error: Exception | None


class Restorer:
    """Checks the records every `retry_s` for GPUs to restore, which `open_gpu` opens.

    `timeout_s` is as for `RecordFolder.find`.

    Attributes:
        restore_counts: successful restorations by GPU.
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
        # The logged error of each GPU that could not be restored, so that it is logged once.
        self._not_restored: dict[str, str] = {}

    @property
    def not_restored(self) -> Collection[str]:
        """GPUs that could not be restored and are retried."""
        return self._not_restored.keys() - {""}

    def is_taken(self, gpu_uuid: str) -> bool:
        """Whether a GPU is served or about to be, so that the restorer skips it."""
        return gpu_uuid in self._taken

    async def take(self, gpu_uuid: str, open_gpu: Callable[[str], G]) -> G:
        """Open a GPU to serve it, after any call in progress; the restorer skips it until `give_back`.

        Raises `GpuError` if it can't be opened or is already taken. After any exception it is not taken.
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
        """End serving a GPU, once `close` (which may block) has returned; raises any error of `close`.

        Raises `GpuHungError` if `close` takes too long; the GPU stays taken until it returns.
        """

        def close_and_release() -> None:
            try:
                close()
            finally:
                self._taken.discard(gpu_uuid)

        await self._executor.run(gpu_uuid, close_and_release)

    async def keep_restoring(self) -> NoReturn:
        """Restore the GPUs of agents that die, until cancelled."""
        while True:
            await self._scan()
            await asyncio.sleep(self._retry_s)

    async def restore_once(self) -> list[Restoration]:
        """Try once to restore each GPU whose record nobody holds. Raises `RecordError` as `gpu_uuids`."""
        found = await asyncio.to_thread(self._records.gpu_uuids)
        done = await asyncio.gather(*map(self._try, found))
        return [each for each in done if each is not None]

    async def restore_all(self) -> None:
        """Restore all GPUs with records, retrying for a while. Raises `RecordError` if that fails."""
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(self._retry_s)
            left = await self._scan()
            await asyncio.gather(*self._running.values())
            if not left and not self._not_restored:
                return
        raise RecordError("; ".join([*self._not_restored.values(), *left]))

    async def _scan(self) -> list[str]:
        """Begin to restore GPUs with records; return messages about records of served GPUs."""
        try:
            found = await asyncio.to_thread(self._records.gpu_uuids)
            self._note("", None)
        except RecordError as error:
            self._note("", error)
            return []
        except Exception as error:  # a bug; the next scan may succeed
            self._note("", error)
            return []
        for gpu_uuid in self._not_restored.keys() - {"", *found}:
            self._note(gpu_uuid, None)  # somebody else brought it back
        for gpu_uuid in found:
            if gpu_uuid not in self._taken and gpu_uuid not in self._running:
                self._running[gpu_uuid] = asyncio.create_task(self._restore(gpu_uuid))
        return [f"GPU {uuid}: not closed yet, so not restored" for uuid in found if uuid in self._taken]

    async def _restore(self, gpu_uuid: str) -> None:
        try:
            done = await self._try(gpu_uuid)
        finally:
            del self._running[gpu_uuid]
        if done is None or isinstance(done.error, GpuNotFoundError):
            # A GPU that is not found may belong to another agent that shares the folder.
            self._note(gpu_uuid, None)
            return
        self._note(gpu_uuid, done.error)
        if done.error is None:
            self.restore_counts[gpu_uuid] += 1
            _log.info("GPU restored", gpu=gpu_uuid)

    async def _try(self, gpu_uuid: str) -> Restoration | None:
        """Try to restore a GPU; return None if there is nothing to do for this agent."""

        def restore() -> bool:
            return gpu_uuid not in self._taken and restore_found(
                self._records, gpu_uuid, self._open_gpu, timeout_s=self._timeout_s
            )

        try:
            is_done = await self._executor.run(gpu_uuid, restore)
        except Exception as error:  # also for a bug: the GPU may still be locked
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
