"""A coordinator lists the jobs of other slots as their coordinators have stored them."""

import asyncio
from contextlib import AsyncExitStack, closing

from sqlalchemy import text

from perseus.service.domain.members import Slot
from perseus.service.domain.model import JobState
from perseus.service.domain.records import JobRecord
from perseus.service.domain.specification import OperatingPolicy
from perseus.service.storage import codecs
from perseus.service.storage.membership import MemberRows
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import JobEntry, NewRun
from tests.service.service_fakes import make_spec
from tests.service.storage import postgresql


def record(state: JobState, finish_time_s: float | None = None) -> JobRecord:
    return JobRecord(OperatingPolicy(), state, "why", finish_time_s=finish_time_s)


async def test_the_latest_runs_are_listed_unfinished_ones_first_in_both_directions(
    postgresql_server: postgresql.Server,
) -> None:
    database = postgresql_server.new_database()
    async with AsyncExitStack() as stack:
        stores = []
        for slot in range(2):
            rows = stack.enter_context(closing(await asyncio.to_thread(MemberRows, database, 60.0, 2)))
            await asyncio.to_thread(rows.join, "", "")
            fence = Slot(slot, rows.member_id, rows.take(slot, 0) or 0)
            stores.append(await SqlStore.open(database, fence=fence))
            stack.push_async_callback(stores[-1].close)
        states = {"a": JobState.FINISHED, "b": JobState.PLANNED, "c": JobState.STOCK, "d": JobState.WAITING}
        for number in (1, 2):
            await stores[1].write([NewRun(make_spec(name), number, 1.0) for name in states])
        for name, state in states.items():
            finish_time_s = 9.0 if state is JobState.FINISHED else None
            await stores[1].write([JobEntry(name, 2, record(state, finish_time_s))])
        await stores[1].write([NewRun(make_spec("e"), 1, 1.0)])

        found, count = (await stores[0].jobs_of_slots([1], 4))[1]
        assert ([job.job_id for job in found], count) == (["b", "c", "d", "e"], 5)
        assert [(job.run_number, job.record and job.record.state) for job in found] == [
            (2, JobState.PLANNED),
            (2, JobState.STOCK),
            (2, JobState.WAITING),
            (1, None),
        ]
        assert found[0].parallelism == make_spec("b").parallelism
        assert (await stores[1].jobs_of_slots([0], 4)) == {0: ([], 0)}
        assert len(await stores[0].load_jobs()) == 0, "the connection is of its own slot again"

        def damage() -> None:
            with stores[1]._connection.begin():
                stores[1]._connection.execute(text("UPDATE runs SET record = '[1, {' WHERE job_id = 'b'"))
                long = make_spec("c")
                spec = codecs.SPEC.dump(long) + " " * 20_000
                stores[1]._connection.execute(
                    text("UPDATE runs SET spec = :spec WHERE job_id = 'c'"), {"spec": spec}
                )

        await asyncio.to_thread(damage)
        found, count = (await stores[0].jobs_of_slots([1], 9))[1]
        assert ([job.job_id for job in found], count) == (["c", "d", "e", "a"], 5)
        assert found[0].parallelism is None, "its specification is too long to be read for a list"
