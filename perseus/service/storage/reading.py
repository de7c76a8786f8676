"""Queries: whole runs, profiles by their work, events by pages.

An unreadable run doesn't keep others from being read: it is returned as an `UnreadableJob`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from google.protobuf.message import DecodeError
from sqlalchemy import Column, Connection, Row, Subquery, Table, and_, case, func, or_, select, text

from perseus.service.domain.errors import InvalidFieldError, JobUnreadableError, cut
from perseus.service.domain.measured import MAX_PERIODS, KnownProfile, Period, StageProfile
from perseus.service.domain.messages import time_to_proto
from perseus.service.domain.model import ALL_EVENTS, EventFilter, PipelineOffer, Rank
from perseus.service.domain.power import BudgetRecord, UnreadableBudget
from perseus.service.domain.principals import Grant, Scope, Session, Token
from perseus.service.domain.records import (
    Counters,
    IterationRows,
    ListedRun,
    OfferRecord,
    Registrations,
    StoredJob,
    UnreadableJob,
)
from perseus.service.domain.slot_power import Division, KnownSlot
from perseus.service.domain.snapshot import RunSnapshot
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.telemetry import IterationColumns
from perseus.service.storage import codecs, ledger_rows, schema
from perseus.service.storage.engines import enter
from perseus.v1 import event_pb2, frontier_pb2, job_pb2, job_service_pb2

_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, DecodeError)
"""Exceptions of reading any stored value (pydantic's errors are ValueErrors)."""

_MAX_SEQUENCE = 2**63 - 1

_LISTED_SPEC = 16_384
"""Characters of the longest specification that is read for a list: one that names its schedule is shorter."""

_NOT_ARCHIVED = schema.runs.c.is_archived == 0


def standbys(connection: Connection) -> Mapping[str, int]:
    """Return how many standbys of the database have, and may lack, all that is committed: by
    "synchronous" and "asynchronous"; nothing if that can't be read, as on SQLite."""
    may_read = "SELECT pg_has_role('pg_read_all_stats', 'USAGE')"
    if connection.dialect.name != "postgresql" or not connection.scalar(text(may_read)):
        return {}
    states = connection.scalars(text("SELECT sync_state FROM pg_stat_replication")).all()
    # The others are async, or potential: commits do not wait for them.
    synchronous_count = sum(state in ("sync", "quorum") for state in states)
    return {"synchronous": synchronous_count, "asynchronous": len(states) - synchronous_count}


def jobs_of_slots(
    connection: Connection, slots: Iterable[int], limit: int
) -> Mapping[int, tuple[list[ListedRun], int]]:
    """Return the jobs of other slots than the connection's, on PostgreSQL, as they are stored: up to `limit`
    of each slot, unfinished ones first, and how many it has. Those that can't be read are left out."""
    return {slot: _jobs_of_slot(connection, slot, limit) for slot in slots}


def _jobs_of_slot(connection: Connection, slot: int, limit: int) -> tuple[list[ListedRun], int]:
    enter(connection, slot)
    runs, latest = schema.runs.c, _latest_runs()
    short_spec = case((func.length(runs.spec) <= _LISTED_SPEC, runs.spec))
    rows = connection.execute(
        select(runs.job_id, runs.run_number, runs.record, short_spec, func.count().over())
        .join(latest, (runs.job_id == latest.c.job_id) & (runs.run_number == latest.c.run_number))
        .where(_NOT_ARCHIVED)
        .order_by(runs.finish_time_s.is_not(None), runs.job_id)
        .limit(limit)
    ).all()
    found = []
    for job_id, run_number, record, spec, _ in rows:
        with suppress(*_UNREADABLE):
            parallelism = codecs.SPEC_SIZE.load(spec).parallelism if spec else None
            found.append(
                ListedRun(job_id, run_number, codecs.RECORD.load(record) if record else None, parallelism)
            )
    return found, rows[0][-1] if rows else 0


def _latest_runs() -> Subquery:
    runs = schema.runs.c
    latest = select(runs.job_id, func.max(runs.run_number).label("run_number"))
    return latest.group_by(runs.job_id).subquery()


def load_jobs(connection: Connection) -> list[StoredJob | RunSnapshot | UnreadableJob]:
    """Return the latest run of every job, by identifier, unless it is archived."""
    runs, latest = schema.runs.c, _latest_runs()
    found = connection.execute(
        select(runs.job_id, runs.run_number)
        .join(latest, (runs.job_id == latest.c.job_id) & (runs.run_number == latest.c.run_number))
        .where(_NOT_ARCHIVED)
        .order_by(runs.job_id)
    ).all()
    loaded = (load_ended_run(connection, *run) or load_run(connection, *run) for run in found)
    return [job for job in loaded if job is not None]


def load_ended_run(
    connection: Connection, job_id: str, run_number: int
) -> RunSnapshot | UnreadableJob | None:
    """Return a run of a job if it exists and has ended, archived or not."""
    runs = schema.runs.c
    row = connection.execute(
        select(runs.spec, runs.create_time_s, runs.registrations, runs.record, runs.ended_job).where(
            runs.job_id == job_id, runs.run_number == run_number, runs.ended_job.is_not(None)
        )
    ).first()
    if row is None:
        return None
    try:
        return RunSnapshot(
            codecs.SPEC.load(row.spec),
            run_number,
            row.create_time_s,
            Registrations(codecs.REGISTRATIONS.load(row.registrations)),
            codecs.RECORD.load(row.record),
            job_pb2.Job.FromString(row.ended_job),
        )
    except _UNREADABLE as error:
        return UnreadableJob(job_id, run_number, _cause(error))


def ended_frontier(connection: Connection, job_id: str, run_number: int) -> frontier_pb2.Frontier | None:
    """Return the frontier that a run had when it ended."""
    content = _of_ended_run(connection, job_id, run_number, schema.runs.c.frontier)
    return None if content is None else frontier_pb2.Frontier.FromString(content)


def ended_timeline(
    connection: Connection, job_id: str, run_number: int, *, from_baseline: bool
) -> job_service_pb2.GetTimelineResponse | None:
    """Return the last timeline that was kept when a run ended, or that of its stock baseline."""
    runs = schema.runs.c
    column = runs.baseline_timeline if from_baseline else runs.last_timeline
    content = _of_ended_run(connection, job_id, run_number, column)
    return None if content is None else job_service_pb2.GetTimelineResponse.FromString(content)


def _of_ended_run(connection: Connection, job_id: str, run_number: int, column: Column[Any]) -> bytes | None:
    runs = schema.runs.c
    query = select(column).where(runs.job_id == job_id, runs.run_number == run_number)
    found: bytes | None = connection.scalar(query)
    return found


def ended_jobs(
    connection: Connection, job_id: str, before: int | None, count: int
) -> list[tuple[int, job_pb2.Job | UnreadableJob]]:
    """Return up to `count` runs of a job numbered below `before`, the latest first, as they ended."""
    runs = schema.runs.c
    query = select(runs.run_number, runs.ended_job).where(runs.job_id == job_id)
    if before is not None:
        query = query.where(runs.run_number < before)
    found: list[tuple[int, job_pb2.Job | UnreadableJob]] = []
    for number, content in connection.execute(query.order_by(runs.run_number.desc()).limit(count)):
        try:
            found.append((number, job_pb2.Job.FromString(content)))
        except _UNREADABLE as error:
            found.append((number, UnreadableJob(job_id, number, _cause(error))))
    return found


def load_ranks(
    connection: Connection, job_id: str, run_number: int, first_pipeline: int, pipeline_count: int
) -> list[Rank]:
    """Return a run's stored ranks, of so many pipelines from one on.

    Raises:
        JobUnreadableError: one of them can't be read.
    """
    ranks = schema.ranks.c
    rows = connection.execute(
        select(ranks.rank).where(
            ranks.job_id == job_id,
            ranks.run_number == run_number,
            ranks.pipeline >= first_pipeline,
            ranks.pipeline < first_pipeline + pipeline_count,
        )
    )
    try:
        return [codecs.RANK.load(row.rank) for row in rows]
    except _UNREADABLE as error:
        raise JobUnreadableError(job_id=job_id, run_number=run_number, cause=_cause(error)) from None


def load_periods(connection: Connection, job_id: str, run_number: int, first_number: int = 0) -> list[Period]:
    """Return a run's report from the period of a number on, after the stock baseline that it begins under.

    Raises:
        JobUnreadableError: a period can't be read.
    """
    try:
        return _periods_from(connection, job_id, run_number, first_number)
    except _UNREADABLE as error:
        raise JobUnreadableError(job_id=job_id, run_number=run_number, cause=_cause(error)) from None


def _periods_from(connection: Connection, job_id: str, run_number: int, first_number: int) -> list[Period]:
    columns = schema.periods.c
    of_run = and_(columns.job_id == job_id, columns.run_number == run_number)
    baseline = select(func.max(columns.number)).where(
        of_run, columns.is_baseline == 1, columns.number < first_number
    )
    rows = connection.scalars(
        select(columns.period)
        .where(of_run, or_(columns.number >= first_number, columns.number == baseline.scalar_subquery()))
        .order_by(columns.number)
    )
    return [codecs.PERIOD.load(period) for period in rows]


def _latest_periods(connection: Connection, job_id: str, run_number: int) -> tuple[Period, ...]:
    columns = schema.periods.c
    last = connection.scalar(
        select(func.max(columns.number)).where(columns.job_id == job_id, columns.run_number == run_number)
    )
    first_number = 0 if last is None else max(0, last + 1 - MAX_PERIODS)
    return tuple(_periods_from(connection, job_id, run_number, first_number))


def load_run(connection: Connection, job_id: str, run_number: int) -> StoredJob | UnreadableJob | None:
    """Return a run of a job if it exists, archived or not."""
    try:
        return _load_run(connection, job_id, run_number)
    except _UNREADABLE as error:
        return UnreadableJob(job_id, run_number, _cause(error))


def _cause(error: Exception) -> str:
    return cut(" ".join(f"{type(error).__name__}: {error}".split()))


def _load_run(connection: Connection, job_id: str, run_number: int) -> StoredJob | None:
    def rows(table: Table, *order: str) -> Sequence[Row[Any]]:
        return connection.execute(
            select(table)
            .where(table.c.job_id == job_id, table.c.run_number == run_number)
            .order_by(*(table.c[name] for name in order))
        ).all()

    runs = rows(schema.runs)
    if not runs:
        return None
    (run,) = runs
    # Releases before had its fields in the record.
    counters = next((row.counters for row in rows(schema.counters)), run.record)
    plans = {row.digest: codecs.load_clocks(row.clocks_type, row.clocks) for row in rows(schema.plans)}
    last_sequence = connection.scalar(
        select(func.coalesce(func.max(schema.events.c.sequence), 0)).where(
            schema.events.c.job_id == job_id, schema.events.c.run_number == run_number
        )
    )
    return StoredJob(
        spec=codecs.SPEC.load(run.spec),
        run_number=run_number,
        create_time_s=run.create_time_s,
        registrations=Registrations(codecs.REGISTRATIONS.load(run.registrations)),
        record=codecs.RECORD.load(run.record) if run.record else None,
        ranks=tuple(codecs.RANK.load(row.rank) for row in rows(schema.ranks, "pipeline", "stage", "tensor")),
        offers=tuple(
            OfferRecord(
                row.pipeline,
                PipelineOffer(
                    codecs.STAGE_VERSIONS.load(row.stage_versions),
                    row.start_iteration,
                    plans[row.plan_digest],
                ),
            )
            for row in rows(schema.offers, "pipeline")
        ),
        profiles=tuple(_profile(row.stage, row) for row in rows(schema.profiles, "stage", "clock_mhz")),
        periods=_latest_periods(connection, job_id, run_number),
        open_rows=tuple(
            map(_iteration, rows(schema.open_iterations, "iteration", "pipeline", "stage", "tensor"))
        ),
        last_sequence=int(last_sequence or 0),
        latest_hour=ledger_rows.latest_hour(connection, job_id, run_number),
        counters=codecs.COUNTERS.load(counters) if counters else Counters(),
    )


def run_numbers(connection: Connection, job_id: str) -> list[int]:
    """Return the numbers of a job's runs, the latest first."""
    runs = schema.runs.c
    found = connection.scalars(
        select(runs.run_number).where(runs.job_id == job_id).order_by(runs.run_number.desc())
    )
    return list(found)


def known_requests(connection: Connection, job_id: str | None = None) -> Mapping[str, Mapping[str, int]]:
    """Return the run that each request led to, of one job, or of all whose latest run is not archived.

    Unreadable registrations are left out: their run can't be read either.
    """
    runs = schema.runs.c
    query = select(runs.job_id, runs.run_number, runs.registrations).order_by(runs.run_number)
    if job_id is not None:
        query = query.where(runs.job_id == job_id)
    else:
        live = schema.runs.alias()
        query = query.where(runs.job_id.in_(select(live.c.job_id).where(live.c.is_archived == 0)))
    known: dict[str, dict[str, int]] = {}
    for name, run_number, content in connection.execute(query):
        try:
            registrations = codecs.REGISTRATIONS.load(content)
        except _UNREADABLE:
            continue
        for registration in registrations:
            known.setdefault(name, {})[registration.request_id] = run_number
    return known


def deleted_version(connection: Connection) -> int:
    """Return the highest version that a deleted job has used, 0 if none."""
    return int(connection.scalar(select(schema.coordinator.c.deleted_version)) or 0)


def known_profiles(connection: Connection, keys: Sequence[str]) -> list[KnownProfile]:
    """Return the known profiles of the work under each stage's key, stage 0 first, from the youngest run."""
    work, runs, profiles = schema.profiled_work.c, schema.runs.c, schema.profiles
    found = []
    for stage, key in enumerate(keys):
        source = connection.execute(
            select(work.job_id, work.run_number, work.stage)
            .join(schema.runs, (work.job_id == runs.job_id) & (work.run_number == runs.run_number))
            .where(work.work_key == key)
            .order_by(runs.create_time_s.desc(), runs.run_number.desc())
            .limit(1)
        ).first()
        if source is None:
            continue
        job_id, run_number, source_stage = source
        rows = connection.execute(
            select(profiles)
            .where(
                profiles.c.job_id == job_id,
                profiles.c.run_number == run_number,
                profiles.c.stage == source_stage,
            )
            .order_by(profiles.c.clock_mhz)
        )
        try:
            measured = tuple(_profile(stage, row) for row in rows)
        except _UNREADABLE:
            continue  # The stage is measured again: only time is lost.
        found.append(KnownProfile(stage, measured, job_id, run_number))
    return found


def events(
    connection: Connection,
    job_id: str,
    run_number: int,
    after_sequence: int,
    limit: int,
    wanted: EventFilter = ALL_EVENTS,
) -> list[event_pb2.JobEvent]:
    """Return a run's first `limit` wanted events above a sequence, in order.

    With the latest first: the last ones below it; the last ones of all if it is not positive.

    An unreadable event comes without its message and details; an unknown type or unknown details don't make
    an event unreadable.
    """
    is_sqlite = connection.dialect.name == "sqlite"
    statement, values = events_query(
        job_id, run_number, after_sequence, limit, wanted, has_index_hints=is_sqlite
    )
    return [_event(*row) for row in connection.execute(text(statement), values)]


def _event(sequence: int, create_time_s: float, kind: Any, content: bytes) -> event_pb2.JobEvent:
    try:
        return event_pb2.JobEvent.FromString(content)
    except DecodeError:
        create_time = time_to_proto(create_time_s)
        return event_pb2.JobEvent(sequence=sequence, create_time=create_time, type=kind)


def events_query(
    job_id: str,
    run_number: int,
    after_sequence: int,
    limit: int,
    wanted: EventFilter,
    *,
    has_index_hints: bool,
) -> tuple[str, dict[str, object]]:
    """Return the query for a page of a run's events, and its values.

    However many events there are, it reads little more than the page: along the primary key, or along the
    index of each type, these merged. The wall clock may be set back, so times need not follow the sequence:
    bounds on time become bounds on the sequence, along an index of their own, and each event is tested too.
    SQLite needs a hint for the right index.
    """

    def along(index: str) -> str:
        return f"events INDEXED BY {index}" if has_index_hints else "events"

    run = "job_id = :job_id AND run_number = :run_number"
    values: dict[str, object] = {
        "job_id": job_id,
        "run_number": run_number,
        "place": after_sequence,
        "limit": limit,
    }
    beyond, direction = ">", "ASC"
    if wanted.is_latest_first:
        beyond, direction = "<", "DESC"
        values["place"] = after_sequence if after_sequence > 0 else _MAX_SEQUENCE
    # All parts of the text are ours; what was asked for is bound.
    conditions = f"{run} AND sequence {beyond} :place"
    if wanted.start_time_s is not None:
        values["start_s"] = wanted.start_time_s
        conditions += (
            " AND create_time_s >= :start_s AND sequence >= (SELECT min(sequence) "  # noqa: S608
            f"FROM {along('events_by_time')} WHERE {run} AND create_time_s >= :start_s)"
        )
    if wanted.end_time_s is not None:
        values["end_s"] = wanted.end_time_s
        conditions += (
            " AND create_time_s < :end_s AND sequence <= (SELECT max(sequence) "  # noqa: S608
            f"FROM {along('events_by_time')} WHERE {run} AND create_time_s < :end_s)"
        )
    columns = "sequence, create_time_s, type, event"
    if not wanted.types:
        query = f"SELECT {columns} FROM events WHERE {conditions}"  # noqa: S608
    else:
        kinds = {f"type_{number}": kind for number, kind in enumerate(wanted.types)}
        values |= kinds
        of_type = f"SELECT {columns} FROM {along('events_by_type')} WHERE {conditions} AND type ="  # noqa: S608
        query = " UNION ALL ".join(f"{of_type} :{name}" for name in kinds)
    return f"{query} ORDER BY sequence {direction} LIMIT :limit", values


def load_tokens(connection: Connection) -> list[Token]:
    """Return all readable bearer tokens by name; unreadable ones are not accepted."""
    tokens = []
    for row in connection.execute(select(schema.tokens).order_by(schema.tokens.c.name)):
        try:
            tokens.append(token_of(row))
        except _UNREADABLE:
            continue
    return tokens


def load_sessions(connection: Connection) -> list[Session]:
    """Return all logins of browsers, those that end first before the others."""
    rows = connection.execute(select(schema.sessions).order_by(schema.sessions.c.end_time_s))
    return [Session(*row) for row in rows]


def load_budgets(
    connection: Connection, not_over_s: float | None = None
) -> list[BudgetRecord | UnreadableBudget]:
    """Return all power budgets by identifier, or only those that are not over at a time."""
    budgets: list[BudgetRecord | UnreadableBudget] = []
    query, over_s = select(schema.budgets), schema.budgets.c.over_time_s
    if not_over_s is not None:
        query = query.where(over_s.is_(None) | (over_s > not_over_s))
    for row in connection.execute(query.order_by(schema.budgets.c.budget_id)):
        try:
            budgets.append(budget_of(row))
        except (*_UNREADABLE, OverflowError) as error:
            budgets.append(_unreadable_budget(row, cut(" ".join(str(error).split()))))
    return budgets


def load_slot_powers(connection: Connection) -> tuple[list[KnownSlot], Division]:
    """Return what the coordinators of slots have published, by slot, and the division of feeds.

    What can't be read counts as not published.
    """
    slots, members, powers = schema.slots, schema.members, schema.slot_powers
    query = (
        select(members.c.member_id, slots.c.lease_epoch, powers)
        .select_from(slots)
        .outerjoin(members, members.c.member_id == slots.c.holder)
        .outerjoin(powers, powers.c.slot == slots.c.number)
        .order_by(slots.c.number)
    )
    found, division = [], Division()
    for holder, lease_epoch, slot, written_epoch, power_text, division_text in connection.execute(query):
        power = None
        with suppress(*_UNREADABLE):
            power = codecs.SLOT_POWER.load(power_text)
            if slot == 0:
                division = codecs.DIVISION.load(division_text)
        is_of_holder = power is not None and written_epoch == lease_epoch
        found.append(KnownSlot(power, holder is not None, is_of_holder))
    return found, division


def load_power_caps(connection: Connection, slot: int) -> Mapping[str, float]:
    """Return the power caps of feeds as a slot's coordinator had them last; none if they can't be read."""
    powers = schema.slot_powers.c
    stored = connection.scalar(select(powers.power).where(powers.slot == slot))
    with suppress(*_UNREADABLE):
        return codecs.SLOT_POWER.load(stored).caps_w if stored is not None else {}
    return {}


def _unreadable_budget(row: Row[Any], problem: str) -> UnreadableBudget:
    feed, limit_w = None, None
    over_time_s = row.over_time_s if isinstance(row.over_time_s, int | float) else None
    with suppress(*_UNREADABLE, OverflowError):
        stored = json.loads(row.budget)[1]["budget"]
        feed, limit_w = str(stored["feed"]), float(stored["limit_w"])
    with suppress(*_UNREADABLE, InvalidFieldError):
        if codecs.BUDGET.load(row.budget).over_time_s != over_time_s:
            over_time_s = None  # one of the two is wrong
    return UnreadableBudget(str(row.budget_id), over_time_s, feed, limit_w, problem)


def budget_of(row: Row[Any]) -> BudgetRecord:
    """Return a power budget.

    Raises:
        ValueError, LookupError, TypeError: it can't be read.
    """
    try:
        record = codecs.BUDGET.load(row.budget)
    except InvalidFieldError as error:
        raise ValueError(str(error)) from None
    if (record.budget.budget_id, record.over_time_s) != (row.budget_id, row.over_time_s):
        found = f"{record.budget.budget_id!r}, over at {record.over_time_s}"
        raise ValueError(f"expected {row.budget_id!r}, over at {row.over_time_s}, found {found}")
    return record


def token_of(row: Row[Any]) -> Token:
    """Return a bearer token.

    Raises:
        ValueError, LookupError, TypeError: it can't be read.
    """
    patterns = codecs.PATTERNS.load(row.job_patterns), codecs.PATTERNS.load(row.host_patterns)
    grant = Grant(Scope(row.scope), *patterns)
    return Token(row.name, row.digest, grant, row.create_time_s, row.expire_time_s, row.revoke_time_s)


def _profile(stage: int, row: Row[Any]) -> StageProfile:
    by_key = dict(codecs.MEASUREMENTS.load(row.measurements))
    return StageProfile(
        stage=stage,
        clock_mhz=row.clock_mhz,
        measurements=by_key,
        blocking_power_w=row.blocking_power_w,
        blocking_power_se_w=row.blocking_power_se_w,
    )


def _iteration(row: Row[Any]) -> IterationRows:
    columns = IterationColumns(
        [row.iteration],
        [row.plan_version],
        [row.duration_s],
        [row.energy_j],
        [bool(row.is_regular)],
        [0],  # clock event reasons matter only when they arrive, and are not stored
    )
    return IterationRows(Coordinates(row.pipeline, row.stage, row.tensor), columns, closed_through=-1)
