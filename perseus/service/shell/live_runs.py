"""The jobs' latest runs: their state machines get their inputs here, and their commands are carried out.

A machine's commands go to the writer (`writer.py`): it first stores the records, and only then does anything
leave for an agent, a watcher or the caller, in the machine's order.

Faults are contained. If an input, action, solve, view or restoration of a run raises an exception, only that
run is quarantined (`job/quarantine.py`); other runs, streams and the process itself are unaffected. Only a
store failure ends more than one run.

A run that has ended gives up its machine once its end is stored and none of its ranks is served any more: a
snapshot takes the machine's place.
"""

import asyncio
import gc
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import structlog

from perseus.service.domain.commands import (
    AcceptRank,
    Announce,
    Command,
    DropSolve,
    EndStream,
    FindProfile,
    Refine,
    RefuseRank,
    ReportIteration,
    SendMaxClock,
    SendOffer,
    Solve,
    Store,
)
from perseus.service.domain.errors import (
    CoordinatorError,
    JobNotFoundError,
    JobQuarantinedError,
    JobUnreadableError,
    LeaseExpiredError,
)
from perseus.service.domain.figures import RunFigures
from perseus.service.domain.inputs import (
    EpochRenewed,
    Input,
    TelemetryArrived,
    Tick,
)
from perseus.service.domain.ledger import EnergyHour, Rates
from perseus.service.domain.members import ALONE, Fleet
from perseus.service.domain.model import FaultyPart, Rank
from perseus.service.domain.records import (
    EndedRun,
    JobRecord,
    OfferRecord,
    RecordedInputs,
    StoredJob,
    UnreadableJob,
)
from perseus.service.domain.snapshot import Fault, RunSnapshot
from perseus.service.domain.specification import JobSpec
from perseus.service.fleet.ledger import priced
from perseus.service.job import quarantine, views
from perseus.service.job.machine import JobMachine
from perseus.service.job.recording import Recording, Restored
from perseus.service.job.rules import Rules
from perseus.service.job.run import Run
from perseus.service.shell.job_clock import JobClock
from perseus.service.shell.live_run import LiveRun, Machine
from perseus.service.shell.ports import AgentPort
from perseus.service.shell.run_tasks import RunTasks
from perseus.service.shell.writer import Work, Writer
from perseus.service.solving.worker_pool import WorkerPool
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import Entry, EventEntry, JobEntry
from perseus.v1 import event_pb2, job_pb2

Result = TypeVar("Result")
Made = TypeVar("Made")

log = structlog.get_logger(__name__)


_SHOWN = (JobRecord, OfferRecord, Rank)
"""Records that a view of the job shows."""

_LARGE_SIZE = 4096
"""Ranks plus computations; making a machine for fewer takes tens of milliseconds at most."""

_MAX_RECORDED_BYTES = 64 * 2**20
"""Bound on the recordings of all runs together, roughly."""

_KEPT_MEASURED = 16
"""How many ended runs keep their latest measurements and their frontier."""

T = TypeVar("T")


def _recorded(recording: Recording | None, fault: Fault) -> list[Command]:
    """Return the record that stores a run's inputs for the analysis of a fault, if they were recorded."""
    if recording is None or recording.beginning is None:
        return []
    try:
        return [Store(RecordedInputs(recording.dump(part=fault.part, error=fault.error)))]
    except Exception as error:  # an aid to analysis, and no more
        log.error("a run's inputs can't be stored", exc_info=error)
        return []


def _made_in_one(make: Callable[[], Made]) -> Made:
    """Make very many objects without garbage collection: a pass over them would stop the loop."""
    gc.disable()
    try:
        return make()
    finally:
        gc.enable()


class LiveRuns:
    """The latest run of every job.

    Attributes:
        epoch: epoch of the coordinator's state; known once the runs are loaded.
        fleet: where jobs of other slots are served.
        rules: the operator's settings.
        clock: the jobs' clock.
        ports: the ports of the agents, by instance.
        fault_counts: how many faults of runs there were since the start, by the part that failed.
        unreadable: jobs whose latest run can't be read from the store; they can only be deleted.
    """

    def __init__(
        self,
        store: SqlStore,
        writer: Writer,
        solver: WorkerPool,
        rules: Rules,
        clock: JobClock,
        rates_at: Callable[[str, float], Rates],
        fleet: Fleet = ALONE,
    ) -> None:
        """`rates_at`: the rates of a job's energy at a time of the wall clock."""
        self.epoch = ""
        self.fleet = fleet
        self.rules = rules
        self.clock = clock
        self.ports: dict[str, AgentPort] = {}
        self.fault_counts: Counter[FaultyPart] = Counter()
        self.unreadable: dict[str, UnreadableJob] = {}
        self._store = store
        self._writer = writer
        writer.quarantine_unstorable = self._quarantine_unstorable
        self._tasks = RunTasks(self, store, writer, solver)
        self._rates_at = rates_at
        self._runs: dict[str, LiveRun] = {}
        # Runs that may have a deadline: an ended one has none, and costs nothing.
        self._ticking: set[LiveRun] = set()
        # For each follower of all jobs: the jobs that changed since it last read them.
        self._followers: list[set[str]] = []
        self._making = asyncio.Lock()
        # The latest runs to have ended: memory keeps more of them than the store.
        self._just_ended: deque[LiveRun] = deque()

    async def load(self) -> None:
        """Load what is stored, and continue from it."""
        self.epoch = await self._store.epoch()
        for stored in await self._store.load_jobs():
            self.load_run(stored)
            await asyncio.sleep(0)  # many jobs take longer than the coordinator's lease among others may wait
        log.info(
            "jobs loaded", job_count=len(self._runs), unreadable_count=len(self.unreadable), epoch=self.epoch
        )

    def load_run(self, stored: StoredJob | RunSnapshot | UnreadableJob) -> None:
        """Continue with the latest run of a job, or note that it can't be read."""
        if isinstance(stored, RunSnapshot):
            stored.job.epoch = self.epoch
            self._runs[stored.spec.job_id] = LiveRun(stored)
            self._note_change(stored.spec.job_id)
        elif isinstance(stored, UnreadableJob):
            log.error(
                "stored job can't be read: it is unavailable until it is deleted",
                job_id=stored.job_id,
                run_number=stored.run_number,
                cause=stored.cause,
            )
            self.unreadable[stored.job_id] = stored
        else:
            self._load(stored)

    def renew(self, epoch: str) -> None:
        """Begin a new epoch because state is lost."""
        self.epoch = epoch
        for run in self._runs.values():
            self.handle(run, EpochRenewed(epoch))

    def _load(self, stored: StoredJob) -> None:
        machine: Machine
        now_s, wall_time_s = self.clock.now_s(), time.time()
        try:
            machine, commands = self._restored(stored)
        except Exception as error:
            machine, commands = self._put_at_stock(stored, FaultyPart.STORED_STATE, error)
            recording = Recording(Restored(stored, self.rules, self.epoch, now_s, wall_time_s))
            commands = [*_recorded(recording, Fault.of(FaultyPart.STORED_STATE, error)), *commands]
        self._runs[stored.spec.job_id] = run = LiveRun(
            machine,
            stored.record,
            stored.record,
            {rank.coordinates: rank for rank in stored.ranks},
            stored.last_sequence,
        )
        self._note_change(run.job_id)
        self._perform(run, commands)

    async def close(self) -> None:
        """Cancel all solves."""
        await self._tasks.close()

    # ------------------------------------------------------------------ the runs

    def __iter__(self) -> Iterator[LiveRun]:
        return iter(self._runs.values())

    @property
    def job_ids(self) -> list[str]:
        """Identifiers of all jobs, in order."""
        return sorted(self._runs)

    def get(self, job_id: str) -> LiveRun | None:
        """Return the latest run of a job, if there is one."""
        return self._runs.get(job_id)

    def find(self, job_id: str) -> LiveRun:
        """Return the latest run of a job.

        Raises:
            JobNotFoundError: there is no such job.
            JobUnreadableError: its latest run can't be read.
            ServedElsewhereError: another coordinator serves it.
        """
        self.fleet.check_job(job_id)
        self.check_readable(job_id)
        try:
            return self._runs[job_id]
        except KeyError:
            raise JobNotFoundError(job_id=job_id) from None

    def check_readable(self, job_id: str) -> None:
        """Check that a job can be read.

        Raises:
            JobUnreadableError: it can't.
        """
        if (job := self.unreadable.get(job_id)) is not None:
            raise JobUnreadableError(job_id=job_id, run_number=job.run_number, cause=job.cause)

    def forget(self, run: LiveRun) -> None:
        """Drop a job."""
        del self._runs[run.job_id]
        self._note_change(run.job_id)

    @contextmanager
    def changes(self) -> Iterator[set[str]]:
        """Yield a set that collects the jobs that changed, came or went; its reader empties it."""
        changed: set[str] = set()
        self._followers.append(changed)
        try:
            yield changed
        finally:
            self._followers = [each for each in self._followers if each is not changed]

    def _note_change(self, job_id: str) -> None:
        for changed in self._followers:
            changed.add(job_id)

    def _restored(self, stored: StoredJob) -> tuple[JobMachine, list[Command]]:
        """Return the machine of a stored run, and its first commands."""
        return JobMachine.restore(stored, self.rules, self.epoch, self.clock.now_s(), time.time())

    async def made(self, spec: JobSpec, make: Callable[[], Made]) -> Made:
        """Make something whose size grows with the job; for a large job in a thread, while the loop runs on.

        Only one thread at a time: it takes turns with the loop, and more would delay the loop's turns.
        """
        if spec.size < _LARGE_SIZE:
            return make()
        async with self._making:
            return await asyncio.to_thread(_made_in_one, make)

    # ------------------------------------------------------------------ feeding

    def begin(self, machine: JobMachine, commands: Iterable[Command], entries: Iterable[Entry]) -> Work:
        """Begin a run, the latest of its job from now on. Await the result to know that it is stored."""
        before = self._runs.get(machine.spec.job_id)
        if before is not None and isinstance(before.machine, JobMachine):  # some rank is still served
            ended = self.read(before, views.ended, lambda snapshot: EndedRun(snapshot.job))
            entries = [JobEntry(before.job_id, before.number, ended), *entries]
        self._runs[machine.spec.job_id] = run = LiveRun(machine)
        return self._perform(run, commands, entries)

    def handle(
        self,
        run: LiveRun,
        event: Input,
        entries: Iterable[Entry] = (),
        then: Iterable[Callable[[], None]] = (),
    ) -> Work:
        """Give a run an input; store its records, with `entries`, and carry out its commands.

        `then`: more actions to do once everything is stored. Await the result to wait for all of this.

        Raises:
            CoordinatorError: the run refuses the input (`JobMachine.handle`); nothing is stored. A
                quarantined run refuses too, if it can't handle this input.
        """
        try:
            commands = self._take(run, event)
        except CoordinatorError:
            raise
        except Exception as error:
            self.quarantine(run, FaultyPart.MACHINE, error)
            commands = self._take(run, event)
        return self._perform(run, commands, entries, then)

    def handle_telemetry(
        self, run: LiveRun, events: Sequence[TelemetryArrived]
    ) -> list[CoordinatorError | None]:
        """Give a run batches that arrived together, like `handle`; return why each is refused, or None."""
        answers: list[CoordinatorError | None] = []
        commands: list[Command] = []
        try:
            if isinstance(run.machine, JobMachine):
                now_s, wall_time_s = self.clock.now_s(), time.time()
                for answer in run.machine.handle_telemetry(events, now_s, wall_time_s):
                    if isinstance(answer, CoordinatorError):
                        answers.append(answer)
                    else:
                        answers.append(None)
                        commands += answer
        except Exception as error:
            self._perform(run, commands)
            self.quarantine(run, FaultyPart.MACHINE, error)
        else:
            if commands:
                self._perform(run, commands)
        for event in events[len(answers) :]:  # the run has no machine (any more)
            try:
                self.handle(run, event)
            except CoordinatorError as error:
                answers.append(error)
            else:
                answers.append(None)
        return answers

    def _take(self, run: LiveRun, event: Input) -> list[Command]:
        now_s, wall_time_s = self.clock.now_s(), time.time()
        if isinstance(run.machine, JobMachine):
            return run.machine.handle(event, now_s, wall_time_s)
        run.machine, commands = quarantine.handle(run.machine, event, now_s, wall_time_s)
        return commands

    def read(
        self,
        run: LiveRun,
        ask: Callable[[Run], T],
        otherwise: Callable[[RunSnapshot], T],
        part: FaultyPart = FaultyPart.VIEW,
    ) -> T:
        """Return a machine's answer, or the snapshot's if the run no longer has a machine.

        Raises:
            CoordinatorError: there is no answer.
        """
        if isinstance(run.machine, JobMachine):
            try:
                return ask(run.machine.run)
            except CoordinatorError:
                raise
            except Exception as error:
                self.quarantine(run, part, error)
        assert isinstance(run.machine, RunSnapshot)
        return otherwise(run.machine)

    def job(self, run: LiveRun, *, is_full: bool) -> job_pb2.Job:
        """Return a run as clients see it; without the details that grow with its size unless `is_full`."""
        job = self.read(
            run,
            partial(views.job, is_full=is_full),
            lambda snapshot: snapshot.job if is_full else views.without_details(snapshot.job),
        )
        job.thinned_batch_count = run.thinned_count
        return job

    def figures(self, run: LiveRun) -> RunFigures:
        """Return measured figures of a run that clients don't see; empty ones without a machine."""
        return self.read(run, views.figures, lambda _: RunFigures())

    def tick(self) -> None:
        """Let leases expire, and drop the largest recordings while all together are too large."""
        now_s = self.clock.now_s()
        self._bound_recordings()
        for run in [*self._ticking]:
            if self._runs.get(run.job_id) is not run or self._deadline_s(run) is None:
                self._ticking.discard(run)  # until something happens to it
            else:
                self._tick(run, now_s)

    def _bound_recordings(self) -> None:
        found = [
            run.machine.recording
            for run in self._runs.values()
            if isinstance(run.machine, JobMachine) and run.machine.recording is not None
        ]
        excess_bytes = sum(each.size_bytes for each in found) - _MAX_RECORDED_BYTES
        if excess_bytes > 0:
            for largest in sorted(found, key=lambda each: each.size_bytes, reverse=True):
                excess_bytes -= largest.size_bytes
                largest.drop()
                if excess_bytes <= 0:
                    break

    def tick_run(self, run: LiveRun) -> None:
        """Expire a run's leases that have run out since the last tick."""
        self._tick(run, self.clock.now_s())

    def _tick(self, run: LiveRun, now_s: float) -> None:
        deadline_s = self._deadline_s(run)
        if deadline_s is not None and deadline_s <= now_s:
            self.handle(run, Tick())

    def _deadline_s(self, run: LiveRun) -> float | None:
        return self.read(run, lambda state: state.next_deadline_s(), lambda _: None, FaultyPart.MACHINE)

    # ------------------------------------------------------------------ faults

    def quarantine(self, run: LiveRun, part: FaultyPart, error: Exception) -> None:
        """Quarantine a run: carry out its earlier commands, then send its ranks to stock."""
        machine = run.machine
        if isinstance(machine, RunSnapshot):
            self._note_fault(run.job_id, run.number, part, error)
            return
        record = run.record
        if part is FaultyPart.STORING and record is not None and run.stored_record is not None:
            # The unstorable record may be the latest. Its versions are still used up.
            record = replace(run.stored_record, version=record.version)
        known = StoredJob(
            spec=machine.spec,
            run_number=machine.run_number,
            create_time_s=machine.create_time_s,
            registrations=machine.registrations,
            record=record,
            ranks=tuple(run.ranks.values()),
            offers=(),
            profiles=(),
            periods=tuple(machine.run.log.periods),
            open_rows=(),
            last_sequence=run.last_sequence,
            counters=machine.run.counters,
        )
        if run.solving is not None:
            run.solving.cancel()
        run.machine, commands = self._put_at_stock(known, part, error)
        run.incarnation += 1
        self._perform(run, [*_recorded(machine.recording, Fault.of(part, error)), *commands])

    def _quarantine_unstorable(
        self, job_id: str, run_number: int, error: Exception
    ) -> CoordinatorError | None:
        """Implement `Writer.quarantine_unstorable`."""
        run = self._runs.get(job_id)
        is_new = run is not None and run.number == run_number and isinstance(run.machine, JobMachine)
        if run is not None and is_new:
            self.quarantine(run, FaultyPart.STORING, error)
        elif run is not None:
            self._note_fault(job_id, run_number, FaultyPart.STORING, error)
        return (
            JobQuarantinedError(job_id=job_id, cause=Fault.of(FaultyPart.STORING, error)) if is_new else None
        )

    def _put_at_stock(
        self, known: StoredJob, part: FaultyPart, error: Exception
    ) -> tuple[RunSnapshot, list[Command]]:
        self._note_fault(known.spec.job_id, known.run_number, part, error)
        return quarantine.quarantine(known, Fault.of(part, error), self.rules, self.epoch, time.time())

    def _note_fault(self, job_id: str, run_number: int, part: FaultyPart, error: Exception) -> None:
        self.fault_counts[part] += 1
        log.error("job quarantined", job_id=job_id, run_number=run_number, part=part.value, exc_info=error)

    async def revive(self, run: LiveRun) -> None:
        """Give a quarantined run a machine again, restored from what is stored.

        Raises:
            JobQuarantinedError: the restoration fails, too.
            JobUnreadableError: the stored run can't be read.
        """
        quarantined = run.machine
        if run.solving is not None:
            await asyncio.wait([run.solving])
        await self._writer.flush()
        stored = await self._store.load_run(run.job_id, run.number)
        if run.machine is not quarantined or stored is None:  # another request was faster, or it is deleted
            return
        if isinstance(stored, UnreadableJob):
            raise JobUnreadableError(job_id=run.job_id, run_number=run.number, cause=stored.cause)
        try:
            run.machine, commands = self._restored(stored)
        except Exception as error:
            self._note_fault(run.job_id, run.number, FaultyPart.STORED_STATE, error)
            cause = Fault.of(FaultyPart.STORED_STATE, error)
            raise JobQuarantinedError(job_id=run.job_id, cause=cause) from None
        run.incarnation += 1
        log.info("job resumed from quarantine", job_id=run.job_id, run_number=run.number)
        self._perform(run, commands)

    # ------------------------------------------------------------------ carrying out

    def _perform(
        self,
        run: LiveRun,
        commands: Iterable[Command],
        entries: Iterable[Entry] = (),
        more: Iterable[Callable[[], None]] = (),
    ) -> Work:
        """Store the records among the commands; then carry out the rest."""
        to_store = list(entries)
        then: list[Callable[[], None]] = []
        publishing: list[Callable[[], None]] = []  # after all offers: each is a log line
        is_job_changed = False
        end: EndedRun | None = None
        job_id, number = run.job_id, run.number
        for command in commands:
            match command:
                case Store(EnergyHour() as hour):
                    to_store.append(JobEntry(job_id, number, priced(hour, partial(self._rates_at, job_id))))
                case Store(record):
                    to_store.append(JobEntry(job_id, number, record))
                    if isinstance(record, EndedRun):
                        end = record
                    elif isinstance(record, _SHOWN):
                        is_job_changed = True
                        if isinstance(record, Rank):
                            run.ranks[record.coordinates] = record
                        elif isinstance(record, JobRecord):
                            run.record = record
                            then.append(partial(setattr, run, "stored_record", record))
                case Announce(event):
                    run.last_sequence = event.sequence
                    run.event_counts[event.type] += 1
                    to_store.append(EventEntry(job_id, number, event))
                    publishing.append(partial(self._publish, run, event))
                case ReportIteration() if not run.watchers:
                    pass
                case _:
                    then.append(partial(self._do, run, run.incarnation, command))
        then += publishing
        if is_job_changed:
            then.append(partial(self._publish_job, run))
        if to_store or then:
            self._note_change(job_id)
        then.extend(more)
        if end is not None:
            then.append(partial(self._drop_machine, run, end))
        self._ticking.add(run)
        # A failing action quarantines its own run, and affects nothing else.
        return self._writer.later(to_store, then, partial(self.quarantine, run, FaultyPart.ACTION))

    def _drop_machine(self, run: LiveRun, end: EndedRun) -> None:
        """Replace the machine of an ended run by a snapshot, and trim those of runs that ended before."""
        if not (isinstance(run.machine, JobMachine) and run.machine.record.has_finished):
            return
        run.machine = views.snapshot(run.machine.run, end)
        run.ranks.clear()
        self._just_ended.append(run)
        if len(self._just_ended) > _KEPT_MEASURED:
            oldest = self._just_ended.popleft()
            assert isinstance(oldest.machine, RunSnapshot)
            oldest.machine = replace(oldest.machine, measured=None)
            oldest.rebalancing = None

    def _do(self, run: LiveRun, incarnation: int, command: Command) -> None:
        if run.incarnation != incarnation:
            return  # The run was quarantined or revived since: its earlier commands are void.
        machine = run.machine
        match command:
            case AcceptRank(rank, instance_id, max_clock):
                if (port := self.ports.get(instance_id)) and isinstance(machine, JobMachine):
                    order = machine.run.schedule.orders[rank.stage]
                    port.accept_rank(run.job_id, rank, order, max_clock)
            case SendMaxClock(rank, instance_id, max_clock):
                if port := self.ports.get(instance_id):
                    port.limit_rank(run.job_id, rank, max_clock)
            case SendOffer(rank, instance_id, offer):
                if port := self.ports.get(instance_id):
                    port.offer(run.job_id, rank, offer)
            case RefuseRank(rank, instance_id, error, max_clock):
                if port := self.ports.get(instance_id):
                    port.refuse_rank(run.job_id, rank, error, max_clock)
            case EndStream(instance_id):
                if port := self.ports.get(instance_id):
                    port.end(LeaseExpiredError(instance_id=instance_id, lease_s=self.rules.lease_s))
            case ReportIteration(summary):
                for watcher in run.watchers:
                    watcher.push(summary)
            case FindProfile(keys):
                self._tasks.find_profile(run, machine, keys)
            case Solve():
                self._tasks.solve(run, machine, command)
            case Refine(refinement):
                self._tasks.refine(run, machine, refinement)
            case DropSolve():
                if run.solving is not None:
                    run.solving.cancel()

    def _publish(self, run: LiveRun, event: event_pb2.JobEvent) -> None:
        kind = event_pb2.JobEventType.Name(event.type).removeprefix("JOB_EVENT_TYPE_")
        log.info("job event", job_id=run.job_id, type=kind, message=event.message)
        for watcher in run.watchers:
            watcher.push(event)

    def _publish_job(self, run: LiveRun) -> None:
        for watcher in run.watchers:
            watcher.change_job()

    def is_awaiting(self, run: LiveRun, machine: Machine) -> bool:
        """Return whether the machine that asked for something still belongs to the run."""
        return self._runs.get(run.job_id) is run and run.machine is machine
