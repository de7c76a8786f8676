"""Calls into a driver that may never return: one at a time for each GPU, each on a separate thread.

A GPU that hangs blocks its caller's thread. So no call uses a shared pool, every waiter has a timeout, and
later callers fail at once while a call that timed out is still in progress. The threads are daemons, so the
process can still end. A late result goes to `late`.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from perseus.gpu import GpuHungError

T = TypeVar("T")

ALL_GPUS = "all of this node's"
"""The key for calls that concern no single GPU."""

TIMEOUT_S = 10.0
"""Longer than any successful call: opening a GPU without persistence mode takes seconds."""


class _Call(NamedTuple):
    begun_s: float
    answer: asyncio.Future[Any]


class GpuExecutor:
    """Runs driver calls, one at a time for each GPU; belongs to one event loop.

    Attributes:
        timeout_s: the longest wait for calls that are waited for from now on.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._running: dict[str, _Call] = {}

    async def run(
        self, gpu_uuid: str, function: Callable[[], T], late: Callable[[T], None] | None = None
    ) -> T:
        """Call the function after any call in progress for this GPU; return its result or raise its error.

        Raises `GpuHungError` if it, or a call before it, takes too long. If the result comes after that,
        `late` is called with it on a thread.
        """
        while (before := self._running.get(gpu_uuid)) is not None:
            await self._wait(gpu_uuid, before)
        call = _Call(asyncio.get_running_loop().time(), asyncio.get_running_loop().create_future())
        self._running[gpu_uuid] = call
        thread = threading.Thread(
            target=self._run, args=[gpu_uuid, function, call.answer], name=f"driver: {gpu_uuid}", daemon=True
        )
        try:
            thread.start()
        except BaseException:
            del self._running[gpu_uuid]
            raise
        try:
            await self._wait(gpu_uuid, call)
        except BaseException:
            call.answer.add_done_callback(lambda answer: _hand_over(answer, late))
            raise
        answer: T = call.answer.result()
        return answer

    async def _wait(self, gpu_uuid: str, call: _Call) -> None:
        """Wait until the call has ended. Raises `GpuHungError` if it takes too long."""
        left_s = call.begun_s + self.timeout_s - asyncio.get_running_loop().time()
        done, _ = await asyncio.wait([call.answer], timeout=max(0.0, left_s))
        if not done:
            raise GpuHungError(
                f"GPU {gpu_uuid}: expected the driver to answer within {self.timeout_s:g} s, "
                "found it silent: the GPU or its driver hangs"
            )

    def _run(self, gpu_uuid: str, function: Callable[[], T], answer: asyncio.Future[T]) -> None:
        found: T | None = None
        error: BaseException | None = None
        try:
            found = function()
        except BaseException as caught:  # the waiter raises it
            error = caught

        def end() -> None:
            del self._running[gpu_uuid]
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(found)  # type: ignore[arg-type] # None only if T is

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            answer.get_loop().call_soon_threadsafe(end)


def _hand_over(answer: asyncio.Future[T], late: Callable[[T], None] | None) -> None:
    if answer.exception() is None and late is not None:
        threading.Thread(target=late, args=[answer.result()], daemon=True).start()
