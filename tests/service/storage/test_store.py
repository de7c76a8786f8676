"""The contract of any store, on every engine."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from perseus.service.domain.commands import Announce, Store
from perseus.service.domain.errors import DatabaseUnavailableError
from perseus.service.domain.measured import MAX_PERIODS, KnownProfile, Period, StageProfile
from perseus.service.domain.model import (
    STOCK,
    HoldClocks,
    JobState,
    PipelineOffer,
    Rank,
    RankState,
    StockIteration,
    Straggler,
)
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
    StoredJob,
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
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import (
    Entry,
    EventEntry,
    JobDeleted,
    JobEntry,
    NewRun,
    TelemetrySequence,
)
from perseus.solver import Computation, Kind, Measurement
from perseus.v1 import event_pb2
from tests.service.service_fakes import EPOCH, Cluster, make_gpu, make_spec

Open = Callable[[], Awaitable[SqlStore]]


@pytest.fixture
def open_store(database: Path | str) -> Open:
    """Opens the same store every time."""

    async def open_it() -> SqlStore:
        return await SqlStore.open(database)

    return open_it


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
    columns = IterationColumns(
        iterations,
        [4] * count,
        [1 / 3] * count,
        [2 / 3] * count,
        [True] * count,
        [0] * count,
    )
    return IterationRows(rank, columns, closed_through)


async def stored_jobs(store: SqlStore) -> list[StoredJob]:
    return [job for job in await store.load_jobs() if isinstance(job, StoredJob)]


async def stored_run(store: SqlStore, job_id: str, run_number: int) -> StoredJob:
    run = await store.load_run(job_id, run_number)
    assert isinstance(run, StoredJob)
    return run


async def test_the_epoch_stays_when_the_store_is_opened_again(open_store: Open) -> None:
    store = await open_store()
    epoch = await store.epoch()
    await store.close()
    again = await open_store()
    assert await again.epoch() == epoch
    assert epoch
    await again.close()


async def test_a_database_reports_its_size(open_store: Open) -> None:
    store = await open_store()
    before_bytes = await store.size_bytes()
    assert before_bytes > 0
    await store.write([NewRun(make_spec(f"job-{number}"), 1, 12.5) for number in range(2000)])
    assert await store.size_bytes() > before_bytes
    await store.close()


async def test_a_whole_job_is_read_back_as_it_was_written(open_store: Open) -> None:
    cluster = Cluster(make_spec())
    cluster.join_all()
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(3)
    entries: list[Entry] = [NewRun(cluster.spec, 1, 12.5)]
    for command in cluster.history:
        if isinstance(command, Store):
            entries.append(JobEntry("job", 1, command.record))
        elif isinstance(command, Announce):
            entries.append(EventEntry("job", 1, command.event))
    store = await open_store()
    await store.write(entries)
    await store.close()

    store = await open_store()
    (stored,) = await stored_jobs(store)
    expected = replace(cluster.stored(), create_time_s=12.5)
    assert replace(stored, open_rows=()) == replace(expected, open_rows=())
    assert stored.open_rows == ()
    assert await store.events("job", 1, 0, 10_000) == cluster.events()
    machine, commands = JobMachine.restore(stored, Rules(), EPOCH, now_s=0.0, wall_time_s=14.5)
    machine.validate()
    assert len(commands) == 3  # The record and the counts as they are, and the problem to solve.
    await store.close()


async def test_an_explicit_schedule_and_all_kinds_are_read_back(open_store: Open) -> None:
    order = (
        Computation(0, Kind.FIXED, 0),
        Computation(0, Kind.FORWARD, 0),
        Computation(0, Kind.BACKWARD_INPUT, 0),
        Computation(0, Kind.BACKWARD_WEIGHT, 0),
    )
    spec = JobSpec("job", Parallelism(1, 1, 1), ExplicitSchedule((order,)), OperatingPolicy(2.5))
    store = await open_store()
    await store.write([NewRun(spec, 1, 1.0)])
    (stored,) = await stored_jobs(store)
    assert stored.spec == spec
    assert stored.record is None
    await store.close()


async def test_a_later_entry_replaces_one_of_the_same_key(open_store: Open) -> None:
    store = await open_store()
    rank = Rank(
        Coordinates(0, 1, 0), RankState.CONNECTED, "a", "host", make_gpu(Coordinates(0, 1, 0)), 3, 2, 17
    )
    await store.write(
        [
            NewRun(make_spec(), 1, 1.0),
            JobEntry("job", 1, RECORD),
            JobEntry("job", 1, rank),
            JobEntry("job", 1, OfferRecord(1, PipelineOffer((3, 2), 20, HoldClocks((1200, 0))))),
        ]
    )
    newer = replace(
        rank, state=RankState.LOST, in_force_version=-1, refused_clocks_mhz=(1200,), is_stock_only=True
    )
    await store.write(
        [
            JobEntry("job", 1, replace(RECORD, version=10)),
            JobEntry("job", 1, newer),
            JobEntry("job", 1, OfferRecord(1, PipelineOffer((4, 3), 22, STOCK))),
        ]
    )
    (stored,) = await stored_jobs(store)
    assert stored.record == replace(RECORD, version=10)
    assert stored.ranks == (newer,)
    assert stored.offers == (OfferRecord(1, PipelineOffer((4, 3), 22, STOCK)),)
    await store.close()


async def test_later_counters_replace_earlier_ones(open_store: Open) -> None:
    store = await open_store()
    earlier, later = (Counters(ProfilingCost(17, 13.5, 1 / 3, 1e6, -0.5), count) for count in (3, 4))
    await store.write([NewRun(make_spec(), 1, 1.0), JobEntry("job", 1, earlier), JobEntry("job", 1, later)])
    (stored,) = await stored_jobs(store)
    assert stored.counters == later
    await store.close()


async def test_jobs_do_not_see_each_others_entries(open_store: Open) -> None:
    store = await open_store()
    event = event_pb2.JobEvent(sequence=1, message="registered")
    await store.write(
        [
            NewRun(make_spec("b"), 1, 1.0),
            NewRun(make_spec("a"), 1, 2.0),
            JobEntry("b", 1, RECORD),
            JobEntry("b", 1, rows(Coordinates(0, 0, 0), [1], -1)),
            EventEntry("b", 1, event),
        ]
    )
    first, second = await stored_jobs(store)
    assert (first.spec.job_id, first.record, first.open_rows, first.last_sequence) == ("a", None, (), 0)
    assert (second.spec.job_id, second.record, second.last_sequence) == ("b", RECORD, 1)
    await store.close()


async def test_rows_of_open_iterations_stay_until_they_are_closed_or_forgotten(open_store: Open) -> None:
    store = await open_store()
    first, second = Coordinates(0, 0, 0), Coordinates(0, 1, 0)

    async def open_iterations() -> list[tuple[Coordinates, int]]:
        (stored,) = await stored_jobs(store)
        return [(row.rank, int(row.rows.iteration[0])) for row in stored.open_rows]

    await store.write([NewRun(make_spec(), 1, 1.0), JobEntry("job", 1, rows(first, [5, 6], -1))])
    assert await open_iterations() == [(first, 5), (first, 6)]
    await store.write([JobEntry("job", 1, rows(second, [5], 5))])
    assert await open_iterations() == [(first, 6)]
    (stored,) = await stored_jobs(store)
    (row,) = stored.open_rows
    assert (row.rows.duration_s[0], row.rows.energy_j[0], row.rows.plan_version[0]) == (1 / 3, 2 / 3, 4)
    await store.write([JobEntry("job", 1, ForgetIterations())])
    assert await open_iterations() == []
    await store.close()


async def test_runs_of_a_job_do_not_see_each_others_entries_and_the_latest_is_loaded(
    open_store: Open,
) -> None:
    store = await open_store()
    event = event_pb2.JobEvent(sequence=1, message="registered")
    registrations = Registrations(
        (Registration("first", "work"), Registration("second", "", labels=(("a", "b"),)))
    )
    entries: list[Entry] = []
    for number in range(1, 11):  # by number, not as text
        entries += [
            NewRun(replace(make_spec(), stage_work=(f"run {number}", "")), number, float(number)),
            JobEntry("job", number, replace(RECORD, version=number, baseline_request_ids=("a", "b"))),
            EventEntry("job", number, event),
        ]
    entries.append(JobEntry("job", 3, registrations))
    entries.append(JobEntry("job", 10, Registrations((Registration("third", "work"),))))
    await store.write(entries)
    await store.close()

    store = await open_store()
    (latest,) = await stored_jobs(store)
    third = await stored_run(store, "job", 3)
    assert third is not None
    assert (latest.run_number, third.run_number) == (10, 3)
    assert (latest.spec.stage_work, third.spec.stage_work) == (("run 10", ""), ("run 3", ""))
    assert (latest.create_time_s, third.create_time_s) == (10.0, 3.0)
    assert latest.record == replace(RECORD, version=10, baseline_request_ids=("a", "b"))
    assert third.registrations == registrations
    assert latest.registrations.registrations == (Registration("third", "work"),)
    assert await store.load_run("job", 11) is None
    assert await store.load_run("another", 1) is None
    assert await store.run_numbers("job") == list(range(10, 0, -1))
    assert await store.run_numbers("another") == []
    assert await store.events("job", 3, 0, 10) == [event]
    assert await store.known_requests() == {"job": {"first": 3, "second": 3, "third": 10}}
    await store.close()


async def test_only_the_used_versions_of_a_deleted_job_are_kept(open_store: Open) -> None:
    store = await open_store()
    rank = Rank(Coordinates(0, 0, 0))
    profile = StageProfile(0, 1200, {}, 60.0, 0.5)
    event = event_pb2.JobEvent(sequence=1, message="registered")
    for job_id in ("gone", "stays"):
        entries: list[Entry] = []
        for number in (1, 2):
            records: list[Record] = [
                RECORD,
                Registrations((Registration(f"request {number}", ""),)),
                rank,
                OfferRecord(0, PipelineOffer((3, 2), 20, STOCK)),
                profile,
                ProfiledWork(0, f"work of {job_id}"),
                PERIOD,
                rows(rank.coordinates, [1], -1),
            ]
            entries.append(NewRun(make_spec(job_id), number, 1.0))
            entries += [JobEntry(job_id, number, record) for record in records]
            entries.append(EventEntry(job_id, number, event))
        await store.write(entries)
    assert await store.deleted_version() == 0
    await store.write([JobDeleted("gone", 17)])
    await store.write([NewRun(make_spec("gone"), 1, 2.0), JobDeleted("gone", 5)])
    await store.close()

    store = await open_store()
    assert await store.deleted_version() == 17
    (stored,) = await stored_jobs(store)
    assert (stored.spec.job_id, stored.run_number, stored.record) == ("stays", 2, RECORD)
    assert (stored.ranks, stored.profiles, stored.periods) == ((rank,), (profile,), (PERIOD,))
    assert len(stored.offers) == len(stored.open_rows) == stored.last_sequence == 1
    assert await store.known_requests() == {"stays": {"request 1": 1, "request 2": 2}}
    assert await store.known_profiles(["work of gone"]) == []
    assert await store.events("gone", 1, 0, 10) == []
    # A new job of its name finds nothing of it.
    await store.write([NewRun(make_spec("gone"), 1, 3.0)])
    again = await stored_run(store, "gone", 1)
    assert again is not None
    assert (again.ranks, again.offers, again.profiles, again.periods, again.open_rows) == ((),) * 5
    assert (again.record, again.last_sequence) == (None, 0)
    await store.close()


async def test_a_forgotten_profile_is_not_found_and_another_may_follow(
    open_store: Open,
) -> None:
    store = await open_store()
    old, new = (
        StageProfile(0, mhz, {(0, Kind.FORWARD): Measurement(mhz, 0.1, 10.0)}, 60.0, 0.5)
        for mhz in (1200, 1300)
    )
    await store.write(
        [
            *(NewRun(make_spec(job_id), 1, 1.0) for job_id in ("job", "other")),
            *(JobEntry(job_id, 1, old) for job_id in ("job", "other")),
            JobEntry("job", 1, ProfiledWork(0, "own")),
            JobEntry("other", 1, ProfiledWork(0, "others")),
        ]
    )
    await store.write([JobEntry("job", 1, ForgetProfile()), JobEntry("job", 1, new)])
    assert await store.known_profiles(["own"]) == []
    assert {some.spec.job_id: some.profiles for some in await stored_jobs(store)} == {
        "job": (new,),
        "other": (old,),
    }
    assert len(await store.known_profiles(["others"])) == 1
    await store.close()


async def test_profiles_are_found_by_the_work_of_each_stage_the_youngest_first(open_store: Open) -> None:
    store = await open_store()

    def profile(stage: int, clock_mhz: int, time_s: float) -> StageProfile:
        measurement = Measurement(clock_mhz, time_s, 10.0)
        return StageProfile(stage, clock_mhz, {(0, Kind.FORWARD): measurement}, 60.0, 0.5)

    await store.write(
        [
            NewRun(make_spec("old"), 1, 1.0),
            JobEntry("old", 1, profile(0, 1200, 0.1)),
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
    assert await store.known_profiles(["heavy", "", "none", "light"]) == [
        KnownProfile(3, expected, "young", 2)
    ]
    await store.write([JobDeleted("young", 0)])
    assert await store.known_profiles(["light"]) == [KnownProfile(0, (profile(0, 1200, 0.1),), "old", 1)]
    await store.close()


async def test_the_telemetry_sequence_is_kept_per_instance(open_store: Open) -> None:
    store = await open_store()
    assert await store.telemetry_sequence("a") == 0
    await store.write([TelemetrySequence("a", 7), TelemetrySequence("b", 2)])
    await store.write([TelemetrySequence("a", 8)])
    assert (await store.telemetry_sequence("a"), await store.telemetry_sequence("b")) == (8, 2)
    assert [await store.telemetry_principal(name) for name in ("a", "none")] == ["", ""]
    await store.write([TelemetrySequence("a", 9, "token nodes")])
    assert await store.telemetry_principal("a") == "token nodes"
    assert await store.telemetry_sequence("a") == 9
    await store.close()


async def test_an_instances_key_is_its_own_and_lasts(open_store: Open) -> None:
    store = await open_store()
    keys = [store.instance_key(name) for name in ("a", "b", "")]
    assert len(set(keys)) == 3
    assert all(len(key) == 32 for key in keys)
    await store.renew_epoch()
    assert store.instance_key("a") == keys[0]
    await store.close()
    store = await open_store()
    assert store.instance_key("a") == keys[0]
    await store.close()


async def test_a_write_that_fails_leaves_nothing_behind(open_store: Open) -> None:
    store = await open_store()
    await store.write([NewRun(make_spec(), 1, 1.0)])
    with pytest.raises(Exception, match=r"(?i)unique"):
        await store.write([TelemetrySequence("a", 7), NewRun(make_spec(), 1, 2.0)])
    assert await store.telemetry_sequence("a") == 0
    await store.write([TelemetrySequence("a", 1)])
    assert await store.telemetry_sequence("a") == 1
    await store.close()


async def test_a_file_in_use_is_refused(tmp_path: Path) -> None:
    store = await SqlStore.open(tmp_path / "jobs.db")
    with pytest.raises(DatabaseUnavailableError, match="locked"):
        await SqlStore.open(tmp_path / "jobs.db")
    await store.close()
    await (await SqlStore.open(tmp_path / "jobs.db")).close()


async def test_a_file_that_is_not_a_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    path.write_text("something else " * 100)
    with pytest.raises(DatabaseUnavailableError, match=str(path)):
        await SqlStore.open(path)
    assert path.read_text().startswith("something else")


async def test_a_report_is_read_from_any_period_on_with_the_baseline_before_it(open_store: Open) -> None:
    store = await open_store()
    baselines = {0, 50}
    periods = [
        replace(PERIOD, number=number, state=JobState.BASELINE if number in baselines else JobState.PLANNED)
        for number in range(2 * MAX_PERIODS)
    ]
    await store.write([NewRun(make_spec("job"), 1, 1.0), *(JobEntry("job", 1, each) for each in periods)])
    assert await store.load_periods("job", 1) == periods
    for first, baseline in ((1, 0), (50, 0), (51, 50), (127, 50), (500, 50)):
        assert await store.load_periods("job", 1, first) == [periods[baseline], *periods[first:]]
    stored = await stored_run(store, "job", 1)
    assert stored is not None
    assert list(stored.periods) == [periods[50], *periods[-MAX_PERIODS:]]
    await store.close()
