"""Members, slots and fences on a real PostgreSQL."""

import asyncio
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest

from perseus.service.domain.errors import DatabaseUnavailableError, StoreFailedError
from perseus.service.domain.members import Member, Slot
from perseus.service.domain.power import Budget, BudgetRecord
from perseus.service.domain.principals import Grant, Scope, Token
from perseus.service.domain.retention import Retention
from perseus.service.storage import membership
from perseus.service.storage.archive import export_database
from perseus.service.storage.checking import check_database
from perseus.service.storage.membership import MemberRows
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import BudgetEntry, TelemetrySequence, TokenEntry
from tests.service.storage.stores import LEASE_S, execute, fill, held_slots, opened

TOKEN = Token("operator", "digest", Grant(Scope.OPERATOR), 0.0)
OVER = BudgetRecord(Budget("over", "hall", limit_w=1e3, start_s=0.0, end_s=1.0), "request", "grid", 0.0)


class Fleet:
    """Members of one database, closed with the test."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.members: list[MemberRows] = []

    def join(self, address: str = "", place: str = "", slots: int = 1) -> MemberRows:
        member = MemberRows(self.url, LEASE_S, slots)
        self.members.append(member)
        member.join(address, place)
        return member

    def expire(self, member: MemberRows) -> None:
        execute(self.url, f"UPDATE members SET expire_time_s = 0 WHERE member_id = '{member.member_id}'")


@pytest.fixture
def fleet(url: str) -> Iterator[Fleet]:
    made = Fleet(url)
    yield made
    for member in made.members:
        member.close()


def test_one_member_takes_the_slot_until_it_departs_and_another_can_not(fleet: Fleet) -> None:
    first, second = fleet.join("a:1"), fleet.join("b:1")
    members = sorted([Member(first.member_id, "a:1"), Member(second.member_id, "b:1")])
    assert second.renew() == (members, [Slot(0, "", 0)])
    assert first.take(0, 0) == 1
    assert second.renew() == (members, [Slot(0, first.member_id, 1)])
    assert second.take(0, 0) is None
    assert second.take(0, 1) is None
    assert first.take(0, 1) == 2, "it settles an unknown outcome"
    first.depart()
    assert second.take(0, 2) == 3
    assert first.take(0, 3) is None, "it is no member any more"


def test_an_expired_lease_is_never_renewed_and_its_slot_is_free(fleet: Fleet) -> None:
    first, second = fleet.join(), fleet.join()
    assert first.take(0, 0) == 1
    fleet.expire(first)
    assert second.take(0, 1) is None, "nobody has noticed yet"
    assert first.renew() is None
    found = second.renew()
    assert found is not None
    assert [member.member_id for member in found[0]] == [second.member_id]
    assert second.take(0, 1) == 2
    assert first.take(0, 2) is None


def test_a_renewal_compares_the_clocks(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    member, clock = fleet.join(), time.time
    assert member.renew() is not None
    assert member.database_ahead_s == 0, "it is this host's"
    monkeypatch.setattr(membership, "time", SimpleNamespace(time=lambda: clock() - 1e6))
    assert member.renew() is not None
    assert member.database_ahead_s == pytest.approx(1e6, rel=0.01)


def test_a_lease_that_is_being_renewed_is_not_taken_for_expired(fleet: Fleet) -> None:
    first, second = fleet.join(), fleet.join()
    assert first.take(0, 0) == 1
    fleet.expire(first)
    with psycopg.connect(fleet.url) as renewal:  # it began before the expiry, and is about to commit
        renewal.execute("UPDATE members SET expire_time_s = 1e12 WHERE expire_time_s = 0")
        assert second.renew() is not None
        assert second.take(0, 1) is None
    assert second.renew() is not None
    assert second.take(0, 1) is None
    assert first.renew() is not None


def test_who_restarts_at_the_same_place_needs_not_wait_for_its_former_self(fleet: Fleet) -> None:
    before, elsewhere = fleet.join(place="boot 1 a:1"), fleet.join(place="")
    assert before.take(0, 0) == 1
    after = fleet.join(place="boot 1 a:1")
    assert after.take(0, 1) == 2
    assert before.renew() is None
    assert elsewhere.renew() is not None


async def test_nothing_is_written_after_a_takeover(fleet: Fleet) -> None:
    first, second = await asyncio.to_thread(fleet.join), await asyncio.to_thread(fleet.join)
    assert first.take(0, 0) == 1
    fence = Slot(0, first.member_id, 1)
    async with opened(fleet.url, fence=fence) as store:
        await store.write([TelemetrySequence("agent", 7)])
        assert store.lease_epoch == 1
        # Its session is not ended: only the fence is between.
        execute(fleet.url, "UPDATE slots SET holder = ''")
        assert second.take(0, 1) == 2
        with pytest.raises(StoreFailedError, match="another coordinator has taken over"):
            await store.write([TelemetrySequence("agent", 8)])
    with pytest.raises(StoreFailedError, match="another coordinator has taken over"):
        await SqlStore.open(fleet.url, fence=fence)
    async with opened(fleet.url, fence=Slot(0, second.member_id, 2)) as other:
        assert await other.telemetry_sequence("agent") == 7


async def test_a_holder_that_freezes_before_its_commit_commits_nothing_and_holds_nobody_up(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await asyncio.to_thread(fleet.join), await asyncio.to_thread(fleet.join)
    assert first.take(0, 0) == 1
    taken: list[int | None] = []

    def freeze() -> None:
        """Between the first statement and the commit, until another has taken over."""
        assert second.take(0, 1) is None, "a member is not interrupted"
        fleet.expire(first)
        assert second.renew() is not None
        taken.append(second.take(0, 1))

    async with opened(fleet.url, fence=Slot(0, first.member_id, 1)) as store:
        monkeypatch.setattr(store._writer, "write", lambda *_: freeze())
        with pytest.raises(StoreFailedError, match="another coordinator has taken over"):
            await store.write([TelemetrySequence("agent", 7)])
    assert taken == [2]
    async with opened(fleet.url, fence=Slot(0, second.member_id, 2)) as other:
        assert await other.telemetry_sequence("agent") == 0


def test_a_coordinator_of_an_older_release_keeps_members_out(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "MIGRATION_LOCK_LIMIT_MS", 50)
    with psycopg.connect(fleet.url) as old:
        old.execute(f"SELECT pg_advisory_lock({membership.MIGRATION_LOCK})")
        with pytest.raises(DatabaseUnavailableError, match="is another coordinator running on it"):
            fleet.join()
    fleet.join()


def test_a_database_with_members_is_not_exported(fleet: Fleet) -> None:
    member = fleet.join()
    with pytest.raises(DatabaseUnavailableError, match="is another coordinator running on it"):
        export_database(fleet.url, StringIO())
    fleet.expire(member)
    file = StringIO()
    export_database(fleet.url, file)
    assert '"slots"' in file.getvalue()
    assert '"members"' not in file.getvalue()


@pytest.mark.slow("three slots' tables are made and checked on a server")
async def test_slots_have_tables_of_their_own_and_share_those_of_the_fleet(fleet: Fleet) -> None:
    async with held_slots(fleet.url, 3) as slots:
        stores = slots.stores
        for number, store in enumerate(stores):
            await store.write([TelemetrySequence("agent", 10 + number)])
        await stores[0].write([TokenEntry(TOKEN), BudgetEntry(OVER)])
        assert [await store.telemetry_sequence("agent") for store in stores] == [10, 11, 12]
        assert [len(await store.load_tokens()) for store in stores] == [1, 1, 1]
        assert len({await store.epoch() for store in stores}) == 3
        for store, kept in ((stores[1], [OVER]), (stores[0], [])):
            while not (await store.prune(Retention(), 1e12)).is_done:
                pass
            assert await store.load_budgets() == kept, "slot 0's coordinator alone prunes them"
    assert check_database(fleet.url) == []
    execute(fleet.url, "INSERT INTO slot_2.telemetry VALUES ('other', 0, 0, '')")
    assert check_database(fleet.url) == [
        "slot 2: agent 'other': expected a telemetry sequence of 1 or more, found 0"
    ]


def test_the_number_of_slots_is_fixed_at_the_first_start(fleet: Fleet) -> None:
    fleet.join(slots=2)
    with pytest.raises(DatabaseUnavailableError, match=r"slots: expected 2, as its jobs .*, found 1"):
        fleet.join()


LOST_ROWS = "DELETE FROM slot_1.coordinator"
LOST_TABLES = "DROP SCHEMA slot_1 CASCADE; CREATE SCHEMA slot_1"


@pytest.mark.parametrize("loss", [LOST_ROWS, LOST_TABLES], ids=["rows", "tables"])
async def test_a_slot_that_was_served_and_whose_data_is_missing_is_not_made_anew(
    fleet: Fleet, loss: str
) -> None:
    async with held_slots(fleet.url) as slots:
        fences = [Slot(number, member.member_id, 1) for number, member in enumerate(slots.members)]
    execute(fleet.url, loss)
    for start in (
        lambda: asyncio.to_thread(fleet.join, slots=2),
        lambda: SqlStore.open(fleet.url, fence=fences[1]),
    ):
        with pytest.raises(DatabaseUnavailableError, match=r"the data of slot 1 is missing") as caught:
            await start()
        assert "\n" not in str(caught.value)
    await (await SqlStore.open(fleet.url, fence=fences[0])).close()


async def test_a_slot_that_was_never_served_needs_no_data_from_an_earlier_release(fleet: Fleet) -> None:
    await asyncio.to_thread(fleet.join, slots=2)
    execute(fleet.url, LOST_ROWS)
    member = await asyncio.to_thread(fleet.join, slots=2)
    assert member.take(1, 0) == 1
    await (await SqlStore.open(fleet.url, fence=Slot(1, member.member_id, 1))).close()


def test_a_file_whose_data_is_missing_is_not_made_anew(path: Path) -> None:
    asyncio.run(fill(path))
    execute(path, "DELETE FROM coordinator")
    with pytest.raises(DatabaseUnavailableError, match="the data of slot 0 is missing"):
        asyncio.run(fill(path))


async def test_a_database_of_one_coordinator_goes_on_with_one_slot(fleet: Fleet) -> None:
    await fill(fleet.url)
    with pytest.raises(DatabaseUnavailableError, match=r"slots: expected 1, as its jobs .*, found 2"):
        await asyncio.to_thread(fleet.join, slots=2)
    await asyncio.to_thread(fleet.join)
