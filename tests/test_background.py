"""Work in the background: its failure is logged when it happens, and not lost at its end."""

import asyncio

import structlog.testing

from perseus.background import background_task


async def last() -> None:
    await asyncio.Event().wait()


async def fail() -> None:
    raise RuntimeError("a bug")


async def test_a_failure_is_logged_at_once_and_a_cancellation_is_none() -> None:
    with structlog.testing.capture_logs() as entries:
        lasting = background_task("lasting", last())
        failing = background_task("failing", fail())
        await asyncio.wait([failing])
        await asyncio.sleep(0)
        assert [(entry["log_level"], entry["task"]) for entry in entries] == [("error", "failing")]
        assert isinstance(entries[0]["exc_info"], RuntimeError)
        for task in (lasting, failing):
            task.cancel()
        await asyncio.gather(lasting, failing, return_exceptions=True)
    assert len(entries) == 1
