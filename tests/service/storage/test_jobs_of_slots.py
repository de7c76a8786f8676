"""A coordinator lists the jobs of other slots as their coordinators have stored them."""

import asyncio

from sqlalchemy import text

from perseus.service.domain.model import JobState
from perseus.service.domain.records import JobRecord
from perseus.service.domain.specification import OperatingPolicy
from perseus.service.storage import codecs
from perseus.service.storage.store import JobEntry, NewRun
from tests.service.service_fakes import make_spec
from tests.service.storage.stores import held_slots


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

        def damage() -> None:
            with own._connection.begin():
                own._connection.execute(text("UPDATE runs SET record = '[1, {' WHERE job_id = 'b'"))
                spec = {"spec": codecs.SPEC.dump(make_spec("c")) + " " * 20_000}
                own._connection.execute(text("UPDATE runs SET spec = :spec WHERE job_id = 'c'"), spec)

        await asyncio.to_thread(damage)
        found, count = (await other.jobs_of_slots([1], 9))[1]
        assert ([job.job_id for job in found], count) == (["c", "d", "e", "a"], 5)
        assert found[0].parallelism is None, "its specification is too long to be read for a list"
