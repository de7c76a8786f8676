"""GPUs are claimed by slots in a table of the fleet, each by one."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, closing

import pytest

from perseus.service.domain.gpu_claims import ClaimChanges, Gpu, Place
from perseus.service.domain.members import Slot
from perseus.service.domain.specification import Coordinates
from perseus.service.storage.membership import MemberRows
from perseus.service.storage.sql_store import SqlStore
from tests.service.storage import postgresql

GPUS: list[Gpu] = [("token ä'", f'GPU-"{number}\\é') for number in range(4)]
FIRST, SECOND = ("a", Coordinates(0, 1, 2)), ("b", Coordinates(3, 0, 0))


def claim(place: Place, *gpus: Gpu) -> ClaimChanges:
    return ClaimChanges(dict.fromkeys(gpus, place), [])


@pytest.fixture
async def fleet(postgresql_server: postgresql.Server) -> AsyncIterator[Sequence[SqlStore]]:
    """Two coordinators, each of which holds a slot."""
    database = postgresql_server.new_database()
    async with AsyncExitStack() as stack:
        found = []
        for slot in range(2):
            rows = stack.enter_context(closing(await asyncio.to_thread(MemberRows, database, 60.0, 2)))
            rows.join("", "")
            fence = Slot(slot, rows.member_id, rows.take(slot, 0) or 0)
            found.append(await SqlStore.open(database, fence=fence))
            stack.push_async_callback(found[-1].close)
        yield found


async def test_a_gpu_is_of_the_slot_that_claimed_it_first_until_that_releases_it(
    fleet: Sequence[SqlStore],
) -> None:
    one, two = fleet
    assert await one.change_gpu_claims(0, claim(FIRST, *GPUS[:2])) == dict.fromkeys(GPUS[:2], (0, FIRST))
    others = {GPUS[1]: (0, FIRST), GPUS[2]: (1, SECOND)}
    assert await two.change_gpu_claims(1, claim(SECOND, *GPUS[1:3])) == others
    assert await two.change_gpu_claims(1, ClaimChanges({}, GPUS)) == {}, "its own alone"
    assert await one.load_gpu_claims(0) == await two.load_gpu_claims(0) == dict.fromkeys(GPUS[:2], FIRST)
    assert await two.load_gpu_claims(1) == {}

    moved = await one.change_gpu_claims(0, ClaimChanges({GPUS[0]: SECOND}, [GPUS[1]]))
    assert moved == {GPUS[0]: (0, SECOND)}, "another rank of the slot is on it"
    assert await two.change_gpu_claims(1, claim(SECOND, GPUS[1])) == {GPUS[1]: (1, SECOND)}
    assert await one.load_gpu_claims(0) == {GPUS[0]: SECOND}


async def test_coordinators_that_claim_the_same_gpus_at_once_do_not_wait_in_a_circle(
    fleet: Sequence[SqlStore],
) -> None:
    async def claim_and_release(slot: int, place: Place) -> None:
        gpus = GPUS[:: 1 - 2 * slot]
        for _ in range(100):
            await fleet[slot].change_gpu_claims(slot, claim(place, *gpus))
            await fleet[slot].change_gpu_claims(slot, ClaimChanges({gpus[0]: place}, gpus[2:]))
            await fleet[slot].change_gpu_claims(slot, ClaimChanges({}, gpus))

    await asyncio.gather(claim_and_release(0, FIRST), claim_and_release(1, SECOND))
    assert await fleet[0].load_gpu_claims(0) == await fleet[0].load_gpu_claims(1) == {}
