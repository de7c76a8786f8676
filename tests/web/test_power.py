"""Feeds and their limits on the page, compared with gRPC's."""

from playwright.async_api import Route, expect

from tests.service.web.page_server import Site
from tests.web import display
from tests.web.browser import browsing, in_browser, inaccessible
from tests.web.test_page import planned, site_with_a_page

__all__ = ["site_with_a_page"]

pytestmark = in_browser


async def test_a_limited_feed_is_shown_with_its_slowed_jobs_until_its_budget_ends(
    site: Site,
) -> None:
    async with browsing() as page:
        agent = await planned(site)
        await page.goto(site.url)
        feeds = page.get_by_role("group", name="Feeds with a limit")
        await expect(page.get_by_role("link", name="job", exact=True)).to_be_visible()
        await expect(feeds).to_be_hidden()
        await site.client.ask("SetBudget", budget_id="peak", request_id="r", limit_w=1.0)
        row = feeds.get_by_role("row").filter(has_text="default")
        await expect(row).to_contain_text(display.watts(1.0))
        await expect(row).to_contain_text("not kept")
        await expect(row).to_contain_text("would require pausing job")
        await expect(row.get_by_role("cell").last).to_have_text("job")
        assert await inaccessible(page) == []
        await agent.iterate(1)
        job = page.get_by_role("row").filter(has=page.get_by_role("link", name="job", exact=True))
        held = await site.client.job()
        held_s = held.budget_target_iteration_time_s + held.iteration_overhead_s
        await expect(job).to_contain_text(f"slowed to {display.seconds(held_s)} by a power budget")
        await site.client.ask("CancelBudget", budget_id="peak")
        await expect(feeds).to_be_hidden()


async def test_a_feed_above_its_power_cap_is_shown_as_such_with_the_mean_that_decides(site: Site) -> None:
    feed = {"limit_w": 1000, "power_cap_w": 1000, "measured_w": 1081, "managed_w": 0, "unmanaged_w": 0}
    kept = {**feed, "feed": "a", "is_compliant": True, "judged_mean_w": 994, "judged_s": 41}
    above = {**feed, "feed": "b", "is_compliant": True, "is_in_transition": True, "is_above_power_cap": True}

    async def answer(route: Route) -> None:
        await route.fulfill(json={"feeds": [kept, above]})

    async with browsing() as page:
        await page.route("**/*ListFeeds*", answer)
        await page.goto(site.url)
        rows = page.get_by_role("group", name="Feeds with a limit").get_by_role("row")
        await expect(rows.nth(1)).to_contain_text("994 W in 41 s")
        await expect(rows.nth(1).locator(".state")).to_have_text("kept")
        await expect(rows.nth(2).locator(".state")).to_have_text("above power cap")
