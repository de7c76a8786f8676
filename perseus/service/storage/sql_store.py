"""The coordinator's durable state, in a SQL database of either engine.

Everything is written as a list of entries in one transaction. It is read back only at the start (the jobs'
latest runs), when an agent connects (its last sequence), when a client asks for events or for an earlier run,
and when a stage may have been profiled before.

`engines` opens the database, `migrating` brings it to the present schema, `writing`, `reading`, `pruning` use
it. One connection writes, two read and one claims GPUs, each in its own thread, one transaction after
another: no commit waits for the others. A read sees everything that was committed when it was requested.

A read that fails is a DatabaseUnreadableError (`domain.errors`), and the next one may succeed. A failure of
the writing connection is a StoreFailedError: nothing can be guaranteed from then on. Where a fence tells that
nobody else writes, its transaction is tried again before, on a new connection if need be: the number of
commits tells whether one was made whose answer was lost, and whether any was lost since.
"""

import asyncio
import random
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import structlog
from sqlalchemy import Connection, delete, insert, select, update

from perseus.rate_limited_log import RateLimitedLog
from perseus.retry import Retry
from perseus.service.domain.errors import (
    DatabaseUnavailableError,
    DatabaseUnreadableError,
    StoreFailedError,
)
from perseus.service.domain.gpu_claims import ClaimChanges, Gpu, Place
from perseus.service.domain.ledger import EnergyGroup, HourFilter
from perseus.service.domain.members import Slot
from perseus.service.domain.retention import Retention
from perseus.service.storage import gpu_claims, ledger_rows, membership, reading, schema
from perseus.service.storage.commit_markers import MAX_BOOTS_KEPT, Boot, History
from perseus.service.storage.engines import Opened, connect, explain
from perseus.service.storage.migrating import commit_number, create_state, data_missing, migrate
from perseus.service.storage.pruning import Pruner, Step
from perseus.service.storage.store import Entry, Pruned
from perseus.service.storage.writing import GroupWriter

log = structlog.get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

REPEAT_LIMIT_S = 30.0
"""How long a transaction is tried again. A lease that is lost meanwhile ends the coordinator before."""

_FIRST_DELAY_S, _MAX_DELAY_S = 0.02, 1.0

CLOSE_LIMIT_S = 5.0
"""How long a database that is closed may take for what it was asked before."""

_CLAIMS_IDLE_LIMIT_S = 3.0
"""Others, and their agents, wait for the locks of a coordinator that is cut off between claims and commit."""


def _read_method(
    query: Callable[Concatenate[Connection, P], T],
) -> Callable[Concatenate["SqlStore", P], Coroutine[Any, Any, T]]:
    """Return a method of the store that runs a query on the reading connection."""

    @wraps(query)
    async def read(store: "SqlStore", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await store._read(lambda connection: query(connection, *args, **kwargs))

    return read


class SqlStore:
    """Jobs by runs: profiles, offers, reports and events; and the acknowledged telemetry of each agent."""

    standbys = _read_method(reading.standbys)
    load_jobs = _read_method(reading.load_jobs)
    jobs_of_slots = _read_method(reading.jobs_of_slots)
    load_ended_run = _read_method(reading.load_ended_run)
    ended_jobs = _read_method(reading.ended_jobs)
    ended_frontier = _read_method(reading.ended_frontier)
    ended_timeline = _read_method(reading.ended_timeline)
    load_ranks = _read_method(reading.load_ranks)
    load_periods = _read_method(reading.load_periods)
    load_run = _read_method(reading.load_run)
    run_numbers = _read_method(reading.run_numbers)
    known_requests = _read_method(reading.known_requests)
    known_profiles = _read_method(reading.known_profiles)
    events = _read_method(reading.events)
    deleted_version = _read_method(reading.deleted_version)
    load_tokens = _read_method(reading.load_tokens)
    load_sessions = _read_method(reading.load_sessions)
    load_budgets = _read_method(reading.load_budgets)
    load_slot_powers = _read_method(reading.load_slot_powers)
    load_power_caps = _read_method(reading.load_power_caps)
    load_gpu_claims = _read_method(gpu_claims.load)

    def __init__(
        self,
        opened: Opened,
        reader: Opened,
        ledger_reader: Opened,
        claims: Opened | None = None,
        *,
        clock: Callable[[], float],
        fence: Slot | None,
    ) -> None:
        self._opened = opened
        self._fence = fence
        self._slot = fence.number if fence is not None else 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._reader = reader
        self._reader_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store-reader")
        self._ledger_reader = ledger_reader
        self._ledger_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store-ledger")
        self._claims = claims
        self._claims_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store-claims")
        self._is_closing = threading.Event()
        self._failures = RateLimitedLog(log)
        self._connection = opened.connection
        with self._connection.begin():
            self._check_fence(self._connection)
            is_new = migrate(self._connection, opened.name, self._slot)
            if is_new and fence is None:
                create_state(self._connection)
            number = commit_number(self._connection)
            if number is None:
                raise data_missing(opened.name, self._slot)
            self._commit_number = number
            self._history = _begin_boot(self._connection, self._commit_number)
        self._marker = self._history.marker(self._commit_number)
        self._writer = GroupWriter(self._connection, clock)
        self._failure: StoreFailedError | None = None
        self._has_failed = asyncio.Event()
        self._pruner = Pruner(is_of_fleet=self._slot == 0)

    @classmethod
    async def open(
        cls,
        database: Path | str,
        *,
        clock: Callable[[], float] = time.time,
        fence: Slot | None = None,
        connections: Sequence[Opened] = (),
    ) -> "SqlStore":
        """Open a database; create it if it doesn't exist, and migrate it if it has an older schema.

        Args:
            database: the path of a SQLite file, or postgresql://….
            clock: the wall clock.
            fence: the slot that is held, where others share the database: nothing is written after its loss.
            connections: those that `open_connections` has opened for the slot, if it has.

        Raises:
            DatabaseUnavailableError: it is not ours, in use, newer, lacks its data, or can't be created.
            StoreFailedError: the slot is lost already.
        """

        def open_here() -> SqlStore:
            slot, holder = (fence.number, fence.holder) if fence is not None else (0, "")
            opened = connections or open_connections(database, slot, holder)
            with ExitStack() as stack:
                for each in opened:
                    stack.callback(each.close)
                try:
                    store = cls(*opened, clock=clock, fence=fence)
                except opened[0].errors as error:
                    raise DatabaseUnavailableError(database=opened[0].name, cause=explain(error)) from None
                stack.pop_all()
            return store

        return await asyncio.to_thread(open_here)

    # ------------------------------------------------------------------ the state itself

    async def epoch(self) -> str:
        """Return the epoch of this database's state; it changes only when state was lost."""
        return self._history.epoch

    async def renew_epoch(self) -> str:
        """Begin another epoch, durably, because state is lost; return it."""
        return await self._run(self._renew_epoch)

    @property
    def lease_epoch(self) -> int:
        """The lease epoch that everything is written under; 0 without a fence."""
        return self._fence.lease_epoch if self._fence is not None else 0

    @property
    def commit_marker(self) -> str:
        """The marker of everything that is written so far: it reveals whether that is lost."""
        return self._marker

    def has_lost(self, commit_marker: str) -> bool:
        """Return whether a commit marker belongs to state that this database has lost."""
        return self._history.is_behind(commit_marker, self._commit_number)

    def instance_key(self, instance_id: str) -> str:
        """Return the secret key of the agent that is that instance."""
        return self._history.instance_key(instance_id)

    def _renew_epoch(self) -> str:
        epoch = uuid.uuid4().hex
        self._connection.execute(update(schema.coordinator).values(epoch=epoch))
        self._history = History(epoch, self._history.secret, self._history.boots)
        self._marker = self._history.marker(self._commit_number)
        return epoch

    # ------------------------------------------------------------------ writing

    async def write(self, entries: Sequence[Entry]) -> None:
        """Write all entries, or none; they are safe when this returns.

        Raises:
            UnstorableEntryError: an entry contains a value that could not be read back.
        """
        number = self._commit_number + 1
        await self._run(partial(self._writer.write, entries, number), number)

    async def change_gpu_claims(self, changes: ClaimChanges) -> dict[Gpu, tuple[int, Place]] | None:
        """Claim and release GPUs for the slot that is held; return whose those are that it wanted to claim.

        None if another coordinator has locked one of them, or the connection was cut: try again.
        """
        return await self._in_thread(self._claims_thread, partial(self._change_gpu_claims, changes))

    def _change_gpu_claims(self, changes: ClaimChanges) -> dict[Gpu, tuple[int, Place]] | None:
        assert self._claims is not None, "without a fence nobody else claims GPUs"
        connection = self._claims.connection
        try:
            with connection.begin():
                self._check_fence(connection)
                return gpu_claims.change(connection, self._slot, changes)
        except self._claims.errors as error:
            if not self._claims.may_repeat(error):
                raise StoreFailedError(database=self._claims.name, cause=explain(error)) from None
            self._failures.warning("claims of GPUs are tried again", cause=explain(error))
            return None

    async def prune(self, retention: Retention, now_s: float) -> Pruned:
        """Delete some of the data that retention no longer keeps at this wall-clock time: one small step."""
        find = partial(self._pruner.next_step, retention=retention, now_s=now_s)
        step = await self._read_ledger(find)
        if step is None:
            return Pruned(0, (), is_done=True)
        return await self._run(partial(self._prune, step))

    def _prune(self, step: Step) -> Pruned:
        row_count = self._connection.execute(step.statement).rowcount
        if not step.archived:
            return Pruned(row_count, (), is_done=False)
        self._writer.forget_plans()
        return Pruned(0, step.archived if row_count else (), is_done=False)

    # ------------------------------------------------------------------ reading

    async def ledger(self, wanted: HourFilter) -> list[EnergyGroup]:
        """Return sums over the hours that are wanted, by job, deletion, run and baseline.

        Those of months take seconds, so they have a connection of their own: lists and reports need not wait.
        """
        return await self._read_ledger(partial(ledger_rows.groups, wanted=wanted))

    async def telemetry_sequence(self, instance_id: str) -> int:
        """Return the highest sequence taken from an agent, 0 if none."""
        return await self._run(partial(self._writer.telemetry_sequence, instance_id))

    async def telemetry_principal(self, instance_id: str) -> str:
        """Return the principal of an agent's latest telemetry, "" if it is unknown."""
        return await self._run(partial(self._writer.telemetry_principal, instance_id))

    async def size_bytes(self) -> int:
        """Return the size of the database on disk, without its log."""
        query = self._opened.size_query
        return int(await self._read(lambda connection: connection.exec_driver_sql(query).scalar() or 0))

    async def watch(self) -> None:
        """Wait until any operation but a read fails, even one of another caller.

        Raises:
            StoreFailedError: the failure.
        """
        await self._has_failed.wait()
        assert self._failure is not None
        raise self._failure

    async def close(self) -> None:
        """Close the database; whatever was written stays.

        Raises:
            StoreFailedError: the writing connection does not answer.
        """

        def close_here() -> None:
            others = (
                (self._ledger_thread, self._ledger_reader),
                (self._reader_thread, self._reader),
                (self._claims_thread, self._claims),
            )
            close(others)
            # The last: only then does SQLite write its log back.
            if close([(self._thread, self._opened)]):
                cause = f"it has not answered for {CLOSE_LIMIT_S:g} s"
                raise StoreFailedError(database=self._opened.name, cause=cause)

        def close(connections: Sequence[tuple[ThreadPoolExecutor, Opened | None]]) -> bool:
            """Close them at once; return whether any did not answer what it was asked before."""
            before = {
                thread.submit(lambda: None): (thread, opened) for thread, opened in connections if opened
            }
            late = futures.wait(before, CLOSE_LIMIT_S).not_done
            for future in late:
                before[future][1].abort()
            futures.wait([thread.submit(opened.close) for thread, opened in before.values()])
            for thread, _ in connections:
                thread.shutdown(wait=False)
            return bool(late)

        self._is_closing.set()
        await asyncio.to_thread(close_here)

    async def _run(self, work: Callable[[], T], number: int | None = None) -> T:
        """Do work on the writing connection, in its thread and in one fenced transaction.

        `number` is that of the commit if `work` counts it; it must return None then.
        """
        return await self._in_thread(self._thread, partial(self._transact, work, number))

    def _transact(self, work: Callable[[], T], number: int | None) -> T:
        retry = Retry(
            _FIRST_DELAY_S, _MAX_DELAY_S, jitter=0.5, give_up_after_s=REPEAT_LIMIT_S, random=random.random
        )
        while True:
            try:
                with self._connection.begin():
                    self._check_fence(self._connection)
                    is_done = retry.failure_count > 0 and self._is_committed(number)
                    result = cast(T, None) if is_done else work()
                break
            except self._opened.errors as error:
                failure = StoreFailedError(database=self._opened.name, cause=explain(error))
                # Without a fence somebody else may have begun to write meanwhile.
                may_repeat = self._fence is not None and self._opened.may_repeat(error)
                delay_s = retry.failed(time.monotonic())
                if not may_repeat or retry.is_over(time.monotonic()) or self._is_closing.wait(delay_s):
                    raise failure from None
            self._failures.warning("a transaction is tried again", cause=str(failure))
            self._writer.forget_plans()  # what was written is rolled back
        if number is not None:
            self._commit_number, self._marker = number, self._history.marker(number)
        self._check_files()
        return result

    def _is_committed(self, number: int | None) -> bool:
        """Return whether a commit was made although its answer was lost.

        Raises:
            StoreFailedError: others were lost, or made by somebody else.
        """
        # A session of before that is about to commit holds the row until it has.
        found = self._connection.scalar(select(schema.coordinator.c.commit_number).with_for_update())
        if number is not None and found == number:
            return True
        if found != self._commit_number:
            cause = f"it has lost commits: expected {self._commit_number} of them, found {found}"
            raise StoreFailedError(database=self._opened.name, cause=cause)
        return False

    def _check_fence(self, connection: Connection) -> None:
        if self._fence is not None:
            membership.check_fence(connection, self._fence, self._opened.name)

    def _check_files(self) -> None:
        if (missing := self._opened.missing()) is not None:
            raise StoreFailedError(database=self._opened.name, cause=missing)

    async def _read(self, query: Callable[[Connection], T]) -> T:
        """Run a query on the reading connection; between commits on the writing one while the log is too
        long."""
        if self._opened.has_long_log():
            return await self._run(partial(query, self._connection))
        return await self._in_thread(self._reader_thread, partial(self._query, self._reader, query))

    async def _read_ledger(self, query: Callable[[Connection], T]) -> T:
        return await self._in_thread(self._ledger_thread, partial(self._query, self._ledger_reader, query))

    def _query(self, opened: Opened, query: Callable[[Connection], T]) -> T:
        is_repeated = False
        while True:
            try:
                with opened.connection.begin():
                    result = query(opened.connection)
                break
            except opened.errors as error:
                failure = StoreFailedError(database=opened.name, cause=explain(error))
            if is_repeated or not opened.connection.invalidated or self._is_closing.is_set():
                self._failures.warning("the database can't be read", cause=str(failure))
                raise DatabaseUnreadableError from failure
            is_repeated = True  # on a new connection: this one may have been cut long ago
        self._check_files()
        return result

    async def _in_thread(self, thread: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, work)
        except StoreFailedError as error:
            self._failure = error
            self._has_failed.set()
            raise


def open_connections(
    database: Path | str, slot: int = 0, holder: str = "", **limits_s: float
) -> list[Opened]:
    """Open a store's connections: to write, read and read the ledger, and for a slot's holder to claim GPUs.

    `limits_s`: further limits of each, as of `connect`.

    Raises:
        DatabaseUnavailableError: one of them can't be opened.
    """
    session = membership.session_of(holder) if holder else ""
    with ExitStack() as stack:
        opened = []
        own_limits_s: list[dict[str, float]] = [
            {"statement_limit_s": 0},  # a long commit is none that failed; locks have their own limit
            {},
            {},
            {"idle_limit_s": _CLAIMS_IDLE_LIMIT_S},
        ]
        for number, own in enumerate(own_limits_s if holder else own_limits_s[:-1]):
            is_read_only = number in (1, 2)
            name = "" if is_read_only else session
            each = connect(
                database, slot=slot, is_read_only=is_read_only, session=name, **{**limits_s, **own}
            )
            stack.callback(each.close)
            opened.append(each)
        stack.pop_all()
    return opened


def _begin_boot(connection: Connection, commit_number: int) -> History:
    """Record a coordinator's start on this database; return the database's history."""
    table = schema.boots
    earlier = [
        Boot(row.number, row.token, row.first_commit)
        for row in connection.execute(select(table).order_by(table.c.number))
    ]
    number = earlier[-1].number + 1 if earlier else 1
    latest = Boot(number, secrets.token_hex(8), commit_number)
    connection.execute(
        insert(table).values(number=latest.number, token=latest.token, first_commit=latest.first_commit)
    )
    connection.execute(delete(table).where(table.c.number <= number - MAX_BOOTS_KEPT))
    state = connection.execute(select(schema.coordinator.c.epoch, schema.coordinator.c.secret)).one()
    return History(state.epoch, state.secret, (*earlier, latest)[-MAX_BOOTS_KEPT:])
