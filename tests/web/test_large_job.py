"""A job of 4,096 ranks on the page, and a list of a hundred jobs."""

from pathlib import Path

import pytest
from playwright.async_api import expect

from perseus.service.domain.model import JobState
from tests.service.job.clusters import TimedCluster
from tests.service.service_fakes import make_spec
from tests.web.browser import browsing, figure, in_browser, inaccessible, is_scrolled_sideways, panel
from tests.web.fleet import fleet, machine

pytestmark = in_browser

RANKS = 4096
PIPELINES = 1024


@pytest.mark.parametrize("width", [1280, 360])
async def test_all_4096_ranks_are_shown(tmp_path: Path, width: int) -> None:
    async with fleet(tmp_path, [machine("large", RANKS)]) as site, browsing(width=width) as page:
        await page.goto(f"{site.url}/#/jobs/large")
        await expect(figure(page, "ranks")).to_have_text("4096 of 4096")
        ranks = panel(page, "Ranks")
        await expect(ranks).to_contain_text("4096 connected")
        await expect(panel(page, "Timeline").locator("canvas")).to_be_visible()
        assert not await is_scrolled_sideways(page)

        canvas = ranks.locator("canvas")
        await canvas.focus()
        await page.keyboard.press("ArrowRight")
        await page.keyboard.press("End")
        spoken = ranks.locator("[aria-live=polite]")
        await expect(spoken).to_contain_text(f"pipeline {PIPELINES - 1}, stage 0, connected")

        # The pointer finds the same cells as the keys, through every band.
        where = await canvas.bounding_box()
        assert where is not None
        await page.keyboard.press("Escape")
        tip = ranks.locator(".tip")
        await canvas.hover(position={"x": 59, "y": 24})
        await expect(tip).to_contain_text("pipeline 0, stage 0")
        await canvas.hover(position={"x": 59, "y": where["height"] - 13})
        await expect(tip).to_contain_text("stage 3")
        assert await inaccessible(page) == []


async def test_the_clocks_tried_and_a_detected_straggler_are_shown(tmp_path: Path) -> None:
    profiled, slow = [
        TimedCluster(make_spec(job_id, stages=3, microbatches=6)) for job_id in ("profiled", "slow")
    ]
    profiled.join_all()
    profiled.run_until(JobState.PROFILING)
    slow.run_to_plan()
    assert slow.findings(5, {1: 1.5})
    jobs = [profiled.machine, slow.machine]
    async with fleet(tmp_path, jobs) as site, browsing(expected=["400"]) as page:
        await page.goto(f"{site.url}/#/jobs/profiled")
        await expect(page.locator("#content .state")).to_have_text("profiling")
        await expect(page.get_by_text("clocks tried")).to_be_visible()
        await page.goto(f"{site.url}/#/jobs/slow")
        target = panel(page, "Frontier").get_by_role("row").filter(has_text="T′, pipeline 1, detected")
        await expect(target).to_be_visible()
        controls = panel(page, "Controls")
        await expect(controls).to_contain_text("Pipeline 1, detected")
        await expect(controls.get_by_role("button", name="Clear straggler")).to_have_count(0)


async def test_a_hundred_jobs_are_sorted_and_filtered(tmp_path: Path) -> None:
    names = [f"job-{number:03}" for number in range(99)]
    jobs = [machine(name, 8, JobState.WAITING) for name in names]
    async with fleet(tmp_path, [*jobs, machine("the-large-one", 64)]) as site, browsing() as page:
        await page.goto(site.url)
        links = page.locator("tbody a")
        await expect(links).to_have_count(100)
        await expect(links.first).to_have_text("job-000")
        await page.get_by_role("button", name="ranks").click()
        await expect(links.first).to_have_text("the-large-one")
        await expect(page.get_by_role("columnheader", name="ranks")).to_have_attribute(
            "aria-sort", "descending"
        )
        await page.get_by_label("Filter jobs").fill("planned")
        await expect(links).to_have_text(["the-large-one"])
        await page.get_by_label("Filter jobs").fill("job-04")
        await expect(links).to_have_count(10)
        await page.get_by_label("Filter jobs").fill("nobody")
        await expect(page.get_by_text("No job matches by name or state.")).to_be_visible()
