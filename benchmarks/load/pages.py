"""Open pages from their server's view: `python -m benchmarks.load.pages URL LIST_PAGES JOB_PAGES`.

On standard input, a line `open` opens them all, and `close` closes them and prints a line of JSON with the
data that they received. A page's requests and their rate are those of the live page.
"""

import asyncio
import json
import sys
import time
from collections.abc import Mapping

import aiohttp

SCRAPE_S = 5.0
RANKS_S = 3.0
TIMELINES_S = 4.0
JOB_S = 10.0

_JOB = {"job_id": "job"}


class Pages:
    """Some open pages."""

    def __init__(self, url: str, list_count: int, job_count: int) -> None:
        self._url = url
        self._counts = {"list": list_count, "job": job_count}
        self._bytes = dict.fromkeys(self._counts, 0)
        self._slowest_s = 0.0

    async def read(self) -> None:
        """Read from them until cancelled."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._scrape(session))
            for _ in range(self._counts["list"]):
                tasks.create_task(self._read(session, "list", "api/watch/jobs"))
            for number in range(self._counts["job"]):
                tasks.create_task(self._read(session, "job", "api/watch/jobs/job"))
                tasks.create_task(self._ask(session, number / self._counts["job"]))

    def reported(self, seconds: float) -> dict[str, float]:
        """Return the data that one page of each kind received per second."""
        rates = {
            f"{kind}_bytes_per_s": self._bytes[kind] / seconds / count for kind, count in self._counts.items()
        }
        return {**rates, "slowest_answer_s": self._slowest_s}

    async def _read(self, session: aiohttp.ClientSession, kind: str, path: str) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        async with session.get(f"{self._url}/{path}", timeout=timeout) as response:
            response.raise_for_status()
            async for chunk in response.content.iter_any():
                self._bytes[kind] += len(chunk)
        raise ConnectionError(f"{path} has ended")

    async def _ask(self, session: aiohttp.ClientSession, phase: float) -> None:
        """Send the requests of one page; no two are opened at the same moment."""
        await asyncio.sleep(phase * RANKS_S)
        due_s = dict.fromkeys((RANKS_S, TIMELINES_S, JOB_S), time.monotonic())
        while True:
            period_s = min(due_s, key=lambda each: due_s[each])
            await asyncio.sleep(max(0.0, due_s[period_s] - time.monotonic()))
            due_s[period_s] += period_s
            if period_s == RANKS_S:
                await self._answered(session.get(f"{self._url}/api/ranks/job"))
            elif period_s == TIMELINES_S:
                await self._call(session, "JobService/GetTimeline", _JOB)
            else:
                await self._call(session, "JobService/GetTimeline", {**_JOB, "from_baseline": True})
                await self._call(session, "JobService/GetJob", _JOB)
                await self._call(session, "JobService/GetReport", {**_JOB, "page_size": 1000})
                await self._call(session, "FrontierService/GetFrontier", _JOB)

    async def _call(self, session: aiohttp.ClientSession, method: str, body: Mapping[str, object]) -> None:
        await self._answered(session.post(f"{self._url}/api/{method}", json=body))

    async def _answered(self, asked: "aiohttp.client._RequestContextManager") -> None:
        began_s = time.monotonic()
        async with asked as response:
            await response.read()
            response.raise_for_status()
        self._slowest_s = max(self._slowest_s, time.monotonic() - began_s)

    async def _scrape(self, session: aiohttp.ClientSession) -> None:
        while True:
            await self._answered(session.get(f"{self._url}/metrics"))
            await asyncio.sleep(SCRAPE_S)


async def serve(url: str, list_count: int, job_count: int) -> None:
    """Open and close pages by the commands on standard input."""
    while await asyncio.to_thread(sys.stdin.readline):
        pages, began_s = Pages(url, list_count, job_count), time.monotonic()
        looking = asyncio.create_task(pages.read())
        closing = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
        await asyncio.wait((looking, closing), return_when=asyncio.FIRST_COMPLETED)
        if looking.done():
            looking.result()
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        print(json.dumps(pages.reported(time.monotonic() - began_s)), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
