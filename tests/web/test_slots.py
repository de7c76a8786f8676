"""The pages of a fleet of two slots: each shows all jobs, and leads to the page of who serves a job."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from playwright.async_api import expect

from perseus.service.domain.members import Fleet, Slot
from perseus.service.storage.membership import MemberRows
from tests.ports import free_port
from tests.service.grpc_fakes import Client, connected_to, make_settings, running_here
from tests.service.storage import postgresql
from tests.service.web.page_server import ask
from tests.web.browser import browsing, in_browser, inaccessible

pytestmark = [
    *in_browser,
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(postgresql.MISSING), reason=str(postgresql.MISSING)),
]

JOBS = ("llama-4", "llama-2")
"""By their slots."""


@dataclass
class Pages:
    """Two coordinators in this process, each with its rows, its URL and a client."""

    rows: list[MemberRows]
    fleets: list[Fleet]
    urls: list[str]
    clients: list[Client]

    async def renew(self) -> None:
        """Let both know who serves which slot."""
        for rows, fleet in zip(self.rows, self.fleets, strict=True):
            if (found := await asyncio.to_thread(rows.renew)) is not None:
                fleet.members, fleet.slots = found


@asynccontextmanager
async def two(folder: Path) -> AsyncIterator[Pages]:
    async with AsyncExitStack() as stack:
        database = stack.enter_context(postgresql.running()).new_database()
        pages = Pages([], [], [f"http://127.0.0.1:{free_port()}" for _ in JOBS], [])
        for slot, url in enumerate(pages.urls):
            rows = stack.enter_context(closing(await asyncio.to_thread(MemberRows, database, 600.0, 2)))
            await asyncio.to_thread(rows.join, f"c{slot}:1", "", url)
            epoch = await asyncio.to_thread(rows.take, slot, 0)
            assert epoch == 1
            pages.rows.append(rows)
            pages.fleets.append(Fleet(rows.member_id, slot))
            await pages.renew()
            http = url.removeprefix("http://")
            settings = make_settings(folder, database=database, slots=2, http=http)
            running = running_here(settings, Slot(slot, rows.member_id, epoch), pages.fleets[slot])
            address, _ = await stack.enter_async_context(running)
            pages.clients.append(await stack.enter_async_context(connected_to(address)))
            await pages.clients[slot].register(job_id=JOBS[slot])
        yield pages


async def test_every_page_shows_all_jobs_and_leads_to_who_serves_them(tmp_path: Path) -> None:
    async with two(tmp_path) as pages, browsing(expected=["503"]) as page:
        first, second = pages.urls
        await page.goto(first)
        await expect(page.get_by_text("slot 0 of 2")).to_be_visible()
        other = page.get_by_role("row").filter(has_text=JOBS[1])
        await expect(other).to_contain_text("waiting")
        await expect(other).to_contain_text("slot 1, served at c1:1")
        await expect(page.get_by_role("row").filter(has_text=JOBS[0])).to_contain_text("0 of 4")
        assert await inaccessible(page) == []
        await page.get_by_role("link", name=JOBS[1]).click()
        await expect(page.get_by_role("heading", name=JOBS[1], level=1)).to_be_visible()
        assert page.url == f"{second}/#/jobs/{JOBS[1]}"

        # A link to the wrong page is followed, by the page and by its server.
        await page.goto(f"{second}/#/jobs/{JOBS[0]}")
        await page.wait_for_url(f"{first}/#/jobs/{JOBS[0]}")
        async with aiohttp.ClientSession() as session:
            for page_of, place in ((second, f"{first}/#/jobs/{JOBS[0]}"), (first, f"../#/jobs/{JOBS[0]}")):
                async with session.get(f"{page_of}/jobs/{JOBS[0]}", allow_redirects=False) as answer:
                    assert (answer.status, answer.headers["Location"]) == (302, place)
            refused = await ask(session, "POST", f"{second}/api/JobService/GetJob", {"job_id": JOBS[0]})
            holder = {"address": "c0:1", "slot": "0", "page_url": first, "job_id": JOBS[0]}
            assert refused.json["metadata"] == holder


async def test_jobs_that_nobody_serves_are_shown_as_they_are_stored(tmp_path: Path) -> None:
    async with two(tmp_path) as pages, browsing(expected=["503"]) as page:
        await pages.clients[1].finish(JOBS[1])
        await asyncio.to_thread(pages.rows[1].depart)
        await pages.renew()
        await page.goto(pages.urls[0])
        await expect(page.get_by_text("Nobody serves slot 1")).to_be_visible()
        other = page.get_by_role("row").filter(has_text=JOBS[1])
        await expect(other).to_contain_text("finished")
        await expect(other).to_contain_text("slot 1, which nobody serves")
        await expect(other.get_by_role("link")).to_have_count(0)
        await page.goto(f"{pages.urls[0]}/#/jobs/{JOBS[1]}")
        await expect(
            page.get_by_text(f"Job “{JOBS[1]}” belongs to slot 1, which nobody serves")
        ).to_be_visible()
        await page.goto(f"{pages.urls[0]}/#/ledger")
        await expect(page.get_by_text("of the jobs of slot 0")).to_be_visible()
