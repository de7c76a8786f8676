"""The jobs' latest runs: their state machines are fed, and what they want is carried out.

What a machine returns is handed to the writer (`writer.py`): first the records are stored, and only then
anything leaves for an agent, a watcher or the caller, in the order in which the machine gave it.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import structlog

from perseus.service.domain.commands import (
    AcceptRank,
    Announce,
    Command,
    EndStream,
    FindProfile,
    ReportIteration,
    SendOffer,
    SlowPlan,
    Solve,
    Store,
)
from perseus.service.domain.errors import (
    CoordinatorError,
    JobNotFoundError,
    JobUnreadableError,
    LeaseExpiredError,
    cut,
)
from perseus.service.domain.events import JobEvent
from perseus.service.domain.inputs import EpochRenewed, Input, ProfileFound, Solved, SolveFailed, Tick
from perseus.service.domain.model import Rank
from perseus.service.domain.records import JobRecord, OfferRecord, StoredJob, UnreadableJob
from perseus.service.job.machine import JobMachine
from perseus.service.job.rules import Rules
from perseus.service.shell.ports import AgentPort
from perseus.service.shell.solving import SolverPool
from perseus.service.shell.watching import Watcher
from perseus.service.shell.writer import Writer
from perseus.service.storage.store import Entry, JobEntry, JobStore
from perseus.solver import Pipeline, SolverError

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class LiveRun:
    """The latest run of a job; earlier ones have ended, and are in the store."""

    machine: JobMachine
    watchers: set[Watcher] = field(default_factory=set)

    @property
    def job_id(self) -> str:
        """Of the job."""
        return self.machine.spec.job_id

    @property
    def number(self) -> int:
        """Which run of the job it is, from 1."""
        return self.machine.run_number


class LiveRuns:
    """The latest run of every job. Nothing here waits but for the store.

    Attributes:
        epoch: of the coordinator's state; known once the runs are loaded.
        rules: what the operator has set.
        ports: the ways to the agents, by instance.
        unreadable: jobs whose latest run can't be read from the store; nothing but deleting them is possible.
    """

    def __init__(self, store: JobStore, writer: Writer, solver: SolverPool, rules: Rules) -> None:
        self.epoch = ""
        self.rules = rules
        self.ports: dict[str, AgentPort] = {}
        self.unreadable: dict[str, UnreadableJob] = {}
        self._store = store
        self._writer = writer
        self._solver = solver
        self._runs: dict[str, LiveRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def load(self) -> None:
        """Load what is stored, and go on with it."""
        self.epoch = await self._store.epoch()
        for stored in await self._store.load_jobs():
            self.load_run(stored)
        log.info(
            "jobs loaded", job_count=len(self._runs), unreadable_count=len(self.unreadable), epoch=self.epoch
        )

    def load_run(self, stored: StoredJob | UnreadableJob) -> None:
        """Go on with the latest run of a job; without it, if it can't be."""
        if isinstance(stored, StoredJob):
            try:
                machine, commands = self.restored(stored)
            except Exception as error:
                log.exception("stored job can't be restored", job_id=stored.spec.job_id)
                cause = cut(f"{type(error).__name__}: {error}")
                stored = UnreadableJob(stored.spec.job_id, stored.run_number, cause)
            else:
                self._runs[stored.spec.job_id] = run = LiveRun(machine)
                self._perform(run, commands)
                return
        log.error(
            "stored job can't be read: it stays out until it is deleted",
            job_id=stored.job_id,
            run_number=stored.run_number,
            cause=stored.cause,
        )
        self.unreadable[stored.job_id] = stored

    def renew(self, epoch: str) -> None:
        """Begin a new epoch: state is lost."""
        self.epoch = epoch
        for run in self._runs.values():
            self.handle(run, EpochRenewed(epoch))

    async def close(self) -> None:
        """Drop what is being solved."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

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
            JobNotFoundError: there is none.
            JobUnreadableError: there is one, but it can't be read.
        """
        self.check_readable(job_id)
        try:
            return self._runs[job_id]
        except KeyError:
            raise JobNotFoundError(job_id=job_id) from None

    def check_readable(self, job_id: str) -> None:
        """Refuse a job that can't be read.

        Raises:
            JobUnreadableError: it is one.
        """
        if (job := self.unreadable.get(job_id)) is not None:
            raise JobUnreadableError(job_id=job_id, run_number=job.run_number, cause=job.cause)

    def forget(self, run: LiveRun) -> None:
        """Forget a job."""
        del self._runs[run.job_id]

    def restored(self, stored: StoredJob) -> tuple[JobMachine, list[Command]]:
        """Return the machine of a stored run, and what it wants done to go on."""
        return JobMachine.restore(stored, self.rules, self.epoch, time.monotonic(), time.time())

    # ------------------------------------------------------------------ feeding

    def begin(
        self, machine: JobMachine, commands: Iterable[Command], entries: Iterable[Entry]
    ) -> asyncio.Future[None]:
        """Begin a run, the latest of its job from now on. The future is done when it is stored."""
        self._runs[machine.spec.job_id] = run = LiveRun(machine)
        return self._perform(run, commands, entries)

    def handle(self, run: LiveRun, event: Input, entries: Iterable[Entry] = ()) -> asyncio.Future[None]:
        """Let a run take an input. The future is done when what follows is stored, with entries, and done.

        Raises:
            CoordinatorError: the run refuses the input (`JobMachine.handle`); nothing is stored.
        """
        return self._perform(run, run.machine.handle(event, time.monotonic(), time.time()), entries)

    def tick(self) -> None:
        """Let leases run out."""
        now_s = time.monotonic()
        for run in self._runs.values():
            self._tick(run, now_s)

    def tick_run(self, run: LiveRun) -> None:
        """Let a run's leases run out: they may have since the last tick."""
        self._tick(run, time.monotonic())

    def _tick(self, run: LiveRun, now_s: float) -> None:
        deadline_s = run.machine.next_deadline_s()
        if deadline_s is not None and deadline_s <= now_s:
            self.handle(run, Tick())

    # ------------------------------------------------------------------ carrying out

    def _perform(
        self, run: LiveRun, commands: Iterable[Command], entries: Iterable[Entry] = ()
    ) -> asyncio.Future[None]:
        """Store what is to be stored; then do the rest. The future is done after both."""
        to_store = list(entries)
        then: list[Callable[[], None]] = []
        is_job_changed = False
        for command in commands:
            match command:
                case Store(record):
                    to_store.append(JobEntry(run.job_id, run.number, record))
                    is_job_changed |= isinstance(record, JobRecord | OfferRecord | Rank)
                case Announce(happening):
                    event = JobEvent(run.job_id, run.number, time.time(), happening)
                    to_store.append(event)
                    then.append(lambda event=event: self._publish(run, event))  # type: ignore[misc]
                case _:
                    then.append(lambda command=command: self._do(run, command))  # type: ignore[misc]
        if is_job_changed:
            then.append(lambda: self._publish_job(run))
        return self._writer.later(to_store, then)

    def _do(self, run: LiveRun, command: Command) -> None:
        match command:
            case AcceptRank(rank, instance_id):
                if port := self.ports.get(instance_id):
                    port.accept_rank(run.job_id, rank, run.machine.order(rank.stage))
            case SendOffer(rank, instance_id, offer):
                if port := self.ports.get(instance_id):
                    port.offer(run.job_id, rank, offer)
            case EndStream(instance_id):
                if port := self.ports.get(instance_id):
                    port.end(LeaseExpiredError(instance_id=instance_id, lease_s=self.rules.lease_s))
            case ReportIteration(summary):
                for watcher in run.watchers:
                    watcher.tell(summary)
            case FindProfile(keys):
                self._begin(self._find_profile(run, keys))
            case Solve(problem, slow):
                self._begin(self._solve(run, problem, slow))

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _publish(self, run: LiveRun, event: JobEvent) -> None:
        happening = event.happening
        log.info("job event", job_id=event.job_id, type=happening.type.name, message=happening.message)
        for watcher in run.watchers:
            watcher.tell(event)

    def _publish_job(self, run: LiveRun) -> None:
        for watcher in run.watchers:
            watcher.change_job()

    async def _find_profile(self, run: LiveRun, keys: Sequence[str]) -> None:
        """Give a run what is known of its stages' work."""
        await self._writer.flush()
        found = tuple(await self._store.known_profiles(keys))
        if found and self._runs.get(run.job_id) is run:
            self.handle(run, ProfileFound(found))

    async def _solve(self, run: LiveRun, problem: Pipeline, slow: SlowPlan | None) -> None:
        answer: Solved | SolveFailed
        try:
            answer = Solved(await self._solver.solve(problem, slow=slow))
        except (SolverError, CoordinatorError) as error:
            answer = SolveFailed(str(error))
        if self._runs.get(run.job_id) is run:
            self.handle(run, answer)
