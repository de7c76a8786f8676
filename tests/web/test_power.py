"""Feeds and their limits on the page, compared with gRPC's."""

from pathlib import Path

from playwright.async_api import Route, expect

from perseus.v1 import power_service_pb2
from perseus.v1.power_service_pb2_grpc import PowerServiceStub
from tests.service.grpc_fakes import TIMEOUT_S
from tests.web import display
from tests.web.browser import browsing, in_browser, inaccessible
from tests.web.test_page import serving

pytestmark = in_browser


async def test_a_limited_feed_is_shown_with_its_slowed_jobs_until_its_budget_ends(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as site, browsing() as page:
        await site.plan()
        power = PowerServiceStub(site.client.channel)
        await page.goto(site.url)
        feeds = page.get_by_role("group", name="Feeds with a limit")
        await expect(page.get_by_role("link", name="job", exact=True)).to_be_visible()
        await expect(feeds).to_be_hidden()
        request = power_service_pb2.SetBudgetRequest(budget_id="peak", request_id="r", limit_w=1.0)
        await power.SetBudget(request, timeout=TIMEOUT_S)
        row = feeds.get_by_role("row").filter(has_text="default")
        await expect(row).to_contain_text(display.watts(1.0))
        await expect(row).to_contain_text("not kept")
        await expect(row).to_contain_text("would require pausing job")
        await expect(row.get_by_role("cell").last).to_have_text("job")
        assert await inaccessible(page) == []
        await site.agent.iterate(1)
        job = page.get_by_role("row").filter(has=page.get_by_role("link", name="job", exact=True))
        held = await site.client.job()
        held_s = held.budget_target_iteration_time_s + held.iteration_overhead_s
        await expect(job).to_contain_text(f"slowed to {display.seconds(held_s)} by a power budget")
        await power.CancelBudget(power_service_pb2.CancelBudgetRequest(budget_id="peak"), timeout=TIMEOUT_S)
        await expect(feeds).to_be_hidden()


async def test_a_feed_above_its_power_cap_is_shown_as_such_with_the_mean_that_decides(tmp_path: Path) -> None:
    feed = {"limit_w": 1000, "power_cap_w": 1000, "measured_w": 1081, "managed_w": 0, "unmanaged_w": 0}
    kept = {**feed, "feed": "a", "is_compliant": True, "judged_mean_w": 994, "judged_s": 41}
    above = {**feed, "feed": "b", "is_compliant": True, "is_in_transition": True, "is_above_power_cap": True}

    async def answer(route: Route) -> None:
        await route.fulfill(json={"feeds": [kept, above]})

    async with serving(tmp_path) as site, browsing() as page:
        await page.route("**/*ListFeeds*", answer)
        await page.goto(site.url)
        rows = page.get_by_role("group", name="Feeds with a limit").get_by_role("row")
        await expect(rows.nth(1)).to_contain_text("994 W in 41 s")
        await expect(rows.nth(1).locator(".state")).to_have_text("kept")
        await expect(rows.nth(2).locator(".state")).to_have_text("above power cap")
