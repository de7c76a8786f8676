"""The event loop's idle time."""

import asyncio
import time

from perseus.service.shell.measured_loop import MeasuredLoop


def test_waiting_is_idle_and_work_is_not() -> None:
    with asyncio.Runner(loop_factory=MeasuredLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, MeasuredLoop)

        async def wait_and_work() -> None:
            await asyncio.sleep(0.2)
            time.sleep(0.05)  # noqa: ASYNC251 - that is the work

        begun_s, before_s = time.monotonic(), loop.idle_s
        runner.run(wait_and_work())
        assert 0.05 < loop.idle_s - before_s < time.monotonic() - begun_s - 0.04
