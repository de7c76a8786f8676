"""Waiting time of callers for the coordinator's loop: `python -m benchmarks.load.lag HOST:PORT`.

It sends a health check every 20 ms on its own connection; the loop that serves everybody answers it. For each
line on standard input, `[since_s, until_s]` of the monotonic clock, it prints the begin and duration of the
checks in between: `[[begun_s, took_s], …]`; took_s is null for a failed one.
"""

import asyncio
import json
import sys
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.load.job import channel

INTERVAL_S = 0.02
_LIMIT_S = 10.0


async def _check(stub: health_pb2_grpc.HealthStub, samples: list[tuple[float, float | None]]) -> None:
    begun_s = time.monotonic()
    try:
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=_LIMIT_S)
        samples.append((begun_s, time.monotonic() - begun_s))
    except grpc.aio.AioRpcError as error:
        is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        samples.append((begun_s, _LIMIT_S if is_late else None))


async def _ask(target: str, samples: list[tuple[float, float | None]]) -> None:
    """Run one check after another: a late one delays the next, as it would delay other callers."""
    async with channel(target) as opened:
        stub = health_pb2_grpc.HealthStub(opened)
        while True:
            due_s = time.monotonic() + INTERVAL_S
            await _check(stub, samples)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))


async def _main(target: str) -> None:
    samples: list[tuple[float, float | None]] = []
    asking = asyncio.create_task(_ask(target, samples))
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        since_s, until_s = json.loads(line)
        print(json.dumps([each for each in samples if since_s <= each[0] < until_s]), flush=True)
    asking.cancel()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
