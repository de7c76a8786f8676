"""GPUs are claimed by slots in a table of the fleet, each by one."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager

import psycopg
import pytest

from perseus.service.domain.gpu_claims import ClaimChanges, Gpu, Place
from perseus.service.domain.specification import Coordinates
from perseus.service.shell import gpu_claims as claims_shell
from perseus.service.shell.gpu_claims import ClaimWriter
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import TelemetrySequence
from tests.service.storage.stores import held_slots

GPUS: list[Gpu] = [("token ä'", f'GPU-"{number}\\é') for number in range(4)]
FIRST, SECOND = ("a", Coordinates(0, 1, 2)), ("b", Coordinates(3, 0, 0))


def claim(place: Place, *gpus: Gpu) -> ClaimChanges:
    return ClaimChanges(dict.fromkeys(gpus, place), [])


@pytest.fixture
async def fleet(url: str) -> AsyncIterator[Sequence[SqlStore]]:
    """Two coordinators, each of which holds a slot."""
    async with held_slots(url) as slots:
        yield slots.stores


async def test_a_gpu_is_of_the_slot_that_claimed_it_first_until_that_releases_it(
    fleet: Sequence[SqlStore],
) -> None:
    one, two = fleet
    assert await one.change_gpu_claims(claim(FIRST, *GPUS[:2])) == dict.fromkeys(GPUS[:2], (0, FIRST))
    others = {GPUS[1]: (0, FIRST), GPUS[2]: (1, SECOND)}
    assert await two.change_gpu_claims(claim(SECOND, *GPUS[1:3])) == others
    assert await two.change_gpu_claims(ClaimChanges({}, GPUS)) == {}, "its own alone"
    assert await one.load_gpu_claims(0) == await two.load_gpu_claims(0) == dict.fromkeys(GPUS[:2], FIRST)
    assert await two.load_gpu_claims(1) == {}

    moved = await one.change_gpu_claims(ClaimChanges({GPUS[0]: SECOND}, [GPUS[1]]))
    assert moved == {GPUS[0]: (0, SECOND)}, "another rank of the slot is on it"
    assert await two.change_gpu_claims(claim(SECOND, GPUS[1])) == {GPUS[1]: (1, SECOND)}
    assert await one.load_gpu_claims(0) == {GPUS[0]: SECOND}


async def test_coordinators_that_claim_the_same_gpus_at_once_do_not_wait_in_a_circle(
    fleet: Sequence[SqlStore],
) -> None:
    async def claim_and_release(slot: int, place: Place) -> None:
        gpus = GPUS[:: 1 - 2 * slot]
        for _ in range(100):
            await fleet[slot].change_gpu_claims(claim(place, *gpus))
            await fleet[slot].change_gpu_claims(ClaimChanges({gpus[0]: place}, gpus[2:]))
            await fleet[slot].change_gpu_claims(ClaimChanges({}, gpus))

    await asyncio.gather(claim_and_release(0, FIRST), claim_and_release(1, SECOND))
    assert await fleet[0].load_gpu_claims(0) == await fleet[0].load_gpu_claims(1) == {}


class NoRuns:
    """The live runs of a coordinator without jobs."""

    @contextmanager
    def changes(self) -> Iterator[set[str]]:
        yield set()


async def test_a_coordinator_cut_off_before_its_commit_keeps_others_from_its_gpus_alone(
    fleet: Sequence[SqlStore], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off, other = fleet
    await cut_off.change_gpu_claims(claim(FIRST, *GPUS[:2]))
    monkeypatch.setattr(claims_shell, "AGAIN_S", 0.01)
    attempts: list[dict[Gpu, tuple[int, Place]] | None] = []
    change = other.change_gpu_claims

    async def counted(changes: ClaimChanges) -> dict[Gpu, tuple[int, Place]] | None:
        attempts.append(await change(changes))
        return attempts[-1]

    monkeypatch.setattr(other, "change_gpu_claims", counted)
    writer = ClaimWriter(other, NoRuns(), 1)  # type: ignore[arg-type]
    writing = asyncio.create_task(writer.run())
    with psycopg.connect(url) as session:
        session.execute("DELETE FROM gpu_claims WHERE slot = 0")  # and no commit
        claimed = asyncio.create_task(writer.claim({GPUS[0]: SECOND}))
        while None not in attempts:
            await other.write([TelemetrySequence("agent", 1 + len(attempts))])
            assert not writing.done(), "a lock that isn't free is no failure"
        assert not claimed.done()
        session.commit()
    await claimed
    assert attempts[-1] == {GPUS[0]: (1, SECOND)}
    assert await other.load_gpu_claims(1) == {GPUS[0]: SECOND}
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
