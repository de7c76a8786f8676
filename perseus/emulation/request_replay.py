"""Replays a trace of requests against an OpenAI-like server, and measures what its users see."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from perseus.serving.engine import Request

_DATA, _DONE = b"data: ", b"data: [DONE]"


@dataclass(slots=True)
class Outcome:
    """A request's latencies, measured by its client.

    `sent_s` is CLOCK_MONOTONIC; `itl_s` has all tokens after the first.
    """

    request: Request
    sent_s: float
    ttft_s: float | None = None
    itl_s: list[float] = field(default_factory=list)
    error: str = ""


async def replay_requests(
    address: str, requests: Sequence[Request], on_sent: Callable[[Outcome], None]
) -> None:
    """Send each request at its time, and return when all are answered; outcomes grow meanwhile."""
    begun_s = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as running,
    ):
        for request in requests:
            await asyncio.sleep(max(0.0, begun_s + request.arrival_s - time.monotonic()))
            outcome = Outcome(request, time.monotonic())
            on_sent(outcome)
            running.create_task(_complete(session, address, outcome))


async def _complete(session: aiohttp.ClientSession, address: str, outcome: Outcome) -> None:
    asked = {
        "prompt": [0] * outcome.request.prompt_tokens,
        "max_tokens": outcome.request.generated_tokens,
        "stream": True,
    }
    try:
        async with session.post(f"http://{address}/v1/completions", json=asked) as answer:
            answer.raise_for_status()
            last_s = outcome.sent_s
            async for line in answer.content:
                if not line.startswith(_DATA) or line.startswith(_DONE):
                    continue
                now_s = time.monotonic()
                if outcome.ttft_s is None:
                    outcome.ttft_s = now_s - last_s
                else:
                    outcome.itl_s.append(now_s - last_s)
                last_s = now_s
    except (aiohttp.ClientError, OSError) as error:  # the engine may restart: the replay goes on
        outcome.error = str(error) or type(error).__name__
