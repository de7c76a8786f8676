"""What coordinators of slots share: claims of GPUs, lists of jobs, what they publish for power budgets."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager

import psycopg
import pytest

from perseus.service.domain.gpu_claims import ClaimChanges, Gpu, Place
from perseus.service.domain.model import JobState
from perseus.service.domain.power import FeedStatus
from perseus.service.domain.records import JobRecord
from perseus.service.domain.slot_power import Curve, Division, KnownSlot, SlotPower
from perseus.service.domain.specification import Coordinates, OperatingPolicy
from perseus.service.shell import gpu_claims as claims_shell
from perseus.service.shell.gpu_claims import ClaimWriter
from perseus.service.storage import codecs
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import JobEntry, NewRun, SlotPowerEntry, TelemetrySequence
from tests.service.service_fakes import make_spec
from tests.service.storage.stores import execute, held_slots

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


def record(state: JobState, finish_time_s: float | None = None) -> JobRecord:
    return JobRecord(OperatingPolicy(), state, "why", finish_time_s=finish_time_s)


async def test_the_latest_runs_are_listed_unfinished_ones_first_in_both_directions(url: str) -> None:
    async with held_slots(url) as slots:
        other, own = slots.stores
        states = {"a": JobState.FINISHED, "b": JobState.PLANNED, "c": JobState.STOCK, "d": JobState.WAITING}
        for number in (1, 2):
            await own.write([NewRun(make_spec(name), number, 1.0) for name in states])
        for name, state in states.items():
            finish_time_s = 9.0 if state is JobState.FINISHED else None
            await own.write([JobEntry(name, 2, record(state, finish_time_s))])
        await own.write([NewRun(make_spec("e"), 1, 1.0)])

        found, count = (await other.jobs_of_slots([1], 4))[1]
        assert [(job.job_id, job.run_number, job.record and job.record.state) for job in found] == [
            ("b", 2, JobState.PLANNED),
            ("c", 2, JobState.STOCK),
            ("d", 2, JobState.WAITING),
            ("e", 1, None),
        ]
        assert count == 5
        assert found[0].parallelism == make_spec("b").parallelism
        assert (await own.jobs_of_slots([0], 4)) == {0: ([], 0)}
        assert len(await other.load_jobs()) == 0, "the connection is of its own slot again"

        spec = codecs.SPEC.dump(make_spec("c")) + " " * 20_000
        execute(
            url,
            "UPDATE slot_1.runs SET record = '[1, {' WHERE job_id = 'b'",
            f"UPDATE slot_1.runs SET spec = '{spec}' WHERE job_id = 'c'",
        )
        found, count = (await other.jobs_of_slots([1], 9))[1]
        assert ([job.job_id for job in found], count) == (["c", "d", "e", "a"], 5)
        assert found[0].parallelism is None, "its specification is too long to be read for a list"


STATUS = FeedStatus(
    "a", 4e5, False, True, ("x",), (), 1 / 3, 2e5, 0.0, 4e5, ("x", "y"), None, None, 0.0, False
)
POWER = SlotPower(2, {"a": Curve((1e5, 2e5 / 3), (0.5, 0.0), 2.0)}, {"a": STATUS})
DIVISION = Division(3, {"a": (0.25, 0.75)}, {"a": (0.3, 0.7)})


async def test_slots_are_known_with_their_holders(url: str) -> None:
    async with held_slots(url) as slots:
        stores = slots.stores
        assert await stores[1].load_slot_powers() == ([KnownSlot(None, True, False)] * 2, Division())
        for slot, store in enumerate(stores):
            division = DIVISION if slot == 0 else Division()
            await store.write([SlotPowerEntry(slot, store.lease_epoch, POWER, division)])
        assert await stores[1].load_slot_powers() == ([KnownSlot(POWER, True, True)] * 2, DIVISION)
        slots.members[0].depart()
        left, kept = await stores[1].load_slot_powers()
        assert (left[0], kept) == (KnownSlot(POWER, is_served=False, is_of_holder=True), DIVISION)
        slots.members[1].take(0, 1)
        taken, _ = await stores[1].load_slot_powers()
        assert taken[0] == KnownSlot(POWER, is_served=True, is_of_holder=False)
