"""The ledger over real gRPC: while a job runs, after its end, after its deletion, after a kill."""

import asyncio
import gc
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import pytest
from structlog.testing import capture_logs

from perseus.service.domain.ledger import HOUR_S, EnergyGroup, HourFilter
from perseus.service.fleet.ledger_totals import RunningTotals
from perseus.service.server import collect_rarely
from perseus.service.shell.ledger import Ledger
from perseus.service.storage.sql_store import SqlStore
from perseus.v1 import ledger_service_pb2 as pb
from tests.ports import free_port
from tests.service.grpc_fakes import ALL_PLACES, Client, connected, make_settings, planned
from tests.service.web.scraping import scrape


async def listed(client: Client, **wanted: Any) -> pb.ListLedgerEntriesResponse:
    response: pb.ListLedgerEntriesResponse = await client.ask("ListLedgerEntries", **wanted)
    return response


async def test_a_job_is_in_the_ledger_with_all_its_energy_and_stays_there(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, price_per_kwh=0.25, intensity_g_per_kwh=400.0)
    async with connected(settings) as client:
        agent = await planned(client)
        found = await listed(client)
        (entry,) = found.entries
        account = entry.account
        assert (entry.job_id, entry.run_number, entry.is_deleted) == ("job", 1, False)
        assert found.total == account
        measured = (await client.ask("GetReport", job_id="job", run_number=1)).periods
        # The report leaves out the first iteration under its plans; the bill does not.
        assert account.iteration_count == agent.ranks[ALL_PLACES[0]].iteration + 1
        assert account.iteration_count > sum(period.iteration_count for period in measured)
        assert account.time_s == pytest.approx(0.8 * account.iteration_count)
        assert account.cost == pytest.approx(0.25 * account.energy_kwh)
        assert account.carbon_g == pytest.approx(400 * account.energy_kwh)
        assert account.price_per_kwh == pytest.approx(0.25)
        assert account.intensity_g_per_kwh == pytest.approx(400.0)
        assert account.profiling_energy_kwh > 0
        assert account.HasField("saved_energy_kwh")
        seconds = entry.start_time.seconds
        assert seconds % HOUR_S == 0
        assert entry.end_time.seconds - seconds in (HOUR_S, 2 * HOUR_S)

        await client.finish()
        await agent.end()
        await client.ask("DeleteJob", job_id="job")
        (deleted,) = (await listed(client)).entries
        assert (deleted.is_deleted, deleted.account) == (True, account)


async def test_a_fault_in_the_totals_ends_only_the_totals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise OverflowError

    monkeypatch.setattr("perseus.service.shell.ledger.TOTALS_S", 0.01)
    monkeypatch.setattr(RunningTotals, "add", fail)
    http = f"127.0.0.1:{free_port()}"
    with capture_logs() as logs:
        async with connected(make_settings(tmp_path, http=http)) as client:
            await planned(client)
            samples = await scrape(f"http://{http}/metrics")
            assert (await listed(client)).total.energy_kwh > 0
    assert not any(name.startswith("perseus_ledger_") for name, _ in samples)
    (reported,) = [line for line in logs if line["log_level"] == "error"]
    assert reported["event"].startswith("the ledger's totals can't be added up")


async def test_a_restart_counts_nothing_twice_and_leaves_nothing_out(tmp_path: Path) -> None:
    async with connected(make_settings(tmp_path)) as client:
        agent = await planned(client)
        before = (await listed(client)).total
        await agent.end()
    async with connected(make_settings(tmp_path, price_per_kwh=0.25)) as client:
        # Energy used without a price is counted at the price that is configured now.
        priced = (await listed(client)).total
        assert not before.HasField("cost")
        assert priced.cost == pytest.approx(0.25 * before.energy_kwh)
        agent.use(client)
        await agent.join()
        await agent.iterate(3)
        after = (await listed(client)).total
        assert after.iteration_count == before.iteration_count + 3
        assert after.energy_kwh > before.energy_kwh


def insert_hours(database: Path, job_ids: list[str]) -> None:
    """Each job runs for an hour more than the one before."""
    with closing(sqlite3.connect(database)) as connection, connection:
        for number, job_id in enumerate(job_ids):
            for hour in range(10 + number):
                connection.execute(
                    "INSERT INTO ledger VALUES (?, 0, 1, ?, -1, 0, 0.0, 0.0, NULL, NULL, "
                    "1, 0, 1.0, 3.6e6, 0.0, 0, 0.0, 0.0, 0, 0, 0.0, 0.0)",
                    (job_id, 490_000 + hour),
                )


async def test_the_ledger_is_listed_in_pages_and_by_time_and_read_whole_for_the_first_page_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(tmp_path, price_per_kwh=0.25)
    async with connected(settings):
        pass
    job_ids = [f"{'job' * 19}-{number:03}" for number in range(12)]
    insert_hours(tmp_path / "perseus.db", job_ids)
    read: list[int] = []
    ledger = SqlStore.ledger

    async def counted(store: SqlStore, wanted: HourFilter) -> list[EnergyGroup]:
        found = await ledger(store, wanted)
        read.append(len(found))
        return found

    monkeypatch.setattr(SqlStore, "ledger", counted)
    monkeypatch.setattr(Ledger, "run", lambda _: asyncio.Event().wait())
    async with connected(settings) as client:
        whole = await listed(client)
        assert [entry.job_id for entry in whole.entries] == job_ids
        assert whole.total.energy_kwh == sum(entry.account.energy_kwh for entry in whole.entries) > 0
        read.clear()
        entries: list[pb.LedgerEntry] = []
        token = ""
        for number in range(4):
            page = await listed(client, page_size=3, page_token=token)
            entries += page.entries
            assert page.total == whole.total
            token = page.next_page_token
            assert bool(token) == (number < 3)
        assert entries == list(whole.entries)
        assert read[0] == len(job_ids)
        assert max(read[1:]) <= 3 + 1, "a page, and whether there is another"
        begin = whole.entries[0].start_time
        assert (await listed(client, start_time=begin)).entries == whole.entries
        before = await listed(client, end_time=begin)
        assert (list(before.entries), before.total.iteration_count) == ([], 0)


def test_garbage_collections_are_rare_and_leave_out_what_is_imported() -> None:
    """Summing the ledger makes enough garbage for collections; each stopped the loop for 40 ms."""
    imported = {"module": ["class"]}
    assert any(each is imported for each in gc.get_objects())
    collect_rarely()
    assert gc.get_threshold()[0] >= 50_000
    assert not any(each is imported for each in gc.get_objects())
