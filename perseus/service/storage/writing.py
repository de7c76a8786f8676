"""Group commits: a list of entries becomes rows, and the rows become a few statements in one transaction.

Rows of a table are written together, whatever order they came in; only deletions divide a group, and later
entries are written after them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field

from sqlalchemy import Connection, Table, delete, func, literal, select, update
from sqlalchemy.engine.interfaces import DBAPICursor

from perseus.service.domain.ledger import EnergyHour, UncomparedHours
from perseus.service.domain.measured import Period, StageProfile
from perseus.service.domain.messages import frontier_to_proto, time_from_proto, timeline_to_proto
from perseus.service.domain.model import Clocks, Rank
from perseus.service.domain.records import (
    Counters,
    EndedRun,
    ForgetIterations,
    ForgetProfile,
    IterationRows,
    JobRecord,
    OfferRecord,
    ProfiledWork,
    Record,
    RecordedInputs,
    Registrations,
)
from perseus.service.storage import codecs, ledger_rows, schema
from perseus.service.storage import statements as to
from perseus.service.storage.codecs import UnstorableError, figure, figures, integer
from perseus.service.storage.statements import Row, Statements
from perseus.service.storage.store import (
    BudgetEntry,
    Entry,
    EventEntry,
    JobDeleted,
    JobEntry,
    NewRun,
    SessionEnded,
    SessionEntry,
    SlotPowerEntry,
    TelemetrySequence,
    TokenEntry,
    UnstorableEntryError,
)

_RunKey = tuple[str, int]
"""(job_id, run_number)."""

_DIGESTS_KEPT = 256
"""How many clocks' digests are remembered: all pipelines of a job have the same few."""


@dataclass(slots=True)
class _Group:
    """Rows to be written together; without iterations that are closed in the same group."""

    rows: dict[str, list[Row]] = field(default_factory=lambda: defaultdict(list))
    iterations: dict[_RunKey, list[Row]] = field(default_factory=lambda: defaultdict(list))
    closed_through: dict[_RunKey, int] = field(default_factory=dict)
    new_plans: set[tuple[_RunKey, str]] = field(default_factory=set)
    runs_with_new_plans: dict[_RunKey, None] = field(default_factory=dict)

    def take_iterations(self, run: _RunKey, record: IterationRows) -> None:
        rank, columns = record.rank, record.rows
        values = zip(
            columns.iteration,
            columns.plan_version,
            figures("iterations.duration_s", columns.duration_s),
            figures("iterations.energy_j", columns.energy_j),
            columns.is_regular,
            strict=True,
        )
        job_id, run_number = run
        pipeline, stage, tensor = rank.pipeline, rank.stage, rank.tensor
        closed, rows = record.closed_through, self.iterations[run]
        for iteration, version, duration_s, energy_j, is_regular in values:
            if iteration > closed:
                rows.append(
                    (
                        job_id, run_number, iteration, pipeline, stage, tensor, version, duration_s, energy_j,
                        int(is_regular),
                    )
                )  # fmt: skip
        self.closed_through[run] = closed

    def all_rows(self) -> Iterator[tuple[str, list[Row]]]:
        """Yield statements with their rows, in order."""
        for run, rows in self.iterations.items():
            closed = self.closed_through[run]
            self.rows[to.INSERT_ITERATION] += [row for row in rows if row[2] > closed]
            if closed >= 0:
                self.rows[to.CLOSE_ITERATIONS].append((*run, closed))
        self.rows[to.PRUNE_PLANS] += list(self.runs_with_new_plans)
        for name in to.ORDER:
            if found := self.rows.get(name):
                yield name, found


_FORGOTTEN: Mapping[type[Record], tuple[Table, ...]] = {
    ForgetIterations: (schema.open_iterations,),
    ForgetProfile: (schema.profiles, schema.profiled_work),
}
"""The tables whose rows of a run a record deletes."""


@dataclass(frozen=True, slots=True)
class _Forget:
    run: _RunKey
    tables: tuple[Table, ...]


_Step = _Group | JobDeleted | _Forget


class GroupWriter:
    """Writes groups of entries on one connection; `clock` is the wall clock."""

    def __init__(self, connection: Connection, clock: Callable[[], float]) -> None:
        self._connection = connection
        self._clock = clock
        self._statements = Statements(connection.dialect)
        # By run: the digests of plans known to be stored.
        self._plans: dict[_RunKey, set[str]] = defaultdict(set)
        # By the clocks' identity; the clocks are kept so that their identity is not reused.
        self._digests: dict[int, tuple[Clocks, tuple[str, str, str]]] = {}

    def write(self, entries: Sequence[Entry], commit_number: int) -> None:
        """Write all entries in the open transaction, or raise before anything is written.

        Raises:
            UnstorableEntryError: a record contains a value that could not be read back.
        """
        steps = self._steps(entries)
        with self._cursor() as cursor:
            self._execute(steps, cursor)
            self._statements.count_commit.run(cursor, [(commit_number,)])

    @contextmanager
    def _cursor(self) -> Iterator[DBAPICursor]:
        cursor = self._connection.connection.cursor()
        try:
            yield cursor
        finally:
            cursor.close()  # SQLite's file stays open as long as a cursor holds its last statement

    def _execute(self, steps: Iterable[_Step], cursor: DBAPICursor) -> None:
        for step in steps:
            match step:
                case _Group():
                    for name, rows in step.all_rows():
                        self._statements.by_name[name].run(cursor, rows)
                    for run in step.runs_with_new_plans:
                        found = self._statements.plan_digests.rows(cursor, run)
                        self._plans[run] = {digest for (digest,) in found}
                case JobDeleted():
                    self._delete(step)
                case _Forget((job_id, run_number), tables):
                    for table in tables:
                        of_run = table.c.job_id == job_id, table.c.run_number == run_number
                        self._connection.execute(delete(table).where(*of_run))

    def forget_plans(self) -> None:
        """Forget which plans are stored: they may have been pruned."""
        self._plans.clear()

    def telemetry_sequence(self, instance_id: str) -> int:
        """Return the highest sequence taken from an agent, 0 if none."""
        with self._cursor() as cursor:
            found = self._statements.telemetry_sequence.rows(cursor, (instance_id,))
        return int(found[0][0]) if found else 0

    def telemetry_principal(self, instance_id: str) -> str:
        """Return the principal of an agent's latest telemetry, "" if it is unknown."""
        with self._cursor() as cursor:
            found = self._statements.telemetry_sequence.rows(cursor, (instance_id,))
        return str(found[0][1] or "") if found else ""

    # ------------------------------------------------------------------ entries to rows

    def _steps(self, entries: Sequence[Entry]) -> list[_Step]:
        group = _Group()
        steps: list[_Step] = [group]
        for entry in entries:
            match entry:
                case JobEntry(job_id, run_number, record):
                    run = (job_id, run_number)
                    if isinstance(record, IterationRows):
                        # A job may continue at an iteration that it had reached before.
                        if record.closed_through < group.closed_through.get(run, -1):
                            steps.append(group := _Group())
                    elif (tables := _FORGOTTEN.get(type(record))) is not None:
                        steps += [_Forget(run, tables), group := _Group()]
                        continue
                    try:
                        self._take_record(group, run, record)
                    except UnstorableError as error:
                        raise UnstorableEntryError(job_id, run_number, str(error)) from None
                case EventEntry(job_id, run_number, event):
                    create_time_s = time_from_proto("create_time", event.create_time)
                    content = event.SerializeToString()
                    group.rows[to.INSERT_EVENT].append(
                        (job_id, run_number, event.sequence, create_time_s, event.type, content)
                    )
                case TelemetrySequence(instance_id, sequence, principal):
                    group.rows[to.UPSERT_TELEMETRY].append((instance_id, sequence, self._clock(), principal))
                case TokenEntry(token):
                    group.rows[to.UPSERT_TOKEN].append(
                        (
                            token.name,
                            token.digest,
                            token.grant.scope.value,
                            codecs.PATTERNS.dump(token.grant.job_patterns),
                            token.create_time_s,
                            token.expire_time_s,
                            token.revoke_time_s,
                            codecs.PATTERNS.dump(token.grant.host_patterns),
                        )
                    )
                case SessionEntry(session):
                    group.rows[to.UPSERT_SESSION].append(astuple(session))
                case SessionEnded(digest):
                    group.rows[to.DELETE_SESSION].append((digest,))
                case BudgetEntry(budget):
                    group.rows[to.UPSERT_BUDGET].append(
                        (budget.budget.budget_id, codecs.BUDGET.dump(budget), budget.over_time_s)
                    )
                case SlotPowerEntry(slot, lease_epoch, power, division):
                    texts = codecs.SLOT_POWER.dump(power), codecs.DIVISION.dump(division)
                    group.rows[to.UPSERT_SLOT_POWER].append((slot, lease_epoch, *texts))
                case NewRun(spec, run_number, create_time_s):
                    beginning = spec.job_id, run_number, create_time_s, self._spec(entry)
                    ended = [None] * len(schema.ENDED_COLUMNS)
                    row = (*beginning, codecs.NO_REGISTRATIONS, None, 0, None, 0, *ended)
                    group.rows[to.INSERT_RUN].append(row)
                case JobDeleted(job_id):
                    self._drop_plans(job_id)
                    steps += [entry, group := _Group()]
        return steps

    def _spec(self, entry: NewRun) -> str:
        try:
            return codecs.SPEC.dump(entry.spec)
        except UnstorableError as error:
            raise UnstorableEntryError(entry.spec.job_id, entry.run_number, str(error)) from None

    def _take_record(self, group: _Group, run: _RunKey, record: Record) -> None:
        rows = group.rows
        match record:
            case IterationRows():
                group.take_iterations(run, record)
            case JobRecord():
                version = integer("record.version", record.version)
                rows[to.UPDATE_RECORD].append(
                    (codecs.RECORD.dump(record), version, record.finish_time_s, *run)
                )
            case Counters():
                rows[to.UPSERT_COUNTERS].append((*run, codecs.COUNTERS.dump(record)))
            case EndedRun():
                rows[to.UPDATE_ENDED_RUN].append((*_ended_columns(record), *run))
            case Registrations(registrations):
                rows[to.UPDATE_REGISTRATIONS].append((codecs.REGISTRATIONS.dump(registrations), *run))
            case Rank():
                place = record.coordinates
                rows[to.UPSERT_RANK].append(
                    (*run, place.pipeline, place.stage, place.tensor, codecs.RANK.dump(record))
                )
            case OfferRecord():
                self._take_offer(group, run, record)
            case StageProfile(stage, clock_mhz, measurements, power_w, power_se_w):
                rows[to.UPSERT_PROFILE].append(
                    (
                        *run,
                        stage,
                        clock_mhz,
                        codecs.MEASUREMENTS.dump(list(measurements.items())),
                        None if power_w is None else figure("profile.blocking_power_w", power_w),
                        figure("profile.blocking_power_se_w", power_se_w),
                    )
                )
            case ProfiledWork(stage, key):
                rows[to.UPSERT_WORK].append((*run, stage, key))
            case Period():
                row = (*run, record.number, codecs.PERIOD.dump(record), int(record.stock is not None))
                rows[to.UPSERT_PERIOD].append(row)
            case RecordedInputs(document):
                rows[to.UPSERT_RECORDING].append((*run, document))
            case EnergyHour():
                rows[to.UPSERT_HOUR].append(ledger_rows.row_of(*run, record))
            case UncomparedHours(baseline_number):
                rows[to.UNCOMPARE_HOURS].append((*run, baseline_number))

    def _take_offer(self, group: _Group, run: _RunKey, record: OfferRecord) -> None:
        offer = record.offer
        digest, kind, content = self._dumped(offer.clocks)
        if digest not in self._plans.get(run, ()) and (run, digest) not in group.new_plans:
            group.new_plans.add((run, digest))
            group.runs_with_new_plans[run] = None
            group.rows[to.INSERT_PLAN].append((*run, digest, kind, content))
        start_iteration = integer("offer.start_iteration", offer.start_iteration)
        versions = codecs.STAGE_VERSIONS.dump(offer.stage_versions)
        group.rows[to.UPSERT_OFFER].append((*run, record.pipeline, versions, start_iteration, digest))

    def _dumped(self, clocks: Clocks) -> tuple[str, str, str]:
        known = self._digests.get(id(clocks))
        if known is None:
            if len(self._digests) >= _DIGESTS_KEPT:
                self._digests.clear()
            known = self._digests[id(clocks)] = (clocks, codecs.dump_clocks(clocks))
        return known[1]

    # ------------------------------------------------------------------ deleting

    def _delete(self, entry: JobDeleted) -> None:
        runs, coordinator = schema.runs.c, schema.coordinator
        used = self._connection.scalar(select(func.max(runs.version)).where(runs.job_id == entry.job_id))
        version = max(entry.version, used or 0)
        self._connection.execute(
            update(coordinator)
            .values(deleted_version=version)
            .where(coordinator.c.deleted_version < literal(version))
        )
        for table in schema.OF_RUNS:
            self._connection.execute(delete(table).where(table.c.job_id == entry.job_id))
        ledger_rows.archive_rows(self._connection, entry.job_id)
        self._drop_plans(entry.job_id)

    def _drop_plans(self, job_id: str) -> None:
        for run in [run for run in self._plans if run[0] == job_id]:
            del self._plans[run]


def _ended_columns(ended: EndedRun) -> list[bytes | None]:
    """Return the values of `schema.ENDED_COLUMNS`."""
    measured = ended.measured
    if measured is None:
        return [ended.job.SerializeToString(), None, None, None]
    frontier, timelines = measured.frontier, (measured.shown, measured.baseline)
    return [
        ended.job.SerializeToString(),
        None if frontier is None else frontier_to_proto(frontier).SerializeToString(),
        *(None if found is None else timeline_to_proto(found).SerializeToString() for found in timelines),
    ]
