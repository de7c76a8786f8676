"""The demo's processes, seen in a browser: agents, trainers and a coordinator as in production."""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from perseus.demo.cluster import Cluster
from perseus.v1 import job_pb2
from tests.service.grpc_fakes import Client
from tests.web import display
from tests.web.browser import browsing, figure, in_browser, panel
from tests.web.demo import log_in
from tests.workloads import SMALL

pytestmark = in_browser

WORKLOAD = replace(SMALL, job_id="seen")
LONG_MS = 90_000


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with (
        tempfile.TemporaryDirectory(prefix="perseus-") as run_dir,
        Cluster(WORKLOAD, Path(run_dir), tmp_path / "logs", serves_page=True) as cluster,
    ):
        yield cluster


# A training beside other tests takes longer than planned: its plan is withdrawn.
@pytest.mark.serial
@pytest.mark.timeout(300)
async def test_the_page_shows_the_running_demo(cluster: Cluster) -> None:
    address = cluster.start_coordinator()
    cluster.start_agents(address)
    cluster.start_trainers()
    async with (
        cluster.security.channels(address).open() as channel,
        # Before the login, and before there is a timeline, requests may fail.
        browsing(expected=["401", "400"]) as page,
    ):
        client = Client(channel)
        await page.goto(cluster.page_url)
        await log_in(page, cluster)
        await page.get_by_role("link", name="seen").click()
        state = page.locator("#content .state")
        await expect(state).to_have_text("profiling", timeout=LONG_MS)
        await expect(page.get_by_text("clocks tried")).to_be_visible()
        await expect(state).to_have_text("planned", timeout=LONG_MS)
        cluster.check()

        # Training continues all the while: at some moment page and gRPC show the same.
        await figures_agree(page, client)
        job = await client.job("seen")
        frontier = panel(page, "Frontier").get_by_role("row")
        shortest = display.seconds(job.t_min_s + job.iteration_overhead_s)
        await expect(frontier.filter(has_text="Tmin")).to_contain_text(shortest)
        await expect(page.get_by_text(f"stock {display.joules(job.baseline.energy_j)}")).to_be_visible()
        spoken = panel(page, "Timeline").locator("[aria-live=polite]")
        await panel(page, "Timeline").locator("canvas").focus()
        await page.keyboard.press("ArrowRight")
        await expect(spoken).to_contain_text("forward of microbatch 0")

        cluster.degrade(1, 1.3)
        target = frontier.filter(has_text="T′, pipeline 1, detected")
        await expect(target).to_be_visible(timeout=LONG_MS)
        await expect(figure(page, "stragglers")).to_have_text("1")
        events = panel(page, "Events")
        await events.get_by_label("Which events").select_option("stragglers")
        detected = events.locator("li").filter(has_text="pipeline 1 is slow").first
        await expect(detected).to_be_visible()
        await detected.locator("summary").click()
        await expect(detected.locator("dl")).to_contain_text("planned span")

        cluster.degrade(1, 1.0)
        await expect(target).to_have_count(0, timeout=LONG_MS)
        assert job_pb2.JobState.Name((await client.job("seen")).state) == "JOB_STATE_PLANNED"
    cluster.stop_training()
    cluster.stop_services()


async def figures_agree(page: Page, client: Client) -> None:
    ends_s = time.monotonic() + 30
    while True:
        shown = [
            await figure(page, name).inner_text()
            for name in ("iteration time", "energy per iteration", "power")
        ]
        figures = (await client.job("seen")).figures
        reported = [
            display.seconds(figures.iteration_time_s),
            display.joules(figures.energy_j),
            display.watts(figures.power_w),
        ]
        if shown == reported:
            return
        assert time.monotonic() < ends_s, (shown, reported)
        await page.wait_for_timeout(50)
