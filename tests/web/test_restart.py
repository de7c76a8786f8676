"""A coordinator that is killed and comes back: the page shows that, and reconnects by itself."""

import asyncio
from pathlib import Path

from playwright.async_api import expect

from perseus.demo.processes import Coordinator
from perseus.v1 import job_pb2
from tests.ports import free_port
from tests.service.grpc_fakes import (
    connected,
    connected_to,
    make_settings,
    planned,
)
from tests.web.browser import browsing, figure, in_browser, panel

pytestmark = in_browser


async def test_the_page_becomes_stale_and_live_again(tmp_path: Path) -> None:
    http = f"127.0.0.1:{free_port()}"
    coordinator = Coordinator(tmp_path, tmp_path / "perseus.db", f"--http={http}")
    async with browsing(
        expected=["ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE", "ERR_EMPTY", "ERR_CONNECTION_RESET"]
    ) as page:
        state = page.locator("#stream-state")
        with coordinator:
            address = await asyncio.to_thread(coordinator.start)
            async with connected_to(address) as client:
                await client.register()
            await page.goto(f"http://{http}/#/jobs/job")
            await expect(state).to_have_text("live")
            await expect(figure(page, "ranks")).to_have_text("0 of 4")
            await page.evaluate("window.isTheSamePage = true")
            await asyncio.to_thread(coordinator.kill)
        await expect(state).to_contain_text("stale since")
        await expect(page.locator("main.stale")).to_be_visible()
        await expect(figure(page, "ranks")).to_have_text("0 of 4")  # old figures stay, and are marked
        with coordinator:
            await asyncio.to_thread(coordinator.start)
            await expect(state).to_have_text("live")
            await expect(page.locator("main.stale")).to_have_count(0)
            async with connected_to(address) as client:
                await client.register(job_id="another")
                await client.finish()
            await expect(page.locator("#content .state")).to_have_text("finished")
            events = panel(page, "Events").locator("li")
            texts = await events.all_inner_texts()
            assert len(texts) == len(set(texts)), texts  # no event appears twice
            assert await page.evaluate("window.isTheSamePage")


async def test_the_baselines_timeline_is_not_requested_after_a_restart_and_the_page_explains_why(
    tmp_path: Path,
) -> None:
    http = f"127.0.0.1:{free_port()}"
    settings = make_settings(tmp_path, http=http)
    async with connected(settings) as client:
        agent = await planned(client)
        assert (await client.job()).baseline.has_timeline
        await agent.end()
    async with connected(settings) as client, browsing() as page:  # no request may fail
        before = (await client.job()).baseline
        assert before.iteration_time_s > 0
        assert not before.has_timeline
        await page.goto(f"http://{http}/#/jobs/job")
        timeline = panel(page, "Timeline")
        await expect(timeline).to_contain_text("No iteration is complete yet.")
        agent.use(client)
        await agent.join()
        await agent.iterate(3)
        lost = "kept only until the coordinator restarts"
        await expect(timeline.locator(".note")).to_contain_text(lost)
        await client.ask("MeasureBaseline", job_id="job", request_id="again")
        await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
        assert (await client.job()).baseline.has_timeline
        await expect(timeline.locator(".note")).not_to_contain_text(lost)
        await timeline.get_by_text("As a table").click()
        at_stock = timeline.locator("tbody tr").filter(has_text="at stock")
        await expect(at_stock).to_have_count(12)
