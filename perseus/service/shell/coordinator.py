"""The coordinator itself: the jobs' state machines, and what they want done.

A thin shell. It feeds the machines and hands their commands to the writer (`writer.py`): first the records
are stored, and only then anything leaves for an agent, a watcher or the caller, in the order in which the
machines gave it.
"""

import asyncio
import time
from bisect import bisect_right
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
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
    JobNotFinishedError,
    JobNotFoundError,
    LeaseExpiredError,
    RunNotFoundError,
    SpecMismatchError,
    StreamReplacedError,
)
from perseus.service.domain.events import EventFilter, JobEvent
from perseus.service.domain.inputs import (
    Abandoned,
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
    RegisteredAgain,
    ResumeRequested,
    Solved,
    SolveFailed,
    StragglerCleared,
    StragglerReported,
    TelemetryArrived,
    Tick,
)
from perseus.service.domain.measured import Period, Saving, Timeline
from perseus.service.domain.model import (
    JobState,
    JobView,
    Offer,
    Rank,
    RankFilter,
    RankLeftReason,
    Straggler,
)
from perseus.service.domain.records import JobRecord, OfferRecord
from perseus.service.domain.specification import (
    Coordinates,
    JobSpec,
    OperatingPolicy,
    Registration,
    check_request_id,
)
from perseus.service.fleet.gpus import GpuIndex
from perseus.service.job import runs
from perseus.service.job.machine import JobMachine
from perseus.service.job.planning.operating_point import with_fixed
from perseus.service.job.rules import Rules
from perseus.service.shell.solving import SolverPool
from perseus.service.shell.watch_state import WatchState
from perseus.service.shell.watching import Update, Watcher
from perseus.service.shell.writer import Writer
from perseus.service.storage.store import Entry, JobDeleted, JobEntry, JobStore, NewRun, TelemetrySequence
from perseus.solver import Computation, Frontier, Pipeline, Plan, SolverError

log = structlog.get_logger(__name__)

LATEST = 0
"""Stands for the number of a job's latest run."""


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


@dataclass(slots=True, eq=False)
class _Run:
    """The latest run of a job; earlier ones have ended, and are in the store."""

    machine: JobMachine
    watchers: set[Watcher] = field(default_factory=set)

    @property
    def job_id(self) -> str:
        return self.machine.spec.job_id

    @property
    def number(self) -> int:
        return self.machine.run_number


@dataclass(slots=True)
class _Agent:
    port: AgentPort
    received_sequence: int
    job_ids: set[str] = field(default_factory=set)


class Coordinator:
    """All jobs of one coordinator. Every method runs on the event loop; none but the awaited ones waits."""

    def __init__(self, store: JobStore, solver: SolverPool, rules: Rules) -> None:
        self.rules = rules
        self._store = store
        self._writer = Writer(store)
        self._solver = solver
        self._epoch = ""
        self._runs: dict[str, _Run] = {}
        # By job: the run that each request to register has led to.
        self._requests: dict[str, dict[str, int]] = {}
        self._deleted_version = 0
        self._agents: dict[str, _Agent] = {}
        self._gpus = GpuIndex(self._is_on_gpu)
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Load what is stored, and go on with it."""
        self._epoch = await self._store.epoch()
        self._deleted_version = await self._store.deleted_version()
        self._requests = {job_id: dict(some) for job_id, some in (await self._store.known_requests()).items()}
        for stored in await self._store.load_jobs():
            machine, commands = JobMachine.restore(
                stored, self.rules, self._epoch, time.monotonic(), time.time()
            )
            self._runs[stored.spec.job_id] = run = _Run(machine)
            self._perform(run, commands)
            for place, gpu_uuid in machine.gpus().items():
                if machine.is_on_gpu(place, gpu_uuid):
                    self._gpus.put(run.job_id, place, gpu_uuid)
        log.info("jobs loaded", job_count=len(self._runs), epoch=self._epoch)

    async def run(self) -> None:
        """Store and carry out what the machines want, until cancelled.

        Raises:
            Exception: the store failed. Nothing can be promised any more: stop.
        """
        await self._writer.run()

    def tick(self) -> None:
        """Let leases run out. To be called about every second."""
        now_s = time.monotonic()
        for run in self._runs.values():
            deadline_s = run.machine.next_deadline_s()
            if deadline_s is not None and deadline_s <= now_s:
                self._perform(run, _handle(run.machine, Tick()))

    def drain(self) -> None:
        """Tell all agents and watchers that the coordinator is about to stop."""
        for agent in self._agents.values():
            agent.port.drain()
        for run in self._runs.values():
            for watcher in run.watchers:
                watcher.end(DrainingError())

    async def flush(self) -> None:
        """Wait until everything that happened so far is stored and carried out."""
        await self._writer.flush()

    async def close(self) -> None:
        """Drop what is being solved."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------------ jobs

    async def register(self, spec: JobSpec, registration: Registration) -> JobView:
        """Register a job, durably: begin a run of it, or return the one that the request leads to.

        Raises:
            InvalidInputError, ScheduleError: the specification or the registration can't be.
            JobAlreadyExistsError: it differs from the one that was registered, whose ranks are live.
        """
        registration.check()
        run = self._runs.get(spec.job_id)
        known_to = self._requests.get(spec.job_id, {}).get(registration.request_id)
        self.tick()  # Leases may have run out since the last one.
        match runs.way(_latest_run(run, spec), known_to):
            case runs.Return(number):
                await self.flush()  # What it led to may be on its way to the store.
                return await self.job(spec.job_id, number, has_details=True)
            case runs.Refuse(difference):
                raise JobAlreadyExistsError(job_id=spec.job_id, field=difference)
            case runs.GoOn():
                assert run is not None
                event = RegisteredAgain(registration)
                done = self._perform(run, _handle(run.machine, event))
                self._note_requests(run)
                await done
                return run.machine.view()
            case runs.Begin(number, abandons):
                return await self._begin_run(spec, number, registration, abandons)

    async def _begin_run(
        self, spec: JobSpec, number: int, registration: Registration, abandons: str | None
    ) -> JobView:
        create_time_s, version = time.time(), self._deleted_version
        machine = JobMachine(spec, number, self.rules, self._epoch, create_time_s, time.monotonic())
        if (before := self._runs.get(spec.job_id)) is not None:
            version = before.machine.version
            if abandons is not None:
                why = f"another specification was registered: its {abandons} differs"
                self._perform(before, _handle(before.machine, Abandoned(why)))
        self._runs[spec.job_id] = run = _Run(machine)
        commands = machine.register(registration, version)
        self._note_requests(run)
        await self._perform(run, commands, [NewRun(spec, number, create_time_s)])
        return machine.view()

    def _note_requests(self, run: _Run) -> None:
        """Keep in mind which requests led to the latest run: no more than it knows itself."""
        before = self._requests.get(run.job_id, {})
        earlier = {request_id: number for request_id, number in before.items() if number != run.number}
        latest = {some.request_id: run.number for some in run.machine.registrations.registrations}
        self._requests[run.job_id] = earlier | latest

    async def delete(self, job_id: str, *, allow_missing: bool) -> None:
        """Forget a finished job with all its runs.

        Raises:
            JobNotFoundError: there is none, unless that is allowed.
            JobNotFinishedError: it has not ended.
        """
        run = self._runs.get(job_id)
        if run is None:
            if not allow_missing:
                raise JobNotFoundError(job_id=job_id)
            await self.flush()  # It may be on its way out.
            return
        if not run.machine.has_finished:
            raise JobNotFinishedError(job_id=job_id, state=run.machine.state.value)
        del self._runs[job_id]
        self._requests.pop(job_id, None)
        self._deleted_version = max(self._deleted_version, run.machine.version)
        await self._writer.later([JobDeleted(job_id, run.machine.version)])

    async def job(self, job_id: str, run_number: int, *, has_details: bool) -> JobView:
        """Return a run of a job as it is.

        Raises:
            JobNotFoundError, RunNotFoundError: there is none.
        """
        return _view(await self._machine(job_id, run_number), has_details)

    def jobs(
        self, after_job_id: str, states: Collection[JobState], *, has_details: bool
    ) -> Iterator[JobView]:
        """Yield the jobs that follow an identifier in order, those in one of these states (all if empty).

        To be read before anything else may happen.
        """
        job_ids = sorted(self._runs)
        for job_id in job_ids[bisect_right(job_ids, after_job_id) :]:
            machine = self._runs[job_id].machine
            if not states or machine.state in states:
                yield _view(machine, has_details)

    async def runs(self, job_id: str, before: int, count: int) -> list[JobView]:
        """Return up to `count` runs of a job, the latest first; those numbered below `before`, or LATEST.

        Raises:
            JobNotFoundError: there is none.
        """
        self._find(job_id)
        await self.flush()
        numbers = [
            number for number in await self._store.run_numbers(job_id) if before == LATEST or number < before
        ]
        return [await self.job(job_id, number, has_details=False) for number in numbers[:count]]

    def ranks(self, job_id: str, wanted: RankFilter, first_index: int) -> Iterator[tuple[int, Rank]]:
        """Yield the wanted ranks of a job's latest run from an index on, each with its index.

        To be read before anything else may happen.

        Raises:
            PipelineOutOfRangeError, InvalidFieldError: the job has no such pipeline or stage.
        """
        return self._find(job_id).machine.ranks(wanted, first_index)

    async def resume(self, job_id: str) -> JobView:
        """Let a job go on from stock; nothing happens in another state."""
        return await self._change(job_id, ResumeRequested())

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

    async def measure_baseline(self, job_id: str, request_id: str) -> JobView:
        """Measure the stock baseline again; the same request again changes nothing.

        Raises:
            JobNotSolvedError: there are no plans yet, or no more.
        """
        check_request_id(request_id)
        return await self._change(job_id, BaselineRequested(request_id))

    async def report(
        self, job_id: str, run_number: int, first_number: int
    ) -> Iterator[tuple[Period, Saving | None]]:
        """Return what was measured in a run, from the period of a number on, and what it saved against stock.

        To be read before anything else may happen.

        Raises:
            JobNotFoundError, RunNotFoundError: there is none.
        """
        return (await self._machine(job_id, run_number)).report(first_number)

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
        run = self._find(job_id)
        number = run_number or run.number
        if number != run.number and number not in await self._store.run_numbers(job_id):
            raise RunNotFoundError(job_id=job_id, run_number=number)
        return await self._store.events(job_id, number, first_sequence - 1, limit, wanted)

    async def watch(
        self, job_id: str, run_number: int, after_sequence: int, *, has_details: bool
    ) -> AsyncIterator[Update]:
        """Yield a run, its events above a sequence, and then what is new, until the run has ended.

        The watcher is there before anything is read, and news is told only once it is stored: nothing is
        missed, and what comes twice is known by its sequence.

        Raises:
            JobNotFoundError, RunNotFoundError: there is none.
            DrainingError: the coordinator is about to stop.
        """
        run = self._find(job_id)
        if run_number not in (LATEST, run.number):
            run = _Run(await self._machine(job_id, run_number))
        machine = run.machine
        watcher = Watcher(WatchState(after_sequence, machine.last_event_sequence, machine.has_finished))
        run.watchers.add(watcher)
        try:
            await self.flush()
            fetch = partial(self._store.events, job_id, run.number)
            async for update in watcher.follow(partial(_view, machine, has_details), fetch):
                yield update
        finally:
            run.watchers.discard(watcher)

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
            GpuAlreadyServedError, SpecMismatchError: it is refused.
        """
        run = self._find(job_id)
        self.tick()  # An older lease may have run out since the last one.
        self._gpus.check(job_id, event.rank, event.gpu.uuid)
        try:
            self._perform(run, _handle(run.machine, event))
        except SpecMismatchError:
            # It may be served here with what its trainer computed before.
            left = RankLeft(event.rank, event.instance_id, RankLeftReason.TRAINER_GONE)
            self._perform(run, _handle(run.machine, left))
            raise
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
        run = self._find(job_id)
        self._perform(run, _handle(run.machine, event))

    def note_gpu_error(self, job_id: str, event: GpuErrorReported) -> None:
        """Take what an agent says of a rank's GPU.

        Raises:
            JobNotFoundError: the job is not registered (yet); the agent may say it again.
            RankOutOfRangeError: the job has no such rank.
        """
        run = self._find(job_id)
        self._perform(run, _handle(run.machine, event))

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
        if sequence <= agent.received_sequence:
            await self.pass_telemetry(instance_id, sequence)
            return
        run = self._find(job_id)
        commands = _handle(run.machine, event)
        agent.received_sequence = sequence
        await self._perform(run, commands, [TelemetrySequence(instance_id, sequence)])
        agent.port.acknowledge(sequence)

    async def pass_telemetry(self, instance_id: str, sequence: int) -> None:
        """Acknowledge a batch that was refused or taken before, so that the agent doesn't send it again."""
        agent = self._agents.get(instance_id)
        if agent is None:
            return
        entries: list[Entry] = []
        if sequence > agent.received_sequence:
            agent.received_sequence = sequence
            entries = [TelemetrySequence(instance_id, sequence)]
        taken = agent.received_sequence
        await self._writer.later(entries)
        agent.port.acknowledge(taken)

    # ------------------------------------------------------------------ carrying out

    def _is_on_gpu(self, job_id: str, rank: Coordinates, gpu_uuid: str) -> bool:
        run = self._runs.get(job_id)
        return run is not None and run.machine.is_on_gpu(rank, gpu_uuid)

    def _find(self, job_id: str) -> _Run:
        try:
            return self._runs[job_id]
        except KeyError:
            raise JobNotFoundError(job_id=job_id) from None

    async def _machine(self, job_id: str, run_number: int) -> JobMachine:
        """Return a run's machine: the one that lives, or one as it was stored when the run had ended."""
        run = self._find(job_id)
        if run_number in (LATEST, run.number):
            return run.machine
        await self.flush()  # A run that has just ended may be on its way to the store.
        stored = await self._store.load_run(job_id, run_number)
        if stored is None:
            raise RunNotFoundError(job_id=job_id, run_number=run_number)
        machine, _ = JobMachine.restore(stored, self.rules, self._epoch, time.monotonic(), time.time())
        return machine

    async def _change(self, job_id: str, event: Input) -> JobView:
        run = self._find(job_id)
        await self._perform(run, _handle(run.machine, event))
        return run.machine.view()

    def _tell_jobs(self, agent: _Agent, event: Input) -> None:
        for job_id in agent.job_ids:
            if run := self._runs.get(job_id):
                self._perform(run, _handle(run.machine, event))

    def _is_latest(self, run: _Run) -> bool:
        return self._runs.get(run.job_id) is run

    def _perform(
        self, run: _Run, commands: Iterable[Command], entries: Iterable[Entry] = ()
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

    def _do(self, run: _Run, command: Command) -> None:
        match command:
            case AcceptRank(rank, instance_id):
                if agent := self._agents.get(instance_id):
                    agent.port.accept_rank(run.job_id, rank, run.machine.order(rank.stage))
            case SendOffer(rank, instance_id, offer):
                if agent := self._agents.get(instance_id):
                    agent.port.offer(run.job_id, rank, offer)
            case EndStream(instance_id):
                if agent := self._agents.get(instance_id):
                    agent.port.end(LeaseExpiredError(instance_id=instance_id, lease_s=self.rules.lease_s))
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

    def _publish(self, run: _Run, event: JobEvent) -> None:
        happening = event.happening
        log.info("job event", job_id=event.job_id, type=happening.type.name, message=happening.message)
        for watcher in run.watchers:
            watcher.tell(event)

    def _publish_job(self, run: _Run) -> None:
        for watcher in run.watchers:
            watcher.change_job()

    async def _find_profile(self, run: _Run, keys: Sequence[str]) -> None:
        """Give a run what is known of its stages' work."""
        await self.flush()
        found = tuple(await self._store.known_profiles(keys))
        if found and self._is_latest(run):
            self._perform(run, _handle(run.machine, ProfileFound(found)))

    async def _solve(self, run: _Run, problem: Pipeline, slow: SlowPlan | None) -> None:
        answer: Solved | SolveFailed
        try:
            answer = Solved(await self._solver.solve(problem, slow=slow))
        except (SolverError, CoordinatorError) as error:
            answer = SolveFailed(str(error))
        if self._is_latest(run):
            self._perform(run, _handle(run.machine, answer))


def _handle(machine: JobMachine, event: Input) -> list[Command]:
    return machine.handle(event, time.monotonic(), time.time())


def _view(machine: JobMachine, has_details: bool) -> JobView:
    return machine.view() if has_details else machine.summary()


def _latest_run(run: _Run | None, spec: JobSpec) -> runs.LatestRun | None:
    """How a job's latest run, if there is one, stands to a specification."""
    if run is None:
        return None
    machine = run.machine
    return runs.LatestRun(
        machine.run_number, machine.has_finished, machine.has_live_rank, machine.spec.difference(spec)
    )
