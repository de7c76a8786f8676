"""Problems to solve, and waiting for conditions."""

import asyncio
from collections.abc import Callable

from perseus.solver import Kind, Measurement, Pipeline, one_forward_one_backward

CLOCKS_MHZ = (1410, 1200, 1005, 810)


def make_problem(stages: int = 2, microbatches: int = 4) -> Pipeline:
    """Return a problem with stages of different lengths, measured at four clocks."""
    profiles = {
        (stage, 0, kind): tuple(
            Measurement(
                clock_mhz,
                work * (1 + stage % 3 / 8) * (1410 / clock_mhz) ** 0.8,
                100 * work * (1 + stage % 3 / 8) * (1 + (clock_mhz / 1000) ** 2.2),
            )
            for clock_mhz in CLOCKS_MHZ
        )
        for stage in range(stages)
        for kind, work in ((Kind.FORWARD, 0.01), (Kind.BACKWARD, 0.02))
    }
    return Pipeline(one_forward_one_backward(stages, microbatches), profiles, (60.0,) * stages)


def large_problem() -> Pipeline:
    """Return a problem that takes much longer than any test waits."""
    return make_problem(8, 256)


async def until(condition: Callable[[], object]) -> None:
    """Wait until other tasks make a condition true."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (the condition has no event)
            await asyncio.sleep(0.01)
