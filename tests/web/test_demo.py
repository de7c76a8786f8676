"""The demo's processes, seen in a browser: agents, trainers and a coordinator as in production."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.async_api import expect

from perseus.demo.cluster import Cluster
from tests.web.browser import browsing, in_browser, log_in, panel
from tests.workloads import SMALL

pytestmark = in_browser

WORKLOAD = replace(SMALL, job_id="seen")
TOLERANCE_PERCENT = 1000.0
"""Beside other tests, iterations take longer than planned: that ends no plan."""

LONG_MS = 480_000


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with (
        tempfile.TemporaryDirectory(prefix="perseus-") as run_dir,
        Cluster(
            WORKLOAD,
            Path(run_dir),
            tmp_path / "logs",
            serves_page=True,
            guard_tolerance_percent=TOLERANCE_PERCENT,
        ) as cluster,
    ):
        yield cluster


@pytest.mark.timeout(1200)
async def test_the_page_shows_the_running_demo(cluster: Cluster) -> None:
    address = cluster.start_coordinator()
    cluster.start_agents(address)
    cluster.start_trainers()
    # Before the login, and before there is a timeline, requests may fail.
    async with browsing(expected=["401", "400"]) as page:
        await page.goto(cluster.page_url)
        await log_in(page, cluster.security.token_file.read_text().strip())
        await page.get_by_role("link", name="seen").click()
        state = page.locator("#content .state")
        await expect(state).to_have_text("profiling", timeout=LONG_MS)
        await expect(page.get_by_text("clocks tried")).to_be_visible()
        await expect(state).to_have_text("planned", timeout=LONG_MS)
        cluster.check()
        spoken = panel(page, "Timeline").locator("[aria-live=polite]")
        await panel(page, "Timeline").locator("canvas").focus()
        await page.keyboard.press("ArrowRight")
        await expect(spoken).to_contain_text("forward of microbatch 0")

        cluster.degrade(1, 1.5)
        target = panel(page, "Frontier").get_by_role("row").filter(has_text="T′, pipeline 1, detected")
        await expect(target).to_be_visible(timeout=LONG_MS)
        events = panel(page, "Events")
        await events.get_by_label("Which events").select_option("stragglers")
        detected = events.locator("li").filter(has_text="pipeline 1 is slow").first
        await expect(detected).to_be_visible()
        await detected.locator("summary").click()
        await expect(detected.locator("dl")).to_contain_text("planned span")

        cluster.degrade(1, 1.0)
        await expect(target).to_have_count(0, timeout=LONG_MS)
    cluster.stop_training()
    cluster.stop_services()
