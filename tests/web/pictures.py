"""Makes the pictures of the live page in docs/operations.md: `python -m tests.web.pictures FOLDER`.

Nothing on them is drawn by hand: a demo runs in its own processes, and has a straggler; the large job is a
prepared state machine, and the ledger has invented hours.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from playwright.async_api import Locator, Page, expect

from perseus.demo.cluster import Cluster
from perseus.demo.workload import DEMO
from tests.service.grpc_fakes import Client
from tests.web.browser import browsing, log_in, panel
from tests.web.fleet import fleet, machine
from tests.web.test_ledger import ENTRIES, open_ledger, serving, table_row

_LONG_MS = 240_000

# Jobs whose training has not begun.
_WAITING = {"gpt3-175b": (64, 16), "moe-8x22b": (16, 8), "vision-2b": (32, 4)}


async def _demo(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="perseus-") as name:
        run_dir = Path(name)
        with Cluster(DEMO, run_dir, run_dir / "logs", serves_page=True) as cluster:
            address = cluster.start_coordinator()
            cluster.start_agents(address)
            cluster.start_trainers()
            async with (
                cluster.security.channels(address).open() as channel,
                browsing(expected=["401", "400"]) as page,
            ):
                for job_id, (pipelines, stages) in _WAITING.items():
                    await Client(channel).register(job_id=job_id, pipelines=pipelines, stages=stages)
                await page.goto(cluster.page_url)
                await log_in(page, cluster.security.token_file.read_text().strip())
                await page.get_by_role("link", name=DEMO.job_id).click()
                state = page.locator("#content .state")
                await expect(state).to_have_text("planned", timeout=_LONG_MS)
                await page.wait_for_timeout(25_000)  # some iterations under the plan
                await _picture(panel(page, "Timeline"), folder / "page-timeline.png")
                await page.get_by_role("link", name="Jobs", exact=True).click()
                await page.set_viewport_size({"width": 1280, "height": 420})
                await _picture(page, folder / "page-jobs.png")
                await page.set_viewport_size({"width": 1280, "height": 1240})
                await page.get_by_role("link", name=DEMO.job_id).click()
                cluster.degrade(1, 1.2)
                target = panel(page, "Frontier").get_by_role("row").filter(has_text="T′")
                await expect(target).to_be_visible(timeout=_LONG_MS)
                await page.wait_for_timeout(15_000)
                await page.evaluate("window.scrollTo(0, 0)")
                await _picture(page, folder / "page-job.png")
                await page.emulate_media(color_scheme="dark")
                await _picture(page, folder / "page-dark.png")
                await page.emulate_media(color_scheme="light")
                await page.set_viewport_size({"width": 360, "height": 1240})
                await _picture(page, folder / "page-phone.png")
            cluster.stop_training()
            cluster.stop_services()


async def _large_job(folder: Path) -> None:
    large = machine("gpt3-175b", 4096, silent=(118, 119, 120, 121, 700), gone=455)
    with tempfile.TemporaryDirectory(prefix="perseus-") as name:
        async with fleet(Path(name), [large]) as site, browsing(height=2600) as page:
            await page.goto(f"{site.url}/#/jobs/{large.spec.job_id}")
            ranks = panel(page, "Ranks")
            await expect(ranks).to_contain_text("lost")
            await _picture(ranks, folder / "page-ranks.png")


async def _ledger(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="perseus-") as name:
        async with serving(Path(name), ENTRIES) as site, browsing(height=620) as page:
            await open_ledger(site, page)
            await expect(table_row(page, "total")).to_be_visible()
            await _picture(page, folder / "page-ledger.png")


async def _picture(what: Page | Locator, path: Path) -> None:
    page = what.page if isinstance(what, Locator) else what
    await page.wait_for_timeout(1_500)
    await what.screenshot(path=path)
    print(path, flush=True)


async def main(folder: Path) -> None:
    """Make all pictures."""
    await _large_job(folder)
    await _ledger(folder)
    await _demo(folder)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
