"""Calls that never return block only their own GPU."""

import asyncio
import threading
from collections.abc import Iterator
from unittest.mock import AsyncMock

import pytest

from perseus.agent.gpu import GpuHungError, GpuLostError
from perseus.agent.gpu.executor import GpuExecutor
from tests.agent.coordinator_stub import until


@pytest.fixture
def hang() -> Iterator[threading.Event]:
    """The event that a hanging call waits for."""
    event = threading.Event()
    yield event
    event.set()


async def test_calls_for_one_gpu_are_serial_and_for_several_parallel(
    hang: threading.Event,
) -> None:
    executor = GpuExecutor()
    first = asyncio.create_task(executor.run("GPU-a", hang.wait))
    second = asyncio.create_task(executor.run("GPU-a", hang.is_set))
    assert await executor.run("GPU-b", hang.is_set) is False
    await asyncio.sleep(0.05)
    assert not second.done()
    hang.set()
    assert await first
    assert await second


@pytest.mark.parametrize("error", [None, GpuLostError("gone")])
async def test_a_hanging_call_is_waited_for_once_and_its_late_result_if_any_is_kept(
    hang: threading.Event, monkeypatch: pytest.MonkeyPatch, error: GpuLostError | None
) -> None:
    executor = GpuExecutor(timeout_s=0.5)
    late: list[bool] = []

    def answer() -> bool:
        hang.wait()
        if error is not None:
            raise error
        return True

    with pytest.raises(GpuHungError, match=r"GPU GPU-a: expected the driver to answer within 0\.5 s"):
        await executor.run("GPU-a", answer, late.append)
    wait = AsyncMock(wraps=asyncio.wait)
    monkeypatch.setattr(asyncio, "wait", wait)
    for _ in range(20):
        with pytest.raises(GpuHungError):
            await executor.run("GPU-a", lambda: 1)
    assert [each.kwargs["timeout"] for each in wait.await_args_list] == [0.0] * 20
    assert await executor.run("GPU-b", lambda: 1) == 1
    hang.set()
    executor.timeout_s = 60.0
    assert await executor.run("GPU-a", lambda: 1) == 1
    expected = [True] if error is None else []
    await until(lambda: late == expected, "the late answer")


async def test_a_cancelled_caller_does_not_disturb_later_calls(hang: threading.Event) -> None:
    executor = GpuExecutor()
    late: list[bool] = []
    waiting = asyncio.create_task(executor.run("GPU-a", hang.wait, late.append))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    after = asyncio.create_task(executor.run("GPU-a", hang.is_set))
    await asyncio.sleep(0.01)
    hang.set()
    assert await after
    await until(lambda: late == [True], "the late answer")
