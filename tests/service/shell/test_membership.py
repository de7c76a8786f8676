"""A fleet's member: what the state machine decides is done, in order, on rows that are not in a database."""

import asyncio
from collections.abc import Callable

import pytest
import structlog

from perseus.service.domain.errors import DatabaseUnavailableError, LeaseLostError, StoreFailedError
from perseus.service.domain.members import Member, Slot
from perseus.service.shell.membership import FleetMember
from tests.service.grpc_fakes import TIMEOUT_S

LEASE_S = 30.0


class Rows:
    """The rows of one member, with one slot."""

    member_id = "a"

    def __init__(self, slot: Slot, *others: Member) -> None:
        self.slot = slot
        self.others = others
        self.calls: list[str] = []
        self.is_failing = False
        self.has_connections = True
        self.database_ahead_s = 0.0

    def _note(self, call: str) -> None:
        if self.is_failing:
            raise StoreFailedError(database="db", cause="it is away")
        if not self.calls or self.calls[-1] != call:
            self.calls.append(call)

    def open_connections(self, number: int) -> list["Connection"]:
        if not self.has_connections:
            raise DatabaseUnavailableError(database="db", cause="too many")
        self._note(f"connect for {number}")
        return [Connection(self.calls)]

    def join(self, address: str, place: str, page_url: str) -> None:
        self._note(f"join {address} {place} {page_url}")

    def renew(self) -> tuple[list[Member], list[Slot]] | None:
        self._note("renew")
        return [Member("a", "a:1"), *self.others], [self.slot]

    def take(self, number: int, lease_epoch: int) -> int | None:
        self._note(f"take {number}")
        self.slot = Slot(number, "a", lease_epoch + 1)
        return self.slot.lease_epoch

    def depart(self) -> None:
        self._note("depart")

    def close(self) -> None:
        self.calls.append("close")


class Connection:
    """A connection of the store."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def abort(self) -> None:
        self._calls.append("abort")

    def close(self) -> None:
        self._calls.append("disconnect")


async def once(condition: Callable[[], bool]) -> None:
    """Wait for something that is read from the database."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def joined(rows: Rows, lease_s: float = LEASE_S) -> FleetMember:
    member = FleetMember(rows, lease_s, rows.open_connections)  # type: ignore[arg-type] # as far as needed
    await member.join("a:1", "here", "http://a:2")
    return member


async def test_it_takes_a_free_slot_and_leaves_in_order() -> None:
    rows = Rows(Slot(0, "", 4))
    member = await joined(rows)
    assert await asyncio.wait_for(member.taken, TIMEOUT_S) == Slot(0, "a", 5)
    assert (member.fleet.served, member.fleet.addresses()) == (0, {0: "a:1"})
    await member.leave()
    assert member.ended.result() is None
    assert rows.calls[:3] == ["join a:1 here http://a:2", "renew", "connect for 0"]
    assert rows.calls[3] == "take 0"
    assert rows.calls[-3:] == ["depart", "close", "disconnect"]


async def test_it_stands_by_and_knows_who_serves() -> None:
    rows = Rows(Slot(0, "b", 4), Member("b", "b:1"))
    member = await joined(rows)
    await once(lambda: bool(member.fleet.slots))
    assert (member.fleet.served, member.fleet.addresses()) == (None, {0: "b:1"})
    assert not member.taken.done()
    await member.leave()
    assert rows.calls[-2:] == ["depart", "close"]


@pytest.mark.parametrize("is_failing", [True, False])
async def test_it_ends_when_the_lease_is_not_renewed_or_another_has_the_slot(is_failing: bool) -> None:
    rows = Rows(Slot(0, "", 4))
    member = await joined(rows, lease_s=1.5)
    await asyncio.wait_for(member.taken, TIMEOUT_S)
    rows.is_failing = is_failing
    rows.slot = Slot(0, "b", 6)
    with pytest.raises(LeaseLostError, match="was not renewed" if is_failing else "been taken since"):
        await asyncio.wait_for(member.ended, TIMEOUT_S)
    await member.leave()
    assert "depart" not in rows.calls
    assert rows.calls[-3:] == ["abort", "close", "disconnect"], "whoever waits for the store waits in vain"


async def test_a_lost_lease_has_the_databases_failure_as_its_cause() -> None:
    now_s, lease_s, rows = 0.0, 0.3, Rows(Slot(0, "b", 4), Member("b", "b:1"))
    member = FleetMember(rows, lease_s, rows.open_connections, lambda: now_s)  # type: ignore[arg-type] # as above
    await member.join("a:1", "", "")
    rows.is_failing, now_s = True, lease_s / 2
    await once(lambda: bool(member.fleet.late_renewal_count))  # a renewal has failed
    now_s = lease_s
    with pytest.raises(LeaseLostError) as lost:
        await asyncio.wait_for(member.ended, TIMEOUT_S)
    await member.leave()
    assert str(lost.value) == (
        "this coordinator's lease is lost: it was not renewed for 0.2 s: the database db failed: it is away"
    )


async def test_a_clock_that_differs_from_the_databases_is_logged() -> None:
    rows = Rows(Slot(0, "b", 4), Member("b", "b:1"))
    rows.database_ahead_s = -8.0
    with structlog.testing.capture_logs() as entries:
        member = await joined(rows)
        await once(lambda: member.fleet.database_skew_s is not None)
        await member.leave()
    assert member.fleet.database_skew_s == 8.0
    (entry,) = [entry for entry in entries if entry["event"].startswith("the database's clock")]
    assert entry["database_ahead_s"] == -8.0


async def test_it_takes_no_slot_while_it_can_not_connect() -> None:
    rows = Rows(Slot(0, "", 4))
    rows.has_connections = False
    member = await joined(rows, lease_s=0.3)
    await asyncio.wait({member.taken}, timeout=0.5)
    assert not {"take 0", "depart"} & set(rows.calls)
    assert not member.ended.done()
    rows.has_connections = True
    assert await asyncio.wait_for(member.taken, TIMEOUT_S) == Slot(0, "a", 5)
    assert member.fleet.late_renewal_count == 0
    await member.leave()


async def test_a_database_that_fails_at_once_keeps_it_from_joining() -> None:
    rows = Rows(Slot(0, "", 0))
    rows.is_failing = True
    member = FleetMember(rows, LEASE_S, rows.open_connections)  # type: ignore[arg-type] # as above
    with pytest.raises(StoreFailedError, match="it is away"):
        await member.join("a:1", "", "")
    await member.leave()


async def test_it_ends_if_its_work_fails_as_nobody_foresaw(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(Slot(0, "", 4))

    def renew() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(rows, "renew", renew)
    member = await joined(rows)
    with pytest.raises(RuntimeError, match="a bug"):
        await asyncio.wait_for(asyncio.shield(member.ended), TIMEOUT_S)
    await member.leave()
