"""Plans are stored once for all pipelines that have them; values that can't be read back are not stored."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import func, select

from perseus.service.domain.ledger import EnergyHour, EnergySums, Rates
from perseus.service.domain.measured import StageProfile
from perseus.service.domain.model import HoldClocks, PipelineOffer, PlannedClocks, Rank, StockIteration
from perseus.service.domain.records import IterationRows, OfferRecord, Record
from perseus.service.domain.specification import Coordinates, OperatingPolicy
from perseus.service.storage import schema
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import (
    JobDeleted,
    JobEntry,
    NewRun,
    TelemetrySequence,
    UnstorableEntryError,
)
from perseus.solver import Computation, Kind, Measurement, Plan, PlannedComputation
from tests.service.service_fakes import make_spec
from tests.service.storage.stores import opened, stored_jobs
from tests.service.storage.test_store import PERIOD, RECORD, rows

PIPELINES = 128


def planned(time_s: float) -> PlannedClocks:
    computations = tuple(
        PlannedComputation(Computation(0, Kind.FORWARD, m), 1200, m * time_s, time_s) for m in range(20)
    )
    return PlannedClocks(Plan(time_s, 2.0, 3.0, (computations,)))


async def offer(store: SqlStore, pipelines: range, version: int, clocks: PlannedClocks | HoldClocks) -> None:
    # Equal clocks need not be the same object.
    offers = (OfferRecord(n, PipelineOffer((version,), 20, replace(clocks))) for n in pipelines)
    await store.write([JobEntry("job", 1, each) for each in offers])


async def plan_count(store: SqlStore) -> int:
    count = await store._run(lambda: store._connection.scalar(select(func.count()).select_from(schema.plans)))
    return int(count or 0)


async def test_a_plan_is_stored_once_and_deleted_with_its_last_offer(database: Path | str) -> None:
    everybody = range(PIPELINES)
    async with opened(database) as store:
        await store.write([NewRun(make_spec(pipelines=PIPELINES, stages=1), 1, 1.0)])
        for pipelines, version, clocks, count in (
            (everybody, 1, planned(0.1), 1),
            (range(100), 2, planned(0.2), 2),
            (everybody, 3, HoldClocks((1200,)), 1),
            (everybody, 4, planned(0.1), 1),  # it was deleted before
        ):
            await offer(store, pipelines, version, clocks)
            assert await plan_count(store) == count

    async with opened(database) as store:
        await offer(store, range(1), 5, planned(0.1))
        (job,) = await stored_jobs(store)
        assert [record.offer.clocks for record in job.offers] == [planned(0.1)] * PIPELINES
        assert len({id(record.offer.clocks) for record in job.offers}) == 1
        assert [record.offer.version for record in job.offers] == [5, *[4] * (PIPELINES - 1)]
        assert await plan_count(store) == 1
        await store.write([JobDeleted("job", 5), NewRun(make_spec(), 1, 2.0)])
        assert await plan_count(store) == 0
        await offer(store, range(1), 6, planned(0.1))
        assert await plan_count(store) == 1


def broken_rows(duration_s: float = 1.0, energy_j: float = 1.0) -> IterationRows:
    fine = rows(Coordinates(0, 0, 0), [1, 2], -1)
    return IterationRows(
        fine.rank, fine.rows._replace(duration_s=[1.0, duration_s], energy_j=[1.0, energy_j]), -1
    )


@pytest.mark.parametrize(
    ("record", "field"),
    [
        (replace(RECORD, baseline=StockIteration(math.inf, 1.0)), r"record\.baseline\.time_s"),
        (replace(RECORD, policy=OperatingPolicy(math.nan)), r"record\.policy\.max_slowdown_percent"),
        (replace(RECORD, version=2**70), r"record\.version"),
        (replace(PERIOD, energy_m2=math.inf), r"period\.energy_m2"),
        (replace(PERIOD, pipeline_energy_j=(1.0, -math.inf)), r"period\.pipeline_energy_j\[1\]"),
        (broken_rows(duration_s=math.nan), r"iterations\.duration_s\[1\]"),
        (broken_rows(energy_j=math.inf), r"iterations\.energy_j\[1\]"),
        (OfferRecord(0, PipelineOffer((1,), 2**63, planned(0.1))), r"offer\.start_iteration"),
        (OfferRecord(0, PipelineOffer((1,), 1, planned(math.nan))), r"offer\.clocks\.plan\.iteration_time_s"),
        (StageProfile(0, 1200, {}, math.inf, 0.5), r"profile\.blocking_power_w"),
        (StageProfile(0, 1200, {}, None, math.nan), r"profile\.blocking_power_se_w"),
        (EnergyHour(10, None, EnergySums(1, time_s=math.inf), Rates()), "time_s: expected a finite number"),
    ],
)
async def test_an_unstorable_number_is_refused_by_name_and_nothing_is_written(
    store: SqlStore, record: Record, field: str
) -> None:
    await store.write([NewRun(make_spec(), 1, 1.0), JobEntry("job", 1, RECORD)])
    with pytest.raises(UnstorableEntryError, match=field) as caught:
        await store.write([TelemetrySequence("agent", 7), JobEntry("job", 1, record)])
    assert (caught.value.job_id, caught.value.run_number) == ("job", 1)
    assert await store.telemetry_sequence("agent") == 0
    await store.write([TelemetrySequence("agent", 7)])  # the store still works
    (job,) = await stored_jobs(store)
    assert job.record == RECORD


async def test_names_that_look_like_numbers_stay_names(store: SqlStore) -> None:
    rank = Rank(Coordinates(0, 0, 0), instance_id="NaN", hostname="Infinity")
    measured = {(0, Kind.FORWARD): Measurement(1200, 0.1, 10.0)}
    profile = StageProfile(0, 1200, measured, None, 0.0)
    await store.write([NewRun(make_spec(), 1, 1.0), JobEntry("job", 1, rank), JobEntry("job", 1, profile)])
    (job,) = await stored_jobs(store)
    assert (job.ranks, job.profiles) == ((rank,), (profile,))


async def test_a_job_deleted_and_begun_in_one_group_has_only_the_later_rows(store: SqlStore) -> None:
    held = JobEntry("job", 1, OfferRecord(0, PipelineOffer((1,), 1, HoldClocks((1200,)))))
    earlier = JobEntry("job", 1, replace(RECORD, version=9))
    first, second = NewRun(make_spec(), 1, 1.0), NewRun(make_spec(), 1, 2.0)
    await store.write([first, held, earlier, JobDeleted("job", 4), second, held])
    assert await store.deleted_version() == 9
    (job,) = await stored_jobs(store)
    assert (job.create_time_s, job.record, len(job.offers)) == (2.0, None, 1)
