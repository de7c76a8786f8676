"""A stuck loop is logged once, with its stack; a process that was stopped is not."""

import asyncio
import time

from structlog.testing import capture_logs

from perseus.service.watchdog import Watchdog

LIMIT_S = 0.2


def block_the_loop() -> None:
    time.sleep(8 * LIMIT_S)


async def reset(watchdog: Watchdog) -> None:
    while True:
        watchdog.reset()
        await asyncio.sleep(LIMIT_S / 4)


async def test_a_stuck_loop_is_logged_once_with_its_stack_and_when_it_recovers() -> None:
    with capture_logs() as logs, Watchdog(LIMIT_S) as watchdog:
        beating = asyncio.create_task(reset(watchdog))
        await asyncio.sleep(LIMIT_S)
        block_the_loop()
        async with asyncio.timeout(20):
            while not any(line["event"] == "event loop runs again" for line in logs):  # noqa: ASYNC110
                await asyncio.sleep(LIMIT_S / 4)
        beating.cancel()
    stuck = [
        line for line in logs if line["event"] == "event loop stuck" and "block_the_loop" in line["stack"]
    ]
    assert len(stuck) == 1
    assert stuck[0]["silent_s"] >= LIMIT_S
