"""A coordinator with a page, and a ledger that was filled beforehand."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from playwright.async_api import Locator, Page

from perseus.service.domain.ledger import HOUR_S, EnergyHour, EnergySums, Rates, Reference
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import Entry, JobDeleted, JobEntry, NewRun
from tests.service.service_fakes import make_spec
from tests.service.web.page_server import Site, site

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
