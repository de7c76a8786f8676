"""The ledger on the page, in a real browser: of one job, and of all of them in a period."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Locator, Page, expect

from perseus.service.domain.ledger import HOUR_S, EnergyHour, EnergySums, Rates, Reference
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import Entry, JobDeleted, JobEntry, NewRun
from perseus.v1.ledger_service_pb2 import LedgerAccount
from tests.service.grpc_fakes import joined, planned
from tests.service.service_fakes import make_spec
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


NOW = datetime(2026, 11, 22, 13, 14, tzinfo=UTC)
BASELINE = Reference(0, 25, 4.0e4, 1e6 * 24)
RATES = Rates(0.25, 400.0)
SUMS = EnergySums(
    iteration_count=1_000,
    time_s=3_600.0,
    stock_energy_j=3.6e6,
    compared_count=900,
    compared_energy_j=900 * 3.2e4,
    energy_m2=1e6 * 899,
    freedom_count=899,
    profiling_count=100,
    profiling_energy_j=100 * 4.2e4,
    straggler_energy_j=9e5,
)
"""1 kWh at stock, 8 kWh under plans that would have been 10 kWh at stock."""


def hour(at: datetime) -> int:
    return int(at.timestamp() // HOUR_S)


def used(job_id: str, run_number: int, at: datetime) -> JobEntry:
    return JobEntry(job_id, run_number, EnergyHour(hour(at), BASELINE, SUMS, RATES))


def at(month: int, day: int, hour_of_day: int) -> datetime:
    return datetime(2026, month, day, hour_of_day, tzinfo=UTC)


AT_STOCK = EnergyHour(hour(at(11, 22, 9)), None, EnergySums(5, 1, 4.0, 1.8e6), Rates())
ENTRIES: list[Entry] = [
    *(NewRun(make_spec(job_id), 1, 1.0) for job_id in ("gpt3", "old", "bare")),
    NewRun(make_spec("gpt3"), 2, 2.0),
    used("gpt3", 1, at(10, 3, 7)),
    used("gpt3", 1, at(11, 2, 7)),
    used("gpt3", 2, at(11, 16, 2)),
    used("gpt3", 2, at(11, 22, 13)),
    used("old", 1, at(11, 17, 8)),
    JobEntry("bare", 1, AT_STOCK),
    JobDeleted("old", 0),
]


@asynccontextmanager
async def serving(folder: Path, entries: Iterable[Entry] = (), **settings: Any) -> AsyncIterator[Site]:
    store = await SqlStore.open(folder / "perseus.db")
    for each in entries:
        await store.write([each])
    await store.close()
    async with site(folder, keep_ledger_days=36_500, **settings) as made:
        yield made


async def open_ledger(site: Site, page: Page) -> None:
    """Open the ledger, at a fixed time."""
    await page.clock.set_fixed_time(NOW)
    await page.goto(f"{site.url}/#/ledger")


def table_row(page: Page, name: str) -> Locator:
    """Return the row with that header."""
    return page.get_by_role("row").filter(has=page.get_by_role("rowheader", name=name, exact=True))


@pytest_asyncio.fixture(loop_scope="session", name="site")
async def site_with_a_ledger(tmp_path: Path) -> AsyncIterator[Site]:
    async with serving(tmp_path, ENTRIES) as made:
        yield made


def figures(account: LedgerAccount) -> list[str]:
    """Return the row's texts of an account without unknowns."""
    return [
        display.kwh(account.energy_kwh),
        display.kwh(account.saved_energy_kwh, account.saved_energy_margin_kwh or None),
        display.percent(account.saved_percent),
        display.money(account.cost),
        display.money(account.saved_cost),
        display.carbon(account.carbon_g),
        display.carbon(account.saved_carbon_g),
    ]


PERIODS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("today", {"start_time": at(11, 22, 0)}, ["bare", "gpt3", "total"]),
    ("7 days", {"start_time": at(11, 15, 13)}, ["bare", "gpt3", "old deleted", "total"]),
    (
        "this month",
        {"start_time": at(11, 1, 0)},
        ["bare", "gpt3", "run 1", "run 2", "old deleted", "total"],
    ),
    ("last month", {"start_time": at(10, 1, 0), "end_time": at(11, 1, 0)}, ["gpt3", "total"]),
]


@pytest.mark.parametrize(("period", "times", "rows"), PERIODS, ids=[name for name, *_ in PERIODS])
async def test_a_periods_numbers_agree_with_grpc(
    site: Site, period: str, times: dict[str, Any], rows: list[str]
) -> None:
    reported = await site.client.ask("ListLedgerEntries", **times)
    of_job = await site.client.ask("ListLedgerEntries", job_id="gpt3", **times)
    of_job.total.ClearField("saved_energy_margin_kwh")  # no interval is invented for several runs
    async with browsing() as page:
        await open_ledger(site, page)
        await choose(page, "Period", period)
        await expect(page.get_by_role("rowheader")).to_have_text(rows)
        cells = table_row(page, "total").get_by_role("cell")
        energy = display.kwh(reported.total.energy_kwh)
        saved = display.kwh(reported.total.saved_energy_kwh, reported.total.saved_energy_margin_kwh)
        await expect(cells.nth(1)).to_have_text(energy)
        await expect(cells.nth(2)).to_have_text(saved)
        await expect(cells.nth(3)).to_have_text(display.percent(reported.total.saved_percent))
        await expect(figure(page, "used")).to_have_text(energy)
        await expect(figure(page, "saved")).to_have_text(saved)
        for entry in reported.entries:
            if entry.job_id == "bare":
                shown = ["run 1", "0.500 kWh", *6 * ["unknown"]]
                await expect(table_row(page, "bare").get_by_role("cell")).to_have_text(shown)
                continue
            # Each of several runs has its own row below the job's.
            run_name = f"run {entry.run_number}"
            is_one_of_several = entry.job_id == "gpt3" and run_name in rows
            name = run_name if is_one_of_several else f"{entry.job_id}{' deleted' * entry.is_deleted}"
            shown = ["" if is_one_of_several else run_name, *figures(entry.account)]
            await expect(table_row(page, name).get_by_role("cell")).to_have_text(shown)
            has_link = not (is_one_of_several or entry.is_deleted)
            await expect(table_row(page, name).get_by_role("link")).to_have_count(int(has_link))
        if "run 2" in rows:
            cells = table_row(page, "gpt3").get_by_role("cell")
            await expect(cells).to_have_text(["2", *figures(of_job.total)])


async def test_an_empty_ledger_shows_a_message(tmp_path: Path) -> None:
    async with serving(tmp_path) as site, browsing() as page:
        await open_ledger(site, page)
        await expect(page.get_by_text("The ledger has no energy in this period")).to_be_visible()
        await expect(page.get_by_text("2026-11-01 00:00 UTC to now")).to_be_visible()
        await expect(page.get_by_role("table")).to_have_count(0)
        await site.client.register()
        await page.goto(f"{site.url}/#/jobs/job")
        await expect(panel(page, "Ledger")).to_contain_text("Nothing has been counted yet.")


async def test_the_savings_of_a_job_without_a_baseline_are_unknown(tmp_path: Path) -> None:
    async with serving(tmp_path, baseline_iterations=100) as site, browsing() as page:
        agent = await joined(site.client)
        await agent.iterate(1)
        await page.goto(f"{site.url}/#/jobs/job")
        ledger = panel(page, "Ledger")
        for name in ("saved against stock", "saved, percent", "cost", "cost saved", "CO₂", "CO₂ saved"):
            await expect(table_row(page, name).get_by_role("cell")).to_have_text("unknown")
        row = table_row(page, "assumed: price per kWh").get_by_role("cell")
        await expect(row).to_have_text("unknown: not set")
        await expect(ledger).to_contain_text("Saving unknown: no stock baseline was measured.")
        # All of it is uncompared, and the figure of the energy used shows that, too.
        used_kwh = await table_row(page, "used").get_by_role("cell").inner_text()
        await expect(table_row(page, "uncompared").get_by_role("cell")).to_have_text(used_kwh)
        assert used_kwh != "0 kWh"


async def test_a_jobs_ledger_shows_this_run_and_all_runs(site: Site) -> None:
    reported = await site.client.ask("ListLedgerEntries", job_id="gpt3")
    run_account = reported.entries[-1].account
    async with browsing() as page:
        await page.goto(f"{site.url}/#/jobs/gpt3")
        ledger = panel(page, "Ledger")
        await expect(ledger.get_by_role("columnheader")).to_have_text(["this run", "all 2 runs"])
        names = ["used", "saved against stock", "saved, percent", "cost", "cost saved", "CO₂", "CO₂ saved"]
        for name, own, whole in zip(names, figures(run_account), figures(reported.total), strict=True):
            await expect(table_row(page, name).get_by_role("cell")).to_have_text([own, whole])
        profiling_kwh, extra_kwh = run_account.profiling_energy_kwh, run_account.profiling_extra_energy_kwh
        profiling = table_row(page, "used for profiling").get_by_role("cell")
        await expect(profiling.first).to_have_text(display.kwh(profiling_kwh))
        extra = table_row(page, "profiling beyond stock").get_by_role("cell")
        await expect(extra.first).to_have_text(f"+{display.kwh(extra_kwh)}")
        assumed = table_row(page, "assumed: price per kWh").get_by_role("cell")
        await expect(assumed).to_have_text(["0.25", "0.25"])
        assumed = table_row(page, "assumed: CO₂ per kWh").get_by_role("cell")
        await expect(assumed).to_have_text(["400 g", "400 g"])
        await expect(ledger).to_contain_text(
            f"{display.kwh(reported.total.straggler_energy_kwh)} with a straggler"
        )


async def test_a_running_jobs_ledger_agrees_with_grpc(tmp_path: Path) -> None:
    async with serving(tmp_path, price_per_kwh=0.25, intensity_g_per_kwh=400.0) as site:
        agent = await planned(site.client)
        account = (await site.client.ask("ListLedgerEntries", job_id="job")).total
        async with browsing() as page:
            await page.goto(f"{site.url}/#/jobs/job")
            await expect(panel(page, "Ledger").get_by_role("columnheader")).to_have_text(
                "this run, the only one"
            )
            used_kwh = await table_row(page, "used").get_by_role("cell").inner_text()
            assert float(used_kwh.removesuffix(" kWh")) == pytest.approx(account.energy_kwh, rel=0.01)
            await expect(table_row(page, "iterations").get_by_role("cell")).to_have_text(
                str(account.iteration_count)
            )
            await agent.iterate(3)
            more = table_row(page, "iterations").get_by_role("cell")
            await expect(more).to_have_text(str(account.iteration_count + 3))


async def test_figures_without_updates_are_stale(site: Site) -> None:
    async with browsing(expected=["ERR_FAILED"]) as page:
        await open_ledger(site, page)
        await expect(page.locator("#stream-state")).to_have_text("live")
        shown = await figure(page, "used").inner_text()
        await page.route("**/ListLedgerEntries", lambda route: asyncio.ensure_future(route.abort()))
        await choose(page, "Period", "today")
        await expect(page.locator("#stream-state")).to_contain_text("stale since")
        await expect(figure(page, "used")).to_have_text(shown)
        # The figures are still those of the period before, and are marked as such.
        await expect(page.get_by_text("2026-11-01 00:00 UTC to now")).to_be_visible()
        await page.unroute("**/ListLedgerEntries")
        await expect(page.locator("#stream-state")).to_have_text("live")
        await expect(page.get_by_text("2026-11-22 00:00 UTC to now")).to_be_visible()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 360)])
async def test_nothing_is_inaccessible(site: Site, scheme: Scheme, width: int) -> None:
    async with browsing(scheme=scheme, width=width) as page:
        await open_ledger(site, page)
        await expect(table_row(page, "total")).to_be_visible()
        assert await inaccessible(page) == []
        assert not await is_scrolled_sideways(page)
        await page.goto(f"{site.url}/#/jobs/gpt3")
        await expect(table_row(page, "uncompared")).to_be_visible()
        assert await inaccessible(page) == []
        assert not await is_scrolled_sideways(page)


async def test_the_keyboard_is_enough(site: Site) -> None:
    async with browsing() as page:
        await page.clock.set_fixed_time(NOW)
        await page.goto(site.url)
        await page.get_by_role("link", name="Ledger").focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", name="Ledger", level=1)).to_be_visible()
        await expect(page.locator("#content")).to_be_focused()
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("radio", name="this month")).to_be_focused()
        await page.keyboard.press("ArrowRight")
        await expect(page.get_by_role("radio", name="last month")).to_be_checked()
        await expect(page.get_by_text("2026-10-01 00:00 to 2026-11-01 00:00 UTC")).to_be_visible()
        await expect(page.get_by_role("rowheader")).to_have_text(["gpt3", "total"])
        await page.get_by_role("link", name="gpt3", exact=True).focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", name="gpt3", level=1)).to_be_visible()
