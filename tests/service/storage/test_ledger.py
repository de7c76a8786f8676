"""The ledger in the store, on every engine: sums over hours, which outlive their jobs."""

import asyncio
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from perseus.service.domain.ledger import (
    HOUR_S,
    EnergyGroup,
    EnergyHour,
    EnergySums,
    HourFilter,
    Rates,
    Reference,
    UncomparedHours,
)
from perseus.service.domain.retention import DAY_S, Retention
from perseus.service.storage.checking import check_database
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import Entry, JobDeleted, JobEntry, NewRun
from tests.service.service_fakes import make_spec
from tests.service.storage.stores import fill, stored_jobs, stored_run
from tests.service.storage.test_pruning import finished, prune

RATES = Rates(0.1 + 0.2, 400.0)
REFERENCE = Reference(2, 10, 100 / 3, 1e-3)
SUMS = EnergySums(5, 1, 7.5, 1 / 3, 0.0, 4, 320.1, 2.5, 3, 1, 80.5, 2.25)


def hour(
    number: int,
    reference: Reference | None = REFERENCE,
    *,
    job_id: str = "job",
    run_number: int = 1,
    rates: Rates = RATES,
) -> JobEntry:
    return JobEntry(job_id, run_number, EnergyHour(number, reference, SUMS, rates))


def new_run(job_id: str = "job", number: int = 1) -> NewRun:
    return NewRun(make_spec(job_id), number, 1.0)


def run_of(group: EnergyGroup) -> tuple[str, int, int]:
    return group.job_id, group.deletion, group.run_number


async def test_hours_of_a_run_are_summed_by_baseline(store: SqlStore) -> None:
    entries: list[Entry] = [new_run(), hour(10, None), hour(10), hour(11), hour(12, rates=Rates())]
    await store.write(entries)
    found = await store.ledger(HourFilter())
    thrice = EnergySums(15, 3, 22.5, 1.0, 0.0, 12, 3 * 320.1, 7.5, 9, 3, 241.5, 6.75)
    assert sorted(found, key=lambda group: (group.first_hour, group.last_hour)) == [
        EnergyGroup.of_hour("job", 0, 1, EnergyHour(10, None, SUMS, RATES)),
        replace(found[1], first_hour=10, last_hour=12, reference=REFERENCE, sums=thrice),
    ]
    energy_j = SUMS.stock_energy_j + SUMS.compared_energy_j
    for weighted, rate in (
        (found[1].cost, RATES.price_per_kwh),
        (found[1].carbon, RATES.intensity_g_per_kwh),
    ):
        assert rate is not None
        assert astuple(weighted) == pytest.approx(
            (2 * rate * energy_j, 8 * rate, 2 * rate * 320.1, 8 * rate**2, 1, energy_j, 4, 320.1)
        )


async def test_hours_compared_with_a_wrong_baseline_become_uncompared(store: SqlStore) -> None:
    right = replace(REFERENCE, number=1)
    wrong = JobEntry("job", 1, UncomparedHours(REFERENCE.number))
    await store.write([new_run(), hour(9, right), hour(10), hour(11), wrong])
    await store.write([wrong])
    of_right, of_wrong = await store.ledger(HourFilter())
    assert of_right.sums == SUMS
    assert astuple(of_wrong.sums) == tuple(2 * value for value in astuple(SUMS.uncompared()))
    assert of_wrong.cost.compared_count == 0
    assert of_wrong.sums.energy_j == pytest.approx(2 * SUMS.energy_j)


async def test_a_rewritten_hour_replaces_the_older_one(store: SqlStore) -> None:
    later = EnergyHour(10, replace(REFERENCE, iteration_count=11), replace(SUMS, iteration_count=6), RATES)
    await store.write([new_run(), hour(10)])
    await store.write([JobEntry("job", 1, later)])
    assert await store.ledger(HourFilter()) == [EnergyGroup.of_hour("job", 0, 1, later)]


async def test_a_part_of_the_ledger_can_be_read(store: SqlStore) -> None:
    await store.write([new_run(), new_run("other"), *map(hour, (10, 11, 12)), hour(11, job_id="other")])

    async def hours(**wanted: object) -> list[tuple[str, int, int]]:
        found = await store.ledger(HourFilter(**wanted))  # type: ignore[arg-type]
        return [(group.job_id, group.first_hour, group.last_hour) for group in found]

    assert await hours(first_hour=11) == [("job", 11, 12), ("other", 11, 11)]
    assert await hours(end_hour=11) == [("job", 10, 10)]
    assert await hours(first_hour=11, end_hour=12, job_id="other") == [("other", 11, 11)]
    assert await hours(first_hour=13) == []


async def test_the_ledger_is_read_in_pages_of_runs(store: SqlStore) -> None:
    renewed = replace(REFERENCE, number=7)
    for _ in range(2):  # two deleted jobs of the name
        await store.write([new_run("b"), hour(10, job_id="b"), hour(11, job_id="b"), JobDeleted("b", 0)])
    for job_id, run_count in (("a", 1), ("b", 3), ("c", 2), ("ä", 1)):
        for number in range(1, run_count + 1):
            own = {"job_id": job_id, "run_number": number}
            await store.write([new_run(job_id, number), hour(10, **own), hour(12, renewed, **own)])  # type: ignore[arg-type]
    for wanted in (HourFilter(), HourFilter(first_hour=11), HourFilter(end_hour=12), HourFilter(job_id="b")):
        whole = await store.ledger(wanted)
        runs = list(dict.fromkeys(map(run_of, whole)))
        for size in (1, 2, 100):
            for number, run in enumerate(runs):
                page = await store.ledger(replace(wanted, after=run, run_count=size))
                expected = runs[number + 1 : number + 1 + size]
                assert page == [group for group in whole if run_of(group) in expected]
    assert len(runs) == 5


async def test_a_run_continues_its_latest_hour(store: SqlStore) -> None:
    renewed = replace(REFERENCE, number=7)
    await store.write([new_run(), hour(10), hour(11), hour(11, renewed)])
    assert (await stored_run(store)).latest_hour == EnergyHour(11, renewed, SUMS, RATES)
    assert [job.latest_hour for job in await stored_jobs(store)] == [EnergyHour(11, renewed, SUMS, RATES)]


async def test_a_deleted_jobs_energy_stays_and_a_new_job_of_its_name_starts_at_zero(
    store: SqlStore, database: Path | str
) -> None:
    for _ in range(2):
        await store.write([new_run(), hour(10), JobDeleted("job", 0)])
    await store.write(
        [new_run(), new_run("job", 2), hour(10, run_number=2), new_run("a"), hour(9, job_id="a")]
    )
    runs = [run_of(group) for group in await store.ledger(HourFilter())]
    assert runs == [("a", 0, 1), ("job", 1, 1), ("job", 2, 1), ("job", 0, 2)]
    assert (await stored_run(store)).latest_hour is None
    assert await asyncio.to_thread(check_database, database) == []


async def test_an_archived_run_keeps_its_ledger_until_that_is_old_itself(store: SqlStore) -> None:
    now_s = 1_000 * DAY_S
    old, new = (int((now_s - days * DAY_S) // HOUR_S) for days in (40, 20))
    await store.write([*finished("job", now_s - 10 * DAY_S), hour(old), hour(new)])
    retention = Retention(keep_finished_days=1, keep_ledger_days=30)
    assert await prune(store, retention, now_s) == [("job", 1)]
    (found,) = await store.ledger(HourFilter())
    assert (found.first_hour, found.last_hour) == (new, new)


async def test_hours_of_no_run_are_found(database: Path | str) -> None:
    await fill(database, hour(10))
    assert check_database(database) == ["ledger: 1 rows belong to no run"]
