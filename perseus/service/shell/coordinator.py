"""The coordinator itself: the jobs' state machines, and what they want done.

A thin shell. It feeds the machines and carries out their commands: first the records are stored, all that
have gathered in one transaction, and only then anything leaves for an agent, a watcher or the caller. One
writer task does this for all jobs, so commands are carried out in the order in which the machines gave
them.
"""

import asyncio
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

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
    DrainingError,
    JobAlreadyExistsError,
    JobNotFoundError,
    LeaseExpiredError,
    RunNotFoundError,
    StreamReplacedError,
)
from perseus.service.domain.events import EventFilter, JobEvent
from perseus.service.domain.inputs import (
    AgentDisconnected,
    AgentHeard,
    AgentLeft,
    BaselineRequested,
    FinishRequested,
    GpuErrorReported,
    Input,
    OfferAnswered,
    PlanInForce,
    PolicySet,
    ProfileFound,
    RankJoined,
    RankLeft,
    Solved,
    SolveFailed,
    StragglerCleared,
    StragglerReported,
    TelemetryArrived,
    Tick,
)
from perseus.service.domain.measured import Period, Saving, Timeline
from perseus.service.domain.model import FIRST_RUN, JobState, JobView, Offer, Rank, RankFilter, Straggler
from perseus.service.domain.records import JobRecord, OfferRecord, record_key
from perseus.service.domain.specification import Coordinates, JobSpec, OperatingPolicy
from perseus.service.fleet.gpus import GpuIndex
from perseus.service.job.machine import JobMachine
from perseus.service.job.planning.operating_point import with_fixed
from perseus.service.job.rules import Rules
from perseus.service.shell.solving import SolverPool
from perseus.service.shell.watch_state import WatchState
from perseus.service.shell.watching import Update, Watcher
from perseus.service.storage.store import Entry, JobEntry, JobStore, NewJob, TelemetrySequence
from perseus.solver import Computation, Frontier, Pipeline, Plan, SolverError

log = structlog.get_logger(__name__)

GATHERING_S = 0.005
"""How long work gathers before it is stored together: a commit of a hundred batches costs as one of one."""

TURN_S = 0.005
"""How long actions keep the event loop at a time."""


class AgentPort(Protocol):
    """The way to one agent. Nothing here waits."""

    def accept_rank(self, job_id: str, rank: Coordinates, order: Sequence[Computation]) -> None:
        """Say that a rank is served, and what it computes."""

    def offer(self, job_id: str, rank: Coordinates, offer: Offer) -> None:
        """Offer clocks to a rank; an offer that still waits for the rank is replaced."""

    def acknowledge(self, sequence: int) -> None:
        """Say that all telemetry up to the sequence is stored."""

    def drain(self) -> None:
        """Say that the coordinator is about to stop."""

    def end(self, error: CoordinatorError) -> None:
        """End the stream."""


@dataclass(slots=True)
class _Job:
    machine: JobMachine
    watchers: set[Watcher] = field(default_factory=set)


@dataclass(slots=True)
class _Agent:
    port: AgentPort
    received_sequence: int
    job_ids: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Work:
    """Entries to be stored, and what follows once they are."""

    entries: list[Entry]
    then: list[Callable[[], None]]


class Coordinator:
    """All jobs of one coordinator. Every method runs on the event loop; none but the awaited ones waits."""

    def __init__(self, store: JobStore, solver: SolverPool, rules: Rules) -> None:
        self.rules = rules
        self._store = store
        self._solver = solver
        self._epoch = ""
        self._jobs: dict[str, _Job] = {}
        self._agents: dict[str, _Agent] = {}
        self._gpus = GpuIndex(self._is_on_gpu)
        self._work: list[_Work] = []
        self._has_work = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Load what is stored, and go on with it."""
        self._epoch = await self._store.epoch()
        for stored in await self._store.load_jobs():
            machine, commands = JobMachine.restore(
                stored, self.rules, self._epoch, time.monotonic(), time.time()
            )
            self._jobs[stored.spec.job_id] = _Job(machine)
            self._perform(stored.spec.job_id, commands)
            for place, gpu_uuid in machine.gpus().items():
                if machine.is_on_gpu(place, gpu_uuid):
                    self._gpus.put(stored.spec.job_id, place, gpu_uuid)
        log.info("jobs loaded", job_count=len(self._jobs), epoch=self._epoch)

    async def run(self) -> None:
        """Store and carry out what the machines want, until cancelled.

        Raises:
            Exception: the store failed. Nothing can be promised any more: stop.
        """
        while True:
            await self._has_work.wait()
            await asyncio.sleep(GATHERING_S)
            self._has_work.clear()
            work, self._work = self._work, []
            entries = [entry for item in work for entry in item.entries]
            if entries:
                await self._store.write(_latest(entries))
            turn_ends_s = time.monotonic() + TURN_S
            for item in work:
                for action in item.then:
                    action()
                if time.monotonic() >= turn_ends_s:
                    await asyncio.sleep(0)  # readers, and leases, must not wait for thousands of offers
                    turn_ends_s = time.monotonic() + TURN_S

    def tick(self) -> None:
        """Let leases run out. To be called about every second."""
        now_s = time.monotonic()
        for job_id, job in self._jobs.items():
            deadline_s = job.machine.next_deadline_s()
            if deadline_s is not None and deadline_s <= now_s:
                self._perform(job_id, _handle(job.machine, Tick()))

    def drain(self) -> None:
        """Tell all agents and watchers that the coordinator is about to stop."""
        for agent in self._agents.values():
            agent.port.drain()
        for job in self._jobs.values():
            for watcher in job.watchers:
                watcher.end(DrainingError())

    async def flush(self) -> None:
        """Wait until everything that happened so far is stored and carried out."""
        await self._later([])

    async def close(self) -> None:
        """Drop what is being solved."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------------ jobs

    async def register(self, spec: JobSpec) -> JobView:
        """Register a job, or return the one that was registered just so.

        Raises:
            InvalidInputError, ScheduleError: the specification can't be.
            JobAlreadyExistsError: it differs from the one that was registered.
        """
        job = self._jobs.get(spec.job_id)
        if job is not None:
            if (name := job.machine.difference(spec)) is not None:
                raise JobAlreadyExistsError(job_id=spec.job_id, field=name)
            return job.machine.view()
        create_time_s = time.time()
        machine = JobMachine(spec, self.rules, self._epoch, create_time_s, time.monotonic())
        self._jobs[spec.job_id] = _Job(machine)
        await self._perform(spec.job_id, machine.register(), [NewJob(spec, create_time_s)])
        return machine.view()

    def job(self, job_id: str, run_number: int, *, has_details: bool) -> JobView:
        """Return a run of a job as it is; number 0 is the latest.

        Raises:
            JobNotFoundError, RunNotFoundError: there is none.
        """
        return _view(self._find(job_id, run_number).machine, has_details)

    def jobs(
        self, after_job_id: str, states: Collection[JobState], *, has_details: bool
    ) -> Iterator[JobView]:
        """Yield the jobs that follow an identifier in order, those in one of these states (all if empty).

        To be read before anything else may happen.
        """
        job_ids = sorted(self._jobs)
        for job_id in job_ids[bisect_right(job_ids, after_job_id) :]:
            machine = self._jobs[job_id].machine
            if not states or machine.state in states:
                yield _view(machine, has_details)

    def ranks(self, job_id: str, wanted: RankFilter, first_index: int) -> Iterator[tuple[int, Rank]]:
        """Yield the wanted ranks of a job's latest run from an index on, each with its index.

        To be read before anything else may happen.

        Raises:
            PipelineOutOfRangeError, InvalidFieldError: the job has no such pipeline or stage.
        """
        return self._find(job_id).machine.ranks(wanted, first_index)

    async def finish(self, job_id: str) -> JobView:
        """End a job."""
        return await self._change(job_id, FinishRequested())

    async def report_straggler(self, job_id: str, straggler: Straggler) -> JobView:
        """Take the report of a slow pipeline."""
        return await self._change(job_id, StragglerReported(straggler))

    async def clear_straggler(self, job_id: str, pipeline: int) -> JobView:
        """Take the report that a pipeline is no longer slow."""
        return await self._change(job_id, StragglerCleared(pipeline))

    async def set_policy(self, job_id: str, policy: OperatingPolicy) -> JobView:
        """Set the operating policy."""
        return await self._change(job_id, PolicySet(policy))

    async def measure_baseline(self, job_id: str) -> JobView:
        """Measure the stock baseline again.

        Raises:
            JobNotSolvedError: there are no plans yet, or no more.
        """
        return await self._change(job_id, BaselineRequested())

    def report(
        self, job_id: str, run_number: int, first_number: int
    ) -> Iterator[tuple[Period, Saving | None]]:
        """Yield what was measured in a run, from the period of a number on, and what it saved against stock.

        To be read before anything else may happen.
        """
        return self._find(job_id, run_number).machine.report(first_number)

    def timeline(self, job_id: str, pipeline: int) -> Timeline:
        """Return the latest whole iteration of a pipeline.

        Raises:
            PipelineOutOfRangeError, TimelineNotReadyError: there is no such pipeline, or no iteration yet.
        """
        return self._find(job_id).machine.timeline(pipeline)

    def frontier(self, job_id: str) -> Frontier:
        """Return a job's frontier.

        Raises:
            JobNotSolvedError: there is none yet.
        """
        return self._find(job_id).machine.solved_frontier()

    async def plan(self, job_id: str, iteration_time_s: float) -> Plan:
        """Return the plan of least energy that is not slower than a time, FIXED computations in their places.

        Raises:
            JobNotSolvedError: there is no frontier yet.
            DeadlineError: no plan is as fast as that.
        """
        frontier = self.frontier(job_id)
        # Rounding is plain Python over all computations: too long for the event loop of a large job.
        plan = await asyncio.to_thread(frontier.plan, iteration_time_s)
        return with_fixed(plan, frontier.pipeline)

    async def solve(self, problem: Pipeline, point_count: int) -> Frontier:
        """Solve a problem without a job."""
        return await self._solver.solve(problem, point_count)

    async def events(
        self, job_id: str, run_number: int, wanted: EventFilter, first_sequence: int, limit: int
    ) -> list[JobEvent]:
        """Return a run's first `limit` wanted events from a sequence on.

        Raises:
            JobNotFoundError, RunNotFoundError: there is none.
        """
        self._find(job_id, run_number)
        return await self._store.events(job_id, first_sequence - 1, limit, wanted)

    async def watch(self, job_id: str, after_sequence: int, *, has_details: bool) -> AsyncIterator[Update]:
        """Yield the job, its events above a sequence, and then what is new, until the job has ended.

        The watcher is there before anything is read, and news is told only once it is stored: nothing is
        missed, and what comes twice is known by its sequence.

        Raises:
            JobNotFoundError: there is no such job.
            DrainingError: the coordinator is about to stop.
        """
        job = self._find(job_id)
        watcher = Watcher(
            WatchState(after_sequence, job.machine.last_event_sequence, job.machine.has_finished)
        )
        job.watchers.add(watcher)
        try:
            await self.flush()
            fetch = partial(self._store.events, job_id)
            async for update in watcher.follow(partial(_view, job.machine, has_details), fetch):
                yield update
        finally:
            job.watchers.discard(watcher)

    # ------------------------------------------------------------------ agents

    async def greet(self, instance_id: str, port: AgentPort) -> tuple[str, int]:
        """Take an agent's new stream, which replaces its older one.

        Returns the epoch and the highest telemetry sequence that is stored.
        """
        older = self._agents.pop(instance_id, None)
        if older is not None:
            older.port.end(StreamReplacedError(instance_id=instance_id))
            self._tell_jobs(older, AgentDisconnected(instance_id))
        await self.flush()
        sequence = await self._store.telemetry_sequence(instance_id)
        self._agents[instance_id] = _Agent(port, sequence)
        return self._epoch, sequence

    def part(self, instance_id: str, port: AgentPort, is_goodbye: bool) -> None:
        """An agent's stream has ended; nothing happens if a newer one has replaced it."""
        agent = self._agents.get(instance_id)
        if agent is not None and agent.port is port:
            del self._agents[instance_id]
            self._tell_jobs(agent, AgentLeft(instance_id) if is_goodbye else AgentDisconnected(instance_id))

    def hear(self, instance_id: str) -> None:
        """Take an agent's sign of life."""
        agent = self._agents.get(instance_id)
        if agent is not None:
            self._tell_jobs(agent, AgentHeard(instance_id))

    def join(self, job_id: str, event: RankJoined) -> None:
        """Take a rank that an agent serves.

        Raises:
            JobNotFoundError, JobFinishedError, RankOutOfRangeError, RankAlreadyServedError,
            GpuAlreadyServedError: it is refused.
        """
        machine = self._find(job_id).machine
        self.tick()  # An older lease may have run out since the last one.
        self._gpus.check(job_id, event.rank, event.gpu.uuid)
        self._perform(job_id, _handle(machine, event))
        self._gpus.put(job_id, event.rank, event.gpu.uuid)
        agent = self._agents.get(event.instance_id)
        if agent is not None:
            agent.job_ids.add(job_id)

    def tell(self, job_id: str, event: RankLeft | OfferAnswered | PlanInForce) -> None:
        """Take what an agent says of a rank.

        Raises:
            JobNotFoundError: the agent may have served the job under a coordinator that lost its state.
            RankOutOfRangeError: the job has no such rank.
        """
        self._perform(job_id, _handle(self._find(job_id).machine, event))

    def note_gpu_error(self, job_id: str, event: GpuErrorReported) -> None:
        """Take what an agent says of a rank's GPU.

        Raises:
            JobNotFoundError: the job is not registered (yet); the agent may say it again.
            RankOutOfRangeError: the job has no such rank.
        """
        machine = self._find(job_id).machine
        self._perform(job_id, _handle(machine, event))

    async def take_telemetry(self, job_id: str, event: TelemetryArrived) -> None:
        """Take a batch, and acknowledge it once it is stored. One that was taken before is only acknowledged.

        Raises:
            JobNotFoundError: the job is not registered.
            InvalidInputError: the batch can't be of that rank. It is neither taken nor acknowledged yet:
                `pass_telemetry` is to follow.
        """
        instance_id, sequence = event.instance_id, event.batch.sequence
        agent = self._agents.get(instance_id)
        if agent is None:
            return
        commands: list[Command] = []
        entries: list[Entry] = []
        if sequence > agent.received_sequence:
            commands = _handle(self._find(job_id).machine, event)
            agent.received_sequence = sequence
            entries = [TelemetrySequence(instance_id, sequence)]
        taken = agent.received_sequence
        await self._perform(job_id, commands, entries)
        agent.port.acknowledge(taken)

    async def pass_telemetry(self, instance_id: str, sequence: int) -> None:
        """Acknowledge a batch that was refused, so that the agent goes on, and doesn't send it again."""
        agent = self._agents.get(instance_id)
        if agent is None:
            return
        entries: list[Entry] = []
        if sequence > agent.received_sequence:
            agent.received_sequence = sequence
            entries = [TelemetrySequence(instance_id, sequence)]
        taken = agent.received_sequence
        await self._later(entries)
        agent.port.acknowledge(taken)

    # ------------------------------------------------------------------ carrying out

    def _is_on_gpu(self, job_id: str, rank: Coordinates, gpu_uuid: str) -> bool:
        job = self._jobs.get(job_id)
        return job is not None and job.machine.is_on_gpu(rank, gpu_uuid)

    def _find(self, job_id: str, run_number: int = 0) -> _Job:
        try:
            job = self._jobs[job_id]
        except KeyError:
            raise JobNotFoundError(job_id=job_id) from None
        if run_number not in (0, FIRST_RUN):
            raise RunNotFoundError(job_id=job_id, run_number=run_number)
        return job

    async def _change(self, job_id: str, event: Input) -> JobView:
        machine = self._find(job_id).machine
        await self._perform(job_id, _handle(machine, event))
        return machine.view()

    def _tell_jobs(self, agent: _Agent, event: Input) -> None:
        for job_id in agent.job_ids:
            self._perform(job_id, _handle(self._jobs[job_id].machine, event))

    def _perform(
        self, job_id: str, commands: Iterable[Command], entries: Iterable[Entry] = ()
    ) -> asyncio.Future[None]:
        """Store what is to be stored; then do the rest. The future is done after both."""
        to_store = list(entries)
        then: list[Callable[[], None]] = []
        is_job_changed = False
        for command in commands:
            match command:
                case Store(record):
                    to_store.append(JobEntry(job_id, record))
                    is_job_changed |= isinstance(record, JobRecord | OfferRecord | Rank)
                case Announce(happening):
                    event = JobEvent(job_id, time.time(), happening)
                    to_store.append(event)
                    then.append(lambda event=event: self._publish(event))  # type: ignore[misc]
                case _:
                    then.append(lambda command=command: self._do(job_id, command))  # type: ignore[misc]
        if is_job_changed:
            then.append(lambda: self._publish_job(job_id))
        return self._later(to_store, then)

    def _later(self, entries: list[Entry], then: Sequence[Callable[[], None]] = ()) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def finish() -> None:
            if not done.done():
                done.set_result(None)

        self._work.append(_Work(entries, [*then, finish]))
        self._has_work.set()
        return done

    def _do(self, job_id: str, command: Command) -> None:
        match command:
            case AcceptRank(rank, instance_id):
                if agent := self._agents.get(instance_id):
                    agent.port.accept_rank(job_id, rank, self._jobs[job_id].machine.order(rank.stage))
            case SendOffer(rank, instance_id, offer):
                if agent := self._agents.get(instance_id):
                    agent.port.offer(job_id, rank, offer)
            case EndStream(instance_id):
                if agent := self._agents.get(instance_id):
                    agent.port.end(LeaseExpiredError(instance_id=instance_id, lease_s=self.rules.lease_s))
            case ReportIteration(summary):
                for watcher in self._jobs[job_id].watchers:
                    watcher.tell(summary)
            case FindProfile():
                self._find_profile(job_id)
            case Solve(problem, slow):
                task = asyncio.get_running_loop().create_task(self._solve(job_id, problem, slow))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _publish(self, event: JobEvent) -> None:
        happening = event.happening
        log.info("job event", job_id=event.job_id, type=happening.type.name, message=happening.message)
        for watcher in self._jobs[event.job_id].watchers:
            watcher.tell(event)

    def _publish_job(self, job_id: str) -> None:
        for watcher in self._jobs[job_id].watchers:
            watcher.change_job()

    def _find_profile(self, job_id: str) -> None:
        """Give a job the profile of the youngest one of the same GPUs and shape."""
        machine = self._jobs[job_id].machine
        like = [
            other.machine
            for other in self._jobs.values()
            if other.machine.complete_profiles() and other.machine.profile_key() == machine.profile_key()
        ]
        if like:
            youngest = max(like, key=lambda other: other.create_time_s)
            found = ProfileFound(youngest.complete_profiles())
            self._perform(job_id, _handle(machine, found))

    async def _solve(self, job_id: str, problem: Pipeline, slow: SlowPlan | None) -> None:
        answer: Solved | SolveFailed
        try:
            answer = Solved(await self._solver.solve(problem, slow=slow))
        except (SolverError, CoordinatorError) as error:
            answer = SolveFailed(str(error))
        machine = self._jobs[job_id].machine
        self._perform(job_id, _handle(machine, answer))


def _handle(machine: JobMachine, event: Input) -> list[Command]:
    return machine.handle(event, time.monotonic(), time.time())


def _view(machine: JobMachine, has_details: bool) -> JobView:
    return machine.view() if has_details else machine.summary()


def _latest(entries: Sequence[Entry]) -> list[Entry]:
    """Drop records that a later one replaces, so that a burst is written once."""
    last: dict[Hashable, Entry] = {}
    for entry in entries:
        key: Hashable = id(entry)
        if isinstance(entry, JobEntry):
            key = (entry.job_id, record_key(entry.record))
        elif isinstance(entry, TelemetrySequence):
            key = entry.instance_id
        last.pop(key, None)
        last[key] = entry
    return list(last.values())
