"""The contract of any store, on every engine."""

import asyncio
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from sqlalchemy import func, select

from perseus.service.domain.errors import DatabaseUnavailableError
from perseus.service.domain.ledger import EnergyHour, EnergySums, Rates
from perseus.service.domain.measured import MAX_PERIODS, KnownProfile, Period, StageProfile
from perseus.service.domain.model import (
    STOCK,
    HoldClocks,
    JobState,
    PipelineOffer,
    PlannedClocks,
    Rank,
    RankState,
    StockIteration,
    Straggler,
)
from perseus.service.domain.principals import Grant, Scope, Token, digest_of
from perseus.service.domain.profiling import ClockGivenUpReason, GivenUpClock, ProfilingCost
from perseus.service.domain.records import (
    Counters,
    ForgetIterations,
    ForgetProfile,
    IterationRows,
    JobRecord,
    OfferRecord,
    ProfiledWork,
    Record,
    Registrations,
)
from perseus.service.domain.specification import (
    Coordinates,
    ExplicitSchedule,
    JobSpec,
    OperatingPolicy,
    Parallelism,
    Registration,
)
from perseus.service.domain.stall import Stall, StallReason
from perseus.service.domain.telemetry import IterationColumns
from perseus.service.job.machine import JobMachine
from perseus.service.job.rules import Rules
from perseus.service.storage import schema
from perseus.service.storage.checking import check_database
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import (
    Entry,
    EventEntry,
    JobDeleted,
    JobEntry,
    NewRun,
    TelemetrySequence,
    TokenEntry,
    UnstorableEntryError,
)
from perseus.solver import Computation, Kind, Measurement, Plan, PlannedComputation
from perseus.v1 import event_pb2
from tests.service.service_fakes import EPOCH, make_gpu, make_spec
from tests.service.storage.stores import (
    entries_of,
    execute,
    fill,
    opened,
    planned_cluster,
    stored_jobs,
    stored_run,
)

REGISTERED = event_pb2.JobEvent(sequence=1, message="registered")


RECORD = JobRecord(
    OperatingPolicy(3.5),
    JobState.PLANNED,
    "the frontier is solved",
    9,
    StockIteration(0.1 + 0.2, 1 / 3),
    True,
    (Straggler(0, None, 1.3),),
    0.7e-3,
    (
        GivenUpClock(1, 1200, ClockGivenUpReason.NO_ENERGY, Coordinates(0, 1, 0)),
        GivenUpClock(0, 1300, ClockGivenUpReason.DISTURBED, None),
    ),
    Stall(StallReason.RANK_MISSING, Coordinates(1, 0, 0), 2, 1.7e9, 12),
    1e9 / 7,
)

PERIOD = Period(0, JobState.BASELINE, False, (1, 1), 0, 1, 1.5, 2.5, 2, 0.8, 0.0, 80.0, 0.0, (40.0, 40.0))


def rows(rank: Coordinates, iterations: list[int], closed_through: int) -> IterationRows:
    count = len(iterations)
    parts = [4] * count, [1 / 3] * count, [2 / 3] * count, [True] * count, [0] * count
    return IterationRows(rank, IterationColumns(iterations, *parts), closed_through)


def profile(stage: int, clock_mhz: int, time_s: float = 0.1) -> StageProfile:
    measurement = Measurement(clock_mhz, time_s, 10.0)
    return StageProfile(stage, clock_mhz, {(0, Kind.FORWARD): measurement}, 60.0, 0.5)


async def test_the_epoch_and_instances_keys_last(database: Path | str) -> None:
    async with opened(database) as store:
        epoch = await store.epoch()
        assert epoch
        keys = [store.instance_key(name) for name in ("a", "b", "")]
        assert len(set(keys)) == 3
        assert all(len(key) == 32 for key in keys)
    async with opened(database) as store:
        assert await store.epoch() == epoch
        assert await store.renew_epoch() != epoch
        assert store.instance_key("a") == keys[0]


async def test_a_database_reports_its_size(store: SqlStore) -> None:
    before_bytes = await store.size_bytes()
    assert before_bytes > 0
    await store.write([NewRun(make_spec(f"job-{number}"), 1, 12.5) for number in range(2000)])
    assert await store.size_bytes() > before_bytes


async def test_a_whole_job_is_read_back_as_it_was_written(database: Path | str) -> None:
    cluster = planned_cluster()
    await fill(database, *entries_of(cluster))
    async with opened(database) as store:
        (stored,) = await stored_jobs(store)
        expected = replace(cluster.stored(), create_time_s=12.5)
        assert replace(stored, open_rows=()) == replace(expected, open_rows=())
        assert stored.open_rows == ()
        assert await store.events("job", 1, 0, 10_000) == cluster.events()
    machine, commands = JobMachine.restore(stored, Rules(), EPOCH, now_s=0.0, wall_time_s=14.5)
    machine.validate()
    assert len(commands) == 3  # The record and the counts as they are, and the problem to solve.


async def test_an_explicit_schedule_and_all_kinds_are_read_back(store: SqlStore) -> None:
    kinds = Kind.FIXED, Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
    order = tuple(Computation(0, kind, 0) for kind in kinds)
    spec = JobSpec("job", Parallelism(1, 1, 1), ExplicitSchedule((order,)), OperatingPolicy(2.5))
    await store.write([NewRun(spec, 1, 1.0)])
    (stored,) = await stored_jobs(store)
    assert (stored.spec, stored.record) == (spec, None)


async def test_a_later_entry_replaces_one_of_the_same_key(store: SqlStore) -> None:
    place = Coordinates(0, 1, 0)
    rank = Rank(place, RankState.CONNECTED, "a", "host", make_gpu(place), 3, 2, 17)
    counters = Counters(ProfilingCost(17, 13.5, 1 / 3, 1e6, -0.5), 3)
    earlier = RECORD, rank, OfferRecord(1, PipelineOffer((3, 2), 20, HoldClocks((1200, 0)))), counters
    lost = replace(rank, state=RankState.LOST, refused_clocks_mhz=(1200,), is_stock_only=True)
    later = (
        replace(RECORD, version=10),
        replace(lost, in_force_version=-1),
        OfferRecord(1, PipelineOffer((4, 3), 22, STOCK)),
        replace(counters, signal_count=4),
    )
    await store.write([NewRun(make_spec(), 1, 1.0), *(JobEntry("job", 1, each) for each in earlier)])
    await store.write([JobEntry("job", 1, each) for each in later])
    (stored,) = await stored_jobs(store)
    assert (stored.record, *stored.ranks, *stored.offers, stored.counters) == later


async def test_rows_of_open_iterations_stay_until_they_are_closed_or_forgotten(store: SqlStore) -> None:
    first, second = Coordinates(0, 0, 0), Coordinates(0, 1, 0)
    await store.write([NewRun(make_spec(), 1, 1.0)])
    for written, left in (
        (rows(first, [5, 6], -1), [(first, 5), (first, 6)]),
        (rows(second, [5], 5), [(first, 6)]),
        (ForgetIterations(), []),
    ):
        await store.write([JobEntry("job", 1, written)])
        (stored,) = await stored_jobs(store)
        assert [(row.rank, int(row.rows.iteration[0])) for row in stored.open_rows] == left
        for row in stored.open_rows:
            figures = row.rows.duration_s[0], row.rows.energy_j[0], row.rows.plan_version[0]
            assert figures == (1 / 3, 2 / 3, 4)


async def test_runs_of_a_job_do_not_see_each_others_entries_and_the_latest_is_loaded(
    database: Path | str,
) -> None:
    record = replace(RECORD, baseline_request_ids=("a", "b"))
    registrations = Registrations(
        (Registration("first", "work"), Registration("second", "", labels=(("a", "b"),)))
    )
    third_request = Registrations((Registration("third", "work"),))
    entries: list[Entry] = []
    for number in range(1, 11):  # by number, not as text
        entries += [
            NewRun(replace(make_spec(), stage_work=(f"run {number}", "")), number, float(number)),
            JobEntry("job", number, replace(record, version=number)),
            EventEntry("job", number, REGISTERED),
        ]
    await fill(database, *entries, JobEntry("job", 3, registrations), JobEntry("job", 10, third_request))
    async with opened(database) as store:
        (latest,) = await stored_jobs(store)
        third = await stored_run(store, "job", 3)
        for run, number, requests in ((latest, 10, third_request), (third, 3, registrations)):
            assert (run.run_number, run.create_time_s) == (number, float(number))
            assert run.spec.stage_work == (f"run {number}", "")
            assert (run.record, run.registrations) == (replace(record, version=number), requests)
        assert await store.load_run("job", 11) is await store.load_run("another", 1) is None
        assert await store.run_numbers("job") == list(range(10, 0, -1))
        assert await store.run_numbers("another") == []
        assert await store.events("job", 3, 0, 10) == [REGISTERED]
        assert await store.known_requests() == {"job": {"first": 3, "second": 3, "third": 10}}


async def test_only_the_used_versions_of_a_deleted_job_are_kept(database: Path | str) -> None:
    rank, measured = Rank(Coordinates(0, 0, 0)), StageProfile(0, 1200, {}, 60.0, 0.5)
    async with opened(database) as store:
        for job_id, number in product(("gone", "stays"), (1, 2)):
            records: list[Record] = [
                RECORD,
                Registrations((Registration(f"request {number}", ""),)),
                rank,
                OfferRecord(0, PipelineOffer((3, 2), 20, STOCK)),
                measured,
                ProfiledWork(0, f"work of {job_id}"),
                PERIOD,
                rows(rank.coordinates, [1], -1),
            ]
            entries: list[Entry] = [JobEntry(job_id, number, record) for record in records]
            run = NewRun(make_spec(job_id), number, 1.0)
            await store.write([run, *entries, EventEntry(job_id, number, REGISTERED)])
        assert await store.deleted_version() == 0
        await store.write([JobDeleted("gone", 17)])
        await store.write([NewRun(make_spec("gone"), 1, 2.0), JobDeleted("gone", 5)])

    async with opened(database) as store:
        assert await store.deleted_version() == 17
        (stored,) = await stored_jobs(store)
        assert (stored.spec.job_id, stored.run_number, stored.record) == ("stays", 2, RECORD)
        assert (stored.ranks, stored.profiles, stored.periods) == ((rank,), (measured,), (PERIOD,))
        assert len(stored.offers) == len(stored.open_rows) == stored.last_sequence == 1
        assert await store.known_requests() == {"stays": {"request 1": 1, "request 2": 2}}
        assert await store.known_profiles(["work of gone"]) == []
        assert await store.events("gone", 1, 0, 10) == []
        # A new job of its name finds nothing of it.
        await store.write([NewRun(make_spec("gone"), 1, 3.0)])
        again = await stored_run(store, "gone")
        assert (again.ranks, again.offers, again.profiles, again.periods, again.open_rows) == ((),) * 5
        assert (again.record, again.last_sequence) == (None, 0)


async def test_a_forgotten_profile_is_not_found_and_another_may_follow(store: SqlStore) -> None:
    old, new = profile(0, 1200), profile(0, 1300)
    for job_id in ("job", "other"):
        entries = JobEntry(job_id, 1, old), JobEntry(job_id, 1, ProfiledWork(0, f"work of {job_id}"))
        await store.write([NewRun(make_spec(job_id), 1, 1.0), *entries])
    await store.write([JobEntry("job", 1, ForgetProfile()), JobEntry("job", 1, new)])
    profiles = {some.spec.job_id: some.profiles for some in await stored_jobs(store)}
    assert profiles == {"job": (new,), "other": (old,)}
    assert await store.known_profiles(["work of job"]) == []
    assert len(await store.known_profiles(["work of other"])) == 1


async def test_profiles_are_found_by_the_work_of_each_stage_the_youngest_first(store: SqlStore) -> None:
    await store.write(
        [
            NewRun(make_spec("old"), 1, 1.0),
            JobEntry("old", 1, profile(0, 1200)),
            JobEntry("old", 1, ProfiledWork(0, "light")),
            NewRun(make_spec("young"), 1, 2.0),
            NewRun(make_spec("young"), 2, 3.0),
            *(JobEntry("young", 2, profile(1, clock_mhz, 0.2)) for clock_mhz in (1300, 900)),
            JobEntry("young", 2, profile(0, 1300, 0.3)),
            JobEntry("young", 2, ProfiledWork(1, "light")),
            # Known by no key: its run has not finished profiling it.
            NewRun(make_spec("younger"), 1, 4.0),
            JobEntry("younger", 1, profile(0, 1200, 0.4)),
        ]
    )
    expected = tuple(replace(profile(1, mhz, 0.2), stage=3) for mhz in (900, 1300))
    wanted = ["heavy", "", "none", "light"]
    assert await store.known_profiles(wanted) == [KnownProfile(3, expected, "young", 2)]
    await store.write([JobDeleted("young", 0)])
    assert await store.known_profiles(["light"]) == [KnownProfile(0, (profile(0, 1200),), "old", 1)]


async def test_the_telemetry_sequence_is_kept_per_instance(store: SqlStore) -> None:
    async def known(name: str) -> tuple[int, str]:
        return await store.telemetry_sequence(name), await store.telemetry_principal(name)

    await store.write([TelemetrySequence("a", 7), TelemetrySequence("b", 2)])
    await store.write([TelemetrySequence("a", 8)])
    assert [await known(name) for name in ("a", "b", "none")] == [(8, ""), (2, ""), (0, "")]
    await store.write([TelemetrySequence("a", 9, "token nodes")])
    assert await known("a") == (9, "token nodes")


async def test_a_write_that_fails_leaves_nothing_behind(store: SqlStore) -> None:
    await store.write([NewRun(make_spec(), 1, 1.0)])
    with pytest.raises(Exception, match=r"(?i)unique"):
        await store.write([TelemetrySequence("a", 7), NewRun(make_spec(), 1, 2.0)])
    assert await store.telemetry_sequence("a") == 0
    await store.write([TelemetrySequence("a", 1)])
    assert await store.telemetry_sequence("a") == 1


def test_a_file_that_is_not_a_database_is_refused(path: Path) -> None:
    path.write_text("something else " * 100)
    with pytest.raises(DatabaseUnavailableError, match=str(path)):
        asyncio.run(SqlStore.open(path))
    assert path.read_text().startswith("something else")


async def test_a_report_is_read_from_any_period_on_with_the_baseline_before_it(store: SqlStore) -> None:
    periods = [
        replace(PERIOD, number=number, state=JobState.BASELINE if number in (0, 50) else JobState.PLANNED)
        for number in range(2 * MAX_PERIODS)
    ]
    await store.write([NewRun(make_spec("job"), 1, 1.0), *(JobEntry("job", 1, each) for each in periods)])
    assert await store.load_periods("job", 1) == periods
    for first, baseline in ((1, 0), (50, 0), (51, 50), (127, 50), (500, 50)):
        assert await store.load_periods("job", 1, first) == [periods[baseline], *periods[first:]]
    assert list((await stored_run(store)).periods) == [periods[50], *periods[-MAX_PERIODS:]]


SECRET = "perseus_secret"
AGENT = Token("agents", digest_of(SECRET), Grant(Scope.AGENT, ("llama-*", "opt"), ("node-1*",)), 1.5, 20.25)
OPERATOR = Token("operator", digest_of("perseus_other"), Grant(Scope.OPERATOR), 2.0)


async def test_tokens_survive_a_restart_as_last_written(database: Path | str) -> None:
    revoked = replace(AGENT, revoke_time_s=3.75)
    async with opened(database) as store:
        assert await store.load_tokens() == []
        await store.write([TokenEntry(OPERATOR), TokenEntry(AGENT)])
        await store.write([TokenEntry(revoked)])
    async with opened(database) as store:
        assert await store.load_tokens() == [revoked, OPERATOR]


async def test_an_unreadable_token_is_left_out_and_the_check_reports_it(path: Path) -> None:
    await fill(path, TokenEntry(OPERATOR), TokenEntry(AGENT))
    execute(path, "UPDATE tokens SET scope = 'root' WHERE name = 'agents'")
    (finding,) = check_database(path)
    assert finding.startswith("token 'agents': can't be read, and is not accepted")
    async with opened(path) as store:
        assert await store.load_tokens() == [OPERATOR]
    assert SECRET.encode() not in await asyncio.to_thread(path.read_bytes)


# ---------------------------------------------------------------------- plans and numbers

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
