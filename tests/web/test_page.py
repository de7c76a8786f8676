"""The page in a real browser, on a real coordinator with scripted agents: what it shows, and what it does."""

import re
import time
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Page, Route, expect

from perseus.cli.rows import row_of
from perseus.service.domain.model import PlannedClocks
from perseus.service.job import progress
from perseus.v1 import frontier_pb2, job_pb2, rank_pb2
from tests.service.grpc_fakes import ALL_PLACES, FakeAgent, joined, spec_message
from tests.service.web.page_server import Site, site
from tests.web import display
from tests.web.browser import (
    Scheme,
    browsing,
    choose,
    figure,
    in_browser,
    inaccessible,
    is_scrolled_sideways,
    panel,
)

pytestmark = in_browser


IN_ITS_HEADER = """(element) => {
  const header = element.closest("header").getBoundingClientRect();
  return [element.getBoundingClientRect().y - header.y, header.height];
}"""
"""The distance from the top of the header to an element, and the header's height; read together, as the page
moves."""


STICKING_OUT = """(controls) => {
  const { right } = controls.getBoundingClientRect();
  const shown = [...controls.querySelectorAll("form *")].filter((each) => each.getClientRects().length);
  return shown.filter((each) => each.getBoundingClientRect().right > right + 1).map((each) => each.outerHTML);
}"""
"""Elements that are wider than the controls' panel, which cuts them off."""


async def planned(site: Site, **counts: Any) -> FakeAgent:
    """Run a job of four ranks until it has plans in force, and a few iterations longer."""
    await site.client.register(**counts)
    agent = await site.train(job_pb2.JOB_STATE_PLANNED)
    while not all(isinstance(rank.in_force.clocks, PlannedClocks) for rank in agent.ranks.values()):
        await agent.iterate()
    await agent.iterate(6)
    return agent


@pytest_asyncio.fixture(loop_scope="session", name="site")
async def site_with_a_page(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path) as made:
        yield made


async def test_missing_content_is_explained(site: Site) -> None:
    async with browsing(expected=["404"]) as page:
        await page.goto(site.url)
        await expect(page.get_by_text("No jobs yet.")).to_be_visible()
        await site.client.register()
        step = "Next step: perseus jobs ranks job --state expected"
        await expect(page.get_by_role("row").filter(has_text="some ranks")).to_contain_text(step)
        await page.get_by_role("link", name="job", exact=True).click()
        await expect(page.get_by_role("heading", name="job", level=1)).to_be_visible()
        await expect(page.locator("#content .state")).to_have_text("waiting")
        await expect(page.get_by_text(step)).to_be_visible()
        await expect(panel(page, "Frontier")).to_contain_text("some have not joined yet")
        await expect(panel(page, "Ranks")).to_contain_text("4 expected")
        await expect(figure(page, "ranks")).to_have_text("0 of 4")
        labels = [{"key": "slurm-job", "value": "4711"}, {"key": "team", "value": "<b>vision</b>"}]
        spec = spec_message("labelled")
        await site.client.ask("RegisterJob", spec=spec, request_id="labelled", labels=labels)
        await page.goto(f"{site.url}/#/jobs/labelled")
        await expect(page.get_by_text("slurm-job=4711  ·  team=<b>vision</b>")).to_be_visible()
        await page.goto(f"{site.url}/#/jobs/nobody")
        await expect(page.get_by_text("There is no job “nobody”.")).to_be_visible()


async def test_what_moving_layers_would_bring_is_shown_with_its_assumption(site: Site) -> None:
    await planned(site, layers=[[4], [6]])
    assumption = "All layers count as equal; memory is not considered."
    async with browsing() as page:
        await page.goto(f"{site.url}/#/jobs/job")
        advice = panel(page, "Frontier").get_by_text(assumption)
        await expect(advice).to_contain_text("Moving layers between stages would hardly save anything")
        steps = [
            frontier_pb2.Partition(
                move=frontier_pb2.LayerMove(from_stage=1, to_stage=0),
                fastest=frontier_pb2.FrontierPoint(iteration_time_s=0.978),
                plan=frontier_pb2.FrontierPoint(energy_j=82),
                clocks_alone=frontier_pb2.IterationCost(energy_j=84),
            )
        ] * 2
        stock = frontier_pb2.IterationCost(iteration_time_s=1, energy_j=100)
        other = {"rebalancing": row_of(frontier_pb2.Rebalancing(stock=stock, steps=steps))}
        await page.route("**/api/FrontierService/GetRebalancing", lambda route: route.fulfill(json=other))
        await page.reload()
        await expect(advice).to_have_text(
            "Moving a layer from stage 1 to 0, then 1 to 0 would save 18.0 % of stock’s energy, clocks alone "
            f"16.0 % in the same time; the shortest iteration would change by −2.2 %. {assumption}"
        )


async def test_the_numbers_agree_with_grpc(site: Site) -> None:
    agent = await planned(site)
    job = await site.client.job()
    frontier = (await site.client.ask("GetFrontier", job_id="job")).frontier
    saving = job.figures.saving
    async with browsing() as page:
        await page.goto(site.url)
        row = page.get_by_role("row").filter(has=page.get_by_role("link", name="job", exact=True))
        for text in (
            "planned",
            "4 of 4",
            display.seconds(job.figures.iteration_time_s),
            display.watts(job.figures.power_w),
            display.percent(saving.energy_percent).removesuffix(" %"),
        ):
            await expect(row).to_contain_text(text)
        await row.get_by_role("link").click()

        await expect(figure(page, "iteration time")).to_have_text(
            display.seconds(job.figures.iteration_time_s)
        )
        await expect(figure(page, "energy per iteration")).to_have_text(display.joules(job.figures.energy_j))
        await expect(figure(page, "power")).to_have_text(display.watts(job.figures.power_w))
        await expect(figure(page, "energy saved")).to_contain_text(
            display.percent(saving.energy_percent).removesuffix(" %")
        )
        await expect(figure(page, "stragglers")).to_have_text("0")
        await expect(page.get_by_text(f"stock {display.joules(job.baseline.energy_j)}")).to_be_visible()

        places = panel(page, "Frontier").get_by_role("row")
        await expect(places).to_have_count(6)
        for name, time_s in (("Tmin", job.t_min_s), ("T*", job.t_star_s), ("Tslow", job.t_slow_s)):
            measured_s = time_s + job.iteration_overhead_s
            await expect(places.filter(has_text=name)).to_contain_text(display.seconds(measured_s))
        stock = places.filter(has_text="all at the highest clock")
        await expect(stock).to_contain_text(display.joules(frontier.baseline.energy_j))
        await expect(places.filter(has_text="in force")).to_contain_text(
            display.seconds(job.planned_iteration_time_s[0] + job.iteration_overhead_s)
        )

        periods = (await site.client.ask("GetReport", job_id="job")).periods
        measured = panel(page, "Measured").locator("tbody tr")
        await expect(measured).to_have_count(len(periods))
        await expect(measured.first).to_contain_text(f"{periods[-1].number} planned")
        await expect(measured.first).to_contain_text(display.percent(periods[-1].saving.energy_percent)[:-2])

        # News that comes while the page is open appears on it, too.
        await agent.iterate(3)
        iteration = agent.ranks[ALL_PLACES[0]].iteration
        await expect(panel(page, "Iterations")).to_contain_text(f"Latest: iteration {iteration}: 0.800 s")


async def test_the_timeline_shows_stock_and_plan_and_can_be_read_by_keyboard(site: Site) -> None:
    await planned(site)
    reported = await site.client.ask("GetTimeline", job_id="job")
    async with browsing() as page:
        await page.goto(f"{site.url}/#/jobs/job")
        timeline = panel(page, "Timeline")
        await timeline.get_by_text("As a table").click()
        rows = timeline.locator("tbody tr")
        await expect(rows).to_have_count(2 * len(reported.entries))
        await expect(rows.first).to_contain_text("at stock")
        entry = reported.entries[-1]
        last = rows.last
        await expect(last).to_contain_text(f"{1e3 * entry.duration_s:.1f} ms")
        await expect(last).to_contain_text(f"{entry.clock_mhz} MHz" if entry.clock_mhz else "stock")
        await expect(last).to_contain_text(display.watts(entry.power_w))

        await timeline.locator("canvas").focus()
        spoken = timeline.locator("[aria-live=polite]")
        await page.keyboard.press("ArrowRight")
        await expect(spoken).to_contain_text("forward of microbatch 0, stage 0, at stock")
        await page.keyboard.press("End")
        await expect(spoken).to_contain_text("backward of microbatch 2, stage 0, at stock")
        for _ in range(3):
            await page.keyboard.press("ArrowDown")
        await expect(spoken).to_contain_text("stage 1, now")
        await expect(timeline.locator(".tip")).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(timeline.locator(".tip")).to_be_hidden()


async def test_ranks_can_be_read_by_keyboard_and_in_detail(site: Site) -> None:
    await planned(site)
    async with browsing() as page:
        await page.goto(f"{site.url}/#/jobs/job")
        ranks = panel(page, "Ranks")
        await expect(ranks).to_contain_text("4 connected")
        await ranks.locator("canvas").focus()
        for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
            await page.keyboard.press(key)
        await expect(ranks.locator("[aria-live=polite]")).to_contain_text("pipeline 1, stage 1, connected")
        await page.keyboard.press("Enter")
        (rank,) = await site.client.ranks(pipeline=1, stage=1)
        row = ranks.locator("tbody tr")
        for text in (rank.hostname, rank.gpu_uuid, f"plan {rank.in_force_version}"):
            await expect(row).to_contain_text(text)
        for colour in ("clock", "slowness", "power", "state"):
            await choose(page, "Colour by", colour, within=ranks)
            await expect(ranks.locator(".legend").first).not_to_be_empty()


@pytest.mark.parametrize("width", [1280, 420])
@pytest.mark.parametrize("title", ["Ranks", "Timeline"])
async def test_choices_do_not_move_when_one_is_made(site: Site, title: str, width: int) -> None:
    await planned(site)
    async with browsing(width=width) as page:
        await page.goto(f"{site.url}/#/jobs/job")
        within = panel(page, title)
        await expect(within.locator(".legend").first).not_to_be_empty()
        choices = within.get_by_role("group", name="Colour by", exact=True)
        places = []
        for colour in await choices.get_by_role("radio").evaluate_all("all => all.map((each) => each.value)"):
            await choices.locator(f"label:has([value={colour}])").click()
            places.append(await choices.evaluate(IN_ITS_HEADER))
        assert len(places) > 1
        assert places == [places[0]] * len(places)


async def test_a_straggler_is_reported_and_cleared(site: Site) -> None:
    agent = await planned(site)
    async with browsing() as page:
        await page.goto(f"{site.url}/#/jobs/job")
        controls, frontier = panel(page, "Controls"), panel(page, "Frontier")
        await controls.get_by_label("pipeline", exact=True).fill("1")
        await controls.get_by_label("How slow", exact=True).fill("1.15")
        await controls.get_by_role("button", name="Report straggler").click()
        await expect(controls.get_by_role("status")).to_have_text("Pipeline 1 is reported as slow.")
        job = await site.client.job()
        (straggler,) = job.stragglers
        assert straggler.pipeline == 1
        target = display.seconds(straggler.iteration_time_s + job.iteration_overhead_s)
        row = frontier.get_by_role("row").filter(has_text="T′, pipeline 1, reported")
        await expect(row).to_contain_text(target)
        await expect(frontier.locator("svg")).to_contain_text("T′")
        await expect(figure(page, "stragglers")).to_have_text("1")
        await agent.iterate(4)
        others = frontier.get_by_role("row").filter(has_text="in force: pipeline 0")
        job = await site.client.job()
        planned_s = job.planned_iteration_time_s
        assert planned_s[0] > planned_s[1]
        await expect(others).to_contain_text(display.seconds(planned_s[0] + job.iteration_overhead_s))

        await controls.get_by_role("button", name="Clear straggler, pipeline 1").click()
        await expect(figure(page, "stragglers")).to_have_text("0")
        await expect(row).to_have_count(0)
        assert not (await site.client.job()).stragglers
        events = panel(page, "Events")
        await events.get_by_label("Which events").select_option("stragglers")
        await expect(events.locator("li")).to_have_count(2)
        await events.locator("summary").last.click()
        await expect(events.locator("dl").last).to_contain_text("slowdown factor")


async def test_policy_and_baseline(site: Site) -> None:
    await planned(site)
    async with browsing(expected=["400"]) as page:
        await page.goto(f"{site.url}/#/jobs/job")
        controls = panel(page, "Controls")
        await controls.get_by_label("Policy", exact=True).select_option("max_slowdown_percent")
        await controls.get_by_label("percent, %").fill("3")
        await controls.get_by_role("button", name="Set policy").click()
        await expect(figure(page, "policy")).to_have_text("At most 3 % slower than stock")
        assert (await site.client.job()).policy.max_slowdown_percent == 3

        await controls.get_by_label("Policy", exact=True).select_option("deadline")
        await controls.get_by_label("iterations, iterations").fill("100000000000000000")
        await controls.get_by_role("button", name="Set policy").click()
        await expect(controls.locator(".outcome")).to_contain_text("iteration_count")
        await expect(controls.locator(".outcome")).to_contain_class("wrong")
        assert (await site.client.job()).policy.max_slowdown_percent == 3

        await controls.get_by_role("button", name="Measure baseline again").click()
        await expect(page.locator("#content .state")).to_have_text("baseline")
        assert (await site.client.job()).state == job_pb2.JOB_STATE_BASELINE
        await expect(controls.get_by_role("button", name="Measure baseline again")).to_be_disabled()


async def test_policies_with_a_signal_are_set_as_on_the_command_line_and_fit_a_telephone(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody trains on: the line that says so would move the form while it is used.
    monkeypatch.setattr(progress, "NO_PROGRESS_TIMEOUT_S", 3600.0)
    await planned(site)
    async with browsing(width=360, height=740) as page:
        await page.goto(f"{site.url}/#/jobs/job")
        controls = panel(page, "Controls")
        chosen = controls.get_by_label("Policy", exact=True)
        submit = controls.get_by_role("button", name="Set policy")
        percent, horizon = (
            controls.get_by_label("extra time, % more time"),
            controls.get_by_label("horizon, h"),
        )

        async def choose_policy(label: str) -> None:
            await chosen.select_option(label=label)
            assert not await is_scrolled_sideways(page)
            assert await controls.locator(".controls").evaluate(STICKING_OUT) == []

        await choose_policy("Least carbon, within extra time")
        # The least horizon is an hour, the most 366 days.
        for given_percent, given_h, invalid_count in (
            ("7.5", "0.5", 1),
            ("7.5", "8785", 1),
            ("1001", "8785", 2),
        ):
            await percent.fill(given_percent)
            await horizon.fill(given_h)
            await submit.click()
            assert await controls.locator("input:invalid").count() == invalid_count
        assert (await site.client.job()).policy.WhichOneof("rule") == "no_slowdown"

        await percent.fill("7.5")
        await horizon.fill("36")
        await horizon.press("Enter")
        await expect(controls.locator(".outcome")).to_have_text("The policy is set.")
        await expect(controls.locator(".outcome")).to_contain_class("well")
        extra = (await site.client.job()).policy.least_carbon.extra_time
        assert (extra.percent, extra.horizon_s) == (7.5, 36 * 3600)
        await expect(figure(page, "policy")).to_contain_text("Least carbon within 7.5 % more time")
        assert await inaccessible(page) == []

        await choose_policy("Least cost, until a time")
        default = await controls.get_by_label("time, UTC").input_value()
        default_s = datetime.fromisoformat(f"{default}Z").timestamp()
        assert abs(default_s - time.time() - 86_400) < 120
        await controls.get_by_label("iterations, iterations").fill("4000")
        await controls.get_by_label("time, UTC").fill("2096-02-29T12:30")
        await submit.click()
        await expect(figure(page, "policy")).to_contain_text("Least cost for 4")
        work = (await site.client.job()).policy.least_cost.work_until
        assert work.iteration_count == 4000
        assert work.end_time.ToJsonString() == "2096-02-29T12:30:00Z"
        assert await inaccessible(page) == []


async def test_finishing_a_job_needs_a_confirmation(site: Site) -> None:
    await planned(site)
    async with browsing() as page:
        await page.goto(f"{site.url}/#/jobs/job")
        await panel(page, "Controls").get_by_role("button", name="Finish job…").click()
        dialog = page.get_by_role("dialog")
        await dialog.get_by_role("button", name="Keep it running").click()
        assert (await site.client.job()).state == job_pb2.JOB_STATE_PLANNED
        await panel(page, "Controls").get_by_role("button", name="Finish job…").click()
        await dialog.get_by_role("button", name="Finish the job").click()
        await expect(page.locator("#content .state")).to_have_text("finished")
        await expect(page.locator("#stream-state")).to_have_text("the run has ended")
        assert (await site.client.job()).state == job_pb2.JOB_STATE_FINISHED


async def test_texts_from_others_are_not_markup(site: Site) -> None:
    markup = "<img src=x onerror=alert(1)>"
    agent = await joined(site.client)
    reason = rank_pb2.GPU_ERROR_REASON_NO_PERMISSION
    about = {"job_id": "job", "rank": agent.place(ALL_PLACES[0]), "gpu_uuid": markup}
    await agent.send(gpu_error=about | {"reason": reason, "message": markup})
    async with browsing() as page:
        await page.goto(f"{site.url}/#/jobs/job")
        event = panel(page, "Events").locator("li").filter(has_text=markup)
        await event.locator("summary").click()
        await expect(event.locator("dl")).to_contain_text(markup)
        assert await page.locator("img").count() == 0


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 360)])
async def test_nothing_is_inaccessible_or_wider_than_the_screen(
    site: Site, scheme: Scheme, width: int
) -> None:
    await planned(site)
    await site.client.register(job_id="waiting")
    async with browsing(scheme=scheme, width=width, height=740) as page:
        await page.goto(site.url)
        await expect(page.get_by_role("link", name="waiting")).to_be_visible()
        assert await inaccessible(page) == []
        assert not await is_scrolled_sideways(page)
        await page.get_by_role("link", name="job", exact=True).click()
        await expect(panel(page, "Timeline").locator("canvas")).to_be_visible()
        await expect(panel(page, "Measured").locator("tbody tr").first).to_be_visible()
        places = panel(page, "Frontier").locator(".scroll")
        hidden_px = "places => places.scrollWidth - places.clientWidth"
        assert await places.evaluate(hidden_px) == 0, "the last column has the energy saved"
        for summary in await page.locator("details > summary").all():
            await summary.click()
        assert await inaccessible(page) == []
        assert not await is_scrolled_sideways(page)


async def test_the_keyboard_is_enough(site: Site) -> None:
    await planned(site)
    async with browsing() as page:
        await page.goto(site.url)
        link = page.get_by_role("link", name="job", exact=True)
        await expect(link).to_be_visible()
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
        await press_until(page, "Tab", "a[href='#/jobs/job']")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", name="job", level=1)).to_be_visible()
        await expect(page.locator("#content")).to_be_focused()
        await press_until(page, "Tab", "#policy")
        await page.keyboard.press("ArrowDown")
        await press_until(page, "Tab", "button[type=submit]")
        await page.keyboard.press("Enter")
        await expect(figure(page, "policy")).to_have_text(re.compile("At most 5 %"))


async def press_until(page: Page, key: str, selector: str) -> None:
    for _ in range(60):
        await page.keyboard.press(key)
        if await page.evaluate("wanted => document.activeElement.matches(wanted)", selector):
            return
    raise AssertionError(f"expected the focus at {selector} within 60 times {key}")


async def test_a_new_run_replaces_the_old_one(site: Site) -> None:
    await planned(site)
    # What is requested of the old run may be answered by the new one, which has no timeline yet.
    async with browsing(expected=["400"]) as page:
        await page.goto(f"{site.url}/#/jobs/job")
        await expect(panel(page, "Frontier").locator("svg")).to_be_visible()
        await site.client.finish()
        await expect(page.locator("#stream-state")).to_have_text("the run has ended")
        await site.client.register()
        await expect(page.get_by_text(re.compile("^run 2"))).to_be_visible()
        await expect(page.locator("#stream-state")).to_have_text("live")
        await expect(panel(page, "Frontier").locator("svg")).to_have_count(0)
        await expect(panel(page, "Events").locator("li")).to_have_count(1)


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
