"""The pictures of docs/page.md: `python -m tests.web.pictures FOLDER`.

Nothing on them is drawn by hand: a demo runs in processes of its own, and has a straggler; the large job and
the list show state machines that were brought there.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from playwright.async_api import Locator, Page, expect

from perseus.demo.cluster import Cluster
from perseus.demo.workload import DEMO
from perseus.service.domain.model import JobState
from tests.web.browser import browsing, panel
from tests.web.demo import http_url, log_in, page_served
from tests.web.fleet import fleet, machine

_LONG_MS = 240_000

_JOBS = {
    "cpt-13b-long": (512, JobState.PLANNED),
    "gpt3-175b": (4096, JobState.PLANNED),
    "llama-70b": (1024, JobState.PLANNED),
    "moe-8x22b": (2048, JobState.PROFILING),
    "rlhf-reward": (64, JobState.BASELINE),
    "t5-xxl-ft": (128, JobState.WAITING),
    "vision-2b": (128, JobState.PLANNED),
}


async def _demo(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="perseus-") as name, page_served():
        run_dir = Path(name)
        with Cluster(DEMO, run_dir, run_dir / "logs") as cluster:
            cluster.start_agents(cluster.start_coordinator())
            cluster.start_trainers()
            async with browsing(expected=["401"]) as page:
                await page.goto(http_url(run_dir / "logs" / "coordinator.log"))
                await log_in(page, cluster)
                await page.get_by_role("link", name=DEMO.job_id).click()
                state = page.locator("#content .state")
                await expect(state).to_have_text("planned", timeout=_LONG_MS)
                await page.wait_for_timeout(25_000)  # some iterations under the plan
                await _picture(panel(page, "Timeline"), folder / "page-timeline.png")
                cluster.degrade(1, 1.2)
                target = panel(page, "Frontier").get_by_role("row").filter(has_text="T′")
                await expect(target).to_be_visible(timeout=_LONG_MS)
                await page.wait_for_timeout(15_000)
                await page.evaluate("window.scrollTo(0, 0)")
                await page.set_viewport_size({"width": 1280, "height": 1240})
                await _picture(page, folder / "page-job.png")
                await page.emulate_media(color_scheme="dark")
                await _picture(page, folder / "page-dark.png")
                await page.emulate_media(color_scheme="light")
                await page.set_viewport_size({"width": 360, "height": 1240})
                await _picture(page, folder / "page-phone.png")
            cluster.stop_training()
            cluster.stop_services()


async def _fleet(folder: Path) -> None:
    machines = [machine(job_id, ranks, state) for job_id, (ranks, state) in _JOBS.items()]
    with tempfile.TemporaryDirectory(prefix="perseus-") as name:
        async with fleet(Path(name), machines) as site, browsing(height=520) as page:
            await page.goto(site.url)
            await expect(page.locator("tbody a")).to_have_count(len(_JOBS))
            await _picture(page, folder / "page-jobs.png")
            await page.goto(f"{site.url}/#/jobs/gpt3-175b")
            ranks = panel(page, "Ranks")
            await ranks.get_by_role("radio", name="clock").check(force=True)
            await _picture(ranks, folder / "page-ranks.png")


async def _picture(what: Page | Locator, path: Path) -> None:
    page = what.page if isinstance(what, Locator) else what
    await page.wait_for_timeout(1_500)
    await what.screenshot(path=path)
    print(path, flush=True)


async def main(folder: Path) -> None:
    """Make all pictures."""
    await _fleet(folder)
    await _demo(folder)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
