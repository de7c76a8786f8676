"""What fencing costs: group commits on PostgreSQL with and without it, and renewals of a lease beside them.

Two stores write the same groups of telemetry into databases of one server in turn, so that other load on the
machine slows both; one checks its slot's lease epoch in every transaction. Then the lease is renewed alone,
and while one of the stores, or both together, write as fast as they can. The server does not wait for the
disk (`fsync = off`), which would hide the difference.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from statistics import median, quantiles

import psycopg

from benchmarks.harness import Column, Table, main
from benchmarks.storage_cost import BATCHES, telemetry
from perseus.service.domain.members import Slot
from perseus.service.storage.membership import MemberRows
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import NewRun
from tests.service.service_fakes import make_spec
from tests.service.storage import postgresql

_GROUPS = 600
_LEASE_S = 15.0
_RENEWALS = 200
_RENEWAL_PERIOD_S = 0.02


async def _measure() -> list[Table]:
    with postgresql.running() as server:
        database = server.new_database()
        rows = MemberRows(database, _LEASE_S)
        rows.join("", "")
        lease_epoch = rows.take(0, 0)
        assert lease_epoch is not None
        fenced = await SqlStore.open(database, fence=Slot(0, rows.member_id, lease_epoch))
        unfenced = await SqlStore.open(server.new_database())
        stores = {"not fenced": unfenced, "fenced": fenced}
        for store in stores.values():
            await store.write([NewRun(make_spec(), 1, 1.0)])
        wal_bytes = _wal_bytes(server)
        took_s = await _write_in_turn(stores)
        wal_bytes = _wal_bytes(server) - wal_bytes
        renewed_s = {"nothing else": await _renew(rows)}
        for name, busy in (("the store of the same slot", [fenced]), ("both stores", [fenced, unfenced])):
            renewed_s[name] = await _beside(busy, lambda: _renew(rows))
        for store in stores.values():
            await store.close()
        rows.close()
    plain_s = median(took_s["not fenced"])
    return [
        Table(
            f"A group commit of {BATCHES} batches on PostgreSQL",
            (
                Column("commits"),
                Column("median [ms]", ".2f"),
                Column("p99 [ms]", ".2f"),
                Column("batches/s", ".0f"),
                Column("ratio of time", ".3f"),
            ),
            tuple(
                (name, *_quantiles_ms(s), BATCHES / median(s), median(s) / plain_s)
                for name, s in took_s.items()
            ),
            "From the call to its return, one after the other; batches a second from the median. "
            f"PostgreSQL's log grew by {wal_bytes / (len(stores) * _GROUPS * BATCHES):.0f} bytes a batch.",
        ),
        Table(
            "A renewal of the lease beside commits",
            (Column("beside"), Column("median [ms]", ".2f"), Column("p99 [ms]", ".2f")),
            tuple((name, *_quantiles_ms(s)) for name, s in renewed_s.items()),
            f"Of {_RENEWALS}; a lease of {_LEASE_S:g} s is renewed every tenth of it.",
        ),
    ]


def _quantiles_ms(took_s: list[float]) -> tuple[float, float]:
    return 1e3 * median(took_s), 1e3 * quantiles(took_s, n=100)[-1]


def _wal_bytes(server: postgresql.Server) -> int:
    with psycopg.connect(server.url("postgres")) as connection:
        found = connection.execute("SELECT (pg_current_wal_lsn() - '0/0')::bigint").fetchone()
    assert found is not None
    return int(found[0])


async def _write_in_turn(stores: dict[str, SqlStore]) -> dict[str, list[float]]:
    took_s: dict[str, list[float]] = {name: [] for name in stores}
    for number in range(1, _GROUPS + 1):
        entries = telemetry(number)
        for name, store in stores.items():
            begun_s = time.perf_counter()
            await store.write(entries)
            took_s[name].append(time.perf_counter() - begun_s)
    return took_s


async def _renew(rows: MemberRows) -> list[float]:
    took_s = []
    for _ in range(_RENEWALS):
        await asyncio.sleep(_RENEWAL_PERIOD_S)
        begun_s = time.perf_counter()
        assert await asyncio.to_thread(rows.renew) is not None
        took_s.append(time.perf_counter() - begun_s)
    return took_s


async def _beside(stores: list[SqlStore], work: Callable[[], Awaitable[list[float]]]) -> list[float]:
    async def write(store: SqlStore) -> None:
        number = 10 * _GROUPS
        while True:
            number += 1
            await store.write(telemetry(number))

    writing = [asyncio.create_task(write(store)) for store in stores]
    try:
        return await work()
    finally:
        for each in writing:
            each.cancel()
        await asyncio.gather(*writing, return_exceptions=True)


def run() -> list[Table]:
    """Measure commits and renewals."""
    return asyncio.run(_measure())


if __name__ == "__main__":
    main("fencing_cost", run)
