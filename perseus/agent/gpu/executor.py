"""Calls into a driver that may never return: each GPU's one after the other, each on a thread of its own.

A GPU that hangs takes its caller's thread with it. So no call goes through a pool that others need, its
waiter waits so long and no longer, and whoever comes after is told at once for as long as the call is under
way. The threads are daemons: the process can end all the same. What such a call answers at last is handed to
`late`.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from perseus.gpu import GpuHungError

T = TypeVar("T")

ALL_GPUS = "all of this node's"
"""The lane of questions that are about no single GPU."""

TIMEOUT_S = 10.0
"""Longer than any call takes that returns: opening a GPU without persistence mode takes seconds."""


class _Call(NamedTuple):
    begun_s: float
    answer: asyncio.Future[Any]


class GpuExecutor:
    """A lane for every GPU that something is asked of; of one event loop."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._running: dict[str, _Call] = {}

    async def run(
        self, gpu_uuid: str, function: Callable[[], T], late: Callable[[T], None] | None = None
    ) -> T:
        """Call the function, once no other call is under way for this GPU; its answer, or its error.

        `GpuHungError` if it takes too long, or one before it does. `late` is called with the answer, on a
        thread, if it comes when nobody waits for it any more.
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
        """Until the call has ended. `GpuHungError` if it has been under way for too long."""
        left_s = call.begun_s + self._timeout_s - asyncio.get_running_loop().time()
        done, _ = await asyncio.wait([call.answer], timeout=max(0.0, left_s))
        if not done:
            raise GpuHungError(
                f"GPU {gpu_uuid}: expected the driver to answer within {self._timeout_s:g} s, "
                "found it silent: the GPU or its driver hangs"
            )

    def _run(self, gpu_uuid: str, function: Callable[[], T], answer: asyncio.Future[T]) -> None:
        found: T | None = None
        error: BaseException | None = None
        try:
            found = function()
        except BaseException as caught:  # who waits for it judges it
            error = caught

        def end() -> None:
            del self._running[gpu_uuid]
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(found)  # type: ignore[arg-type] # None only if T is

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            answer.get_loop().call_soon_threadsafe(end)


def _hand_over(answer: asyncio.Future[T], late: Callable[[T], None] | None) -> None:
    if answer.exception() is None and late is not None:
        threading.Thread(target=late, args=[answer.result()], daemon=True).start()
