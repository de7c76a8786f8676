"""Clients' requests about jobs: registering, reading, steering and watching them."""

import asyncio
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TypeVar

from perseus.service.domain.errors import (
    JobAlreadyExistsError,
    JobNotFinishedError,
    JobNotFoundError,
    JobNotSolvedError,
    JobUnreadableError,
    LayersUnknownError,
    OwnerMismatchError,
    RunNotFoundError,
    TimelineNotReadyError,
)
from perseus.service.domain.figures import RankColumns
from perseus.service.domain.inputs import (
    Abandoned,
    Input,
    RegisteredAgain,
    ResumeRequested,
)
from perseus.service.domain.measured import Period, Saving
from perseus.service.domain.messages import frontier_to_proto, timeline_to_proto
from perseus.service.domain.model import (
    EventFilter,
    JobState,
    Rank,
    RankFilter,
)
from perseus.service.domain.records import UnreadableJob
from perseus.service.domain.retention import Retention
from perseus.service.domain.snapshot import RunSnapshot
from perseus.service.domain.specification import (
    MAX_PIPELINE_COUNT,
    Coordinates,
    JobSpec,
    Registration,
)
from perseus.service.job import quarantine, runs, views
from perseus.service.job.iterations.iteration_log import report
from perseus.service.job.machine import JobMachine
from perseus.service.job.planning.operating_point import with_fixed
from perseus.service.job.ranks.rank_table import select
from perseus.service.job.run import Run
from perseus.service.shell.live_run import LiveRun, Machine
from perseus.service.shell.live_runs import LiveRuns
from perseus.service.shell.quotas import Quotas
from perseus.service.shell.watch_state import WatchState
from perseus.service.shell.watching import Update, Watcher
from perseus.service.shell.writer import Work, Writer
from perseus.service.solving.worker_pool import WorkerPool
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import JobDeleted, NewRun
from perseus.solver import Frontier, Pipeline, Plan, layers_along_path
from perseus.v1 import event_pb2, frontier_pb2, job_pb2, job_service_pb2

T = TypeVar("T")

LATEST = 0
"""Instead of a run's number: the job's latest run."""


class Jobs:
    """All jobs, as clients see them. Only the async methods wait."""

    def __init__(
        self, store: SqlStore, writer: Writer, solver: WorkerPool, live: LiveRuns, quotas: Quotas
    ) -> None:
        self._store = store
        self._writer = writer
        self._solver = solver
        self._live = live
        self._quotas = quotas
        # By job: the run that each registration request led to.
        self._requests: dict[str, dict[str, int]] = {}
        self._deleted_version = 0
        self._advising: set[asyncio.Task[frontier_pb2.Rebalancing]] = set()
        # Jobs whose rows are still in the store but must not be seen any more; how many there were so far.
        self._being_deleted: set[str] = set()
        self._deletion_count = 0

    async def load(self) -> None:
        """Load the stored requests and the version of deleted jobs."""
        self._deleted_version = await self._store.deleted_version()
        self._requests = {job_id: dict(some) for job_id, some in (await self._store.known_requests()).items()}

    async def close(self) -> None:
        """Cancel work that goes on without callers."""
        for work in self._advising:
            work.cancel()
        await asyncio.gather(*self._advising, return_exceptions=True)

    # ------------------------------------------------------------------ registering

    async def register(self, spec: JobSpec, registration: Registration) -> job_pb2.Job:
        """Register a job, durably: begin a run of it, or return the run that the request led to before.

        Raises:
            InvalidInputError, ScheduleError: the specification or the registration is invalid.
            JobAlreadyExistsError: the specification differs from the registered one, whose ranks are live.
            OwnerMismatchError: the job has not finished, and belongs to another owner.
            LimitReachedError: the principal has too many jobs, or too large ones.
            JobUnreadableError: the stored job can't be read.
        """
        registration.check()
        await self._load(spec.job_id)
        machine: JobMachine | None = None
        while True:
            run = self._live.get(spec.job_id)
            known_to = self._requests.get(spec.job_id, {}).get(registration.request_id)
            if run is not None:
                self._live.tick_run(run)
                if not run.machine.record.has_finished and not run.machine.registrations.is_owner(
                    registration.owner
                ):
                    raise OwnerMismatchError(job_id=spec.job_id, owner=registration.owner)
            match runs.decide(_latest_run(run, spec), known_to):
                case runs.Repeat(number):
                    await self._writer.flush()  # The run may not be stored yet.
                    return await self.job(spec.job_id, number, is_full=True)
                case runs.Refuse(difference):
                    raise JobAlreadyExistsError(job_id=spec.job_id, field=difference)
                case runs.Continue():
                    assert run is not None
                    before = run.machine.registrations  # the run keeps its owner and its principal
                    owned = replace(registration, owner=before.owner, principal=before.principal)
                    done = self._live.handle(run, RegisteredAgain(owned))
                    self._note_requests(run.machine)
                    await done
                    return self._live.job(run, is_full=True)
                case runs.Begin(number, abandons):
                    principal = registration.principal
                    self._quotas.check_job(principal, spec, self._specs_of(principal, spec.job_id))
                    if machine is not None and machine.run_number == number:
                        return await self._begin_run(machine, registration, abandons)
                    # Others may register the job while its machine is made, so decide again afterwards.
                    machine = await self._live.made(spec, partial(self._new_machine, spec, number))

    def _specs_of(self, principal: str, but_job_id: str) -> Iterator[JobSpec]:
        """Yield the specifications of a principal's unfinished jobs, except one job."""
        for run in self._live:
            machine = run.machine
            if (
                machine.registrations.principal == principal
                and not machine.record.has_finished
                and run.job_id != but_job_id
            ):
                yield machine.spec

    def _new_machine(self, spec: JobSpec, number: int) -> JobMachine:
        live = self._live
        return JobMachine(Run(spec, number, live.rules, live.epoch, time.time(), live.clock.now_s()))

    async def _begin_run(
        self, machine: JobMachine, registration: Registration, abandons: str | None
    ) -> job_pb2.Job:
        spec, version = machine.spec, self._deleted_version
        if (before := self._live.get(spec.job_id)) is not None:
            version = before.machine.record.version
            if abandons is not None:
                why = f"another specification was registered: its {abandons} differs"
                self._live.handle(before, Abandoned(why))
        commands = machine.register(registration, version)
        done = self._live.begin(machine, commands, [NewRun(spec, machine.run_number, machine.create_time_s)])
        run = self._live.find(spec.job_id)
        self._note_requests(machine)
        await done
        return self._live.job(run, is_full=True)

    def _note_requests(self, machine: Machine) -> None:
        """Remember which requests led to the latest run: exactly those that the run itself remembers."""
        job_id, latest = machine.spec.job_id, machine.run_number
        before = self._requests.get(job_id, {})
        earlier = {request_id: number for request_id, number in before.items() if number != latest}
        own = {some.request_id: latest for some in machine.registrations.registrations}
        self._requests[job_id] = earlier | own

    async def delete(self, job_id: str, *, allow_missing: bool) -> None:
        """Delete a finished job with all its runs.

        Raises:
            JobNotFoundError: there is no such job, and `allow_missing` is not set.
            JobNotFinishedError: the job has not finished.
        """
        await self._load(job_id, may_be_unreadable=True)
        if job_id in self._live.unreadable:
            await self._delete_stored(job_id, 0)
            # If this can't be read, the repeated call reads it.
            self._deleted_version = max(self._deleted_version, await self._store.deleted_version())
            self._live.unreadable.pop(job_id, None)
            self._requests.pop(job_id, None)
            return
        run = self._live.get(job_id)
        if run is None:
            if not allow_missing:
                raise JobNotFoundError(job_id=job_id)
            await self._writer.flush()  # Its deletion may not be stored yet.
            return
        if not run.machine.record.has_finished:
            raise JobNotFinishedError(job_id=job_id, state=run.machine.record.state.value)
        self._live.forget(run)
        self._requests.pop(job_id, None)
        self._deleted_version = max(self._deleted_version, run.machine.record.version)
        await self._delete_stored(job_id, run.machine.record.version)

    def _delete_stored(self, job_id: str, version: int) -> Work:
        """Have a job's rows deleted; they are not read until then."""
        self._deletion_count += 1
        self._being_deleted.add(job_id)
        return self._writer.later(
            [JobDeleted(job_id, version)], [partial(self._being_deleted.discard, job_id)]
        )

    # ------------------------------------------------------------------ reading

    async def job(self, job_id: str, run_number: int, *, is_full: bool) -> job_pb2.Job:
        """Return a run of a job in its present state.

        Raises:
            JobNotFoundError, RunNotFoundError: there is no such job or run.
        """
        run = await self._run(job_id, run_number)
        return self._live.job(run, is_full=is_full)

    def jobs(
        self,
        after_job_id: str,
        states: Collection[JobState],
        labels: Collection[tuple[str, str]] = (),
        *,
        is_full: bool,
    ) -> Iterator[tuple[str, job_pb2.Job]]:
        """Yield the jobs after an identifier in order, each with its identifier.

        Only those in one of these states (all if empty) and with all of these labels are yielded. Exhaust it
        before anything is awaited.
        """
        job_ids = self._live.job_ids
        for job_id in job_ids[bisect_right(job_ids, after_job_id) :]:
            run = self._live.find(job_id)
            machine = run.machine
            if (not states or machine.record.state in states) and set(labels) <= set(
                machine.registrations.labels
            ):
                yield job_id, self._live.job(run, is_full=is_full)

    async def of_slots(
        self, slots: Collection[int], limit: int
    ) -> Mapping[int, tuple[list[job_pb2.Job], int]]:
        """Return jobs of other coordinators' slots as these store them: up to `limit` of each slot,
        unfinished ones first, and how many it has."""
        found = await self._store.jobs_of_slots(slots, limit)
        return {slot: (list(map(views.listed_job, listed)), count) for slot, (listed, count) in found.items()}

    async def runs(self, job_id: str, before: int, count: int) -> list[job_pb2.Job]:
        """Return up to `count` runs of a job, the latest first: those below `before`, all if that is LATEST.

        Raises:
            JobNotFoundError: there is no such job.
        """
        await self._load(job_id)
        run = self._live.find(job_id)
        await self._writer.flush()
        found: list[job_pb2.Job] = []
        for number, ended in await self._store.ended_jobs(job_id, before or None, count):
            if number == run.number:
                found.append(self._live.job(run, is_full=False))
            elif isinstance(ended, UnreadableJob):
                raise JobUnreadableError(job_id=job_id, run_number=number, cause=ended.cause)
            else:
                ended.epoch = self._live.epoch
                found.append(views.without_details(ended))
        return found

    async def ranks(self, job_id: str, wanted: RankFilter, first_index: int) -> Iterator[tuple[int, Rank]]:
        """Return the wanted ranks of a job's latest run from an index on, each with its index.

        Exhaust it before anything is awaited.

        Raises:
            PipelineOutOfRangeError, InvalidFieldError: the job has no such pipeline or stage.
        """
        run = self._live.find(job_id)
        found = self._live.read(run, lambda state: state.ranks.select(wanted, first_index), lambda _: None)
        if found is None:
            counts = run.machine.spec.parallelism
            first = first_index // (counts.stage_count * counts.tensor_count)
            found = select(run.machine.spec, await self._stored_ranks(run, first), wanted, first_index)
        return found

    async def rank_columns(self, job_id: str, first_pipeline: int, pipeline_count: int) -> RankColumns:
        """Return the ranks of so many pipelines of a job's latest run, from a pipeline on, in columns.

        Raises:
            JobNotFoundError: there is no such job.
        """
        run, wanted = self._live.find(job_id), (first_pipeline, pipeline_count)
        found = self._live.read(
            run, lambda state: views.rank_columns(state, *wanted), lambda snapshot: snapshot.columns(*wanted)
        )
        if found is None:
            spec, counts = run.machine.spec, run.machine.spec.parallelism
            width = counts.stage_count * counts.tensor_count
            ranks = select(spec, await self._stored_ranks(run, *wanted), RankFilter(), first_pipeline * width)
            found = RankColumns.of_ranks([rank for _, rank in islice(ranks, pipeline_count * width)])
        return found

    async def _stored_ranks(
        self, run: LiveRun, first_pipeline: int = 0, pipeline_count: int = MAX_PIPELINE_COUNT
    ) -> dict[Coordinates, Rank]:
        """Return the stored ranks of a run without a machine; a quarantined run counts them as lost."""
        await self._writer.flush()  # They may not be stored yet.
        stored = await self._store.load_ranks(run.job_id, run.number, first_pipeline, pipeline_count)
        return quarantine.lost(stored)

    # ------------------------------------------------------------------ steering

    async def resume(self, job_id: str) -> job_pb2.Job:
        """Resume a stalled job from stock; do nothing in another state.

        Raises:
            JobQuarantinedError: the job is quarantined, and can't be restored from what is stored.
        """
        run = self._live.find(job_id)
        if isinstance(run.machine, RunSnapshot) and not run.machine.record.has_finished:
            await self._live.revive(run)
        return await self.change(job_id, ResumeRequested())

    async def change(self, job_id: str, event: Input) -> job_pb2.Job:
        """Give a job's latest run an input, durably; return the job as it is then.

        Raises:
            JobNotFoundError: there is no such job.
            CoordinatorError: the run refuses it (`JobMachine.handle`).
        """
        await self._load(job_id)
        run = self._live.find(job_id)
        await self._live.handle(run, event)
        return self._live.job(run, is_full=True)

    # ------------------------------------------------------------------ measured and planned

    async def report(
        self, job_id: str, run_number: int, first_number: int
    ) -> Iterator[tuple[Period, Saving | None]]:
        """Return the measured periods of a run from a number on, each with what it saved against stock.

        Raises:
            JobNotFoundError, RunNotFoundError: there is no such job or run.
        """
        run = await self._run(job_id, run_number)
        await self._writer.flush()
        return report(await self._store.load_periods(job_id, run.number, first_number), first_number)

    async def timeline(
        self, job_id: str, pipeline: int, *, from_baseline: bool
    ) -> job_service_pb2.GetTimelineResponse:
        """Return a pipeline's latest complete iteration, or the iteration kept of its stock baseline.

        Raises:
            PipelineOutOfRangeError, TimelineNotReadyError: there is no such pipeline, or no iteration of it.
        """
        run = self._live.find(job_id)
        try:
            found = self._live.read(
                run,
                partial(views.timeline, pipeline=pipeline, from_baseline=from_baseline),
                partial(RunSnapshot.timeline, pipeline=pipeline, from_baseline=from_baseline),
            )
        except TimelineNotReadyError:
            stored = await self._store.ended_timeline(job_id, run.number, from_baseline=from_baseline)
            if stored is None or (stored.pipeline != pipeline and not from_baseline):
                raise
            return stored
        return await asyncio.to_thread(timeline_to_proto, found)

    async def frontier(self, job_id: str) -> frontier_pb2.Frontier:
        """Return a job's frontier.

        Raises:
            JobNotSolvedError: there is none.
        """
        run = self._live.find(job_id)
        try:
            found = self._frontier(run)
        except JobNotSolvedError:
            if (stored := await self._store.ended_frontier(job_id, run.number)) is None:
                raise
            return stored
        return await asyncio.to_thread(frontier_to_proto, found)

    def _frontier(self, run: LiveRun) -> Frontier:
        return self._live.read(run, views.solved_frontier, RunSnapshot.solved_frontier)

    async def plan(self, job_id: str, iteration_time_s: float) -> tuple[Plan, float]:
        """Return the plan of least energy that keeps an iteration time, with FIXED computations in place.

        Also return the probability with which it does; 0 if the errors of measurements are unknown.

        Raises:
            JobNotSolvedError: there is no frontier, or it is only stored, as the run ended long ago.
            DeadlineError: no plan is as fast as that.
            SolverBusyError, SolverCrashedError, SolverTimeoutError: the solver gave no answer.
        """
        frontier = self._frontier(self._live.find(job_id))
        plan = await self._solver.plan(frontier, iteration_time_s)
        confidence = frontier.margin.confidence if frontier.margin else 0.0
        return await asyncio.to_thread(with_fixed, plan, frontier.pipeline), confidence

    async def rebalancing(self, job_id: str, asked: Sequence[int]) -> frontier_pb2.Rebalancing:
        """Return what moving layers between stages would bring beside clocks.

        `asked`: layers per stage's chunk, in the model's order, or one number for all; if empty, those of the
        specification. The work goes on if the caller is cancelled, and its answer is kept with the frontier.

        Raises:
            JobNotSolvedError: there is no frontier, or it is only stored, as the run ended long ago.
            LayersUnknownError: nobody knows the layers.
            SolverError: they don't fit the job.
            SolverBusyError, SolverCrashedError, SolverTimeoutError: the solver gave no answer.
        """
        run = self._live.find(job_id)
        frontier = self._frontier(run)
        layers = layers_along_path(frontier.pipeline, asked or _layers(run.machine.spec, frontier.pipeline))
        kept = run.rebalancing
        if kept is None or kept[0] is not frontier or kept[1] != layers or _has_failed(kept[2]):
            work = asyncio.get_running_loop().create_task(self._solver.rebalancing(frontier, layers))
            self._advising.add(work)
            work.add_done_callback(self._advising.discard)
            kept = run.rebalancing = frontier, layers, work
        return await asyncio.shield(kept[2])

    async def solve(self, problem: Pipeline, point_count: int) -> Frontier:
        """Solve a problem without a job.

        Raises:
            SolverError: the problem can't be solved.
            SolverBusyError, SolverCrashedError, SolverTimeoutError: the solver gave no answer.
        """
        return await self._solver.solve(problem, point_count)

    # ------------------------------------------------------------------ events

    async def events(
        self, job_id: str, run_number: int, wanted: EventFilter, after_sequence: int, limit: int
    ) -> list[event_pb2.JobEvent]:
        """Return a run's first `limit` wanted events above a sequence; see the store's method.

        Raises:
            JobNotFoundError, RunNotFoundError: there is no such job or run.
        """
        await self._load(job_id)
        run = self._live.find(job_id)
        number = run_number or run.number
        if number != run.number and number not in await self._store.run_numbers(job_id):
            raise RunNotFoundError(job_id=job_id, run_number=number)
        return await self._store.events(job_id, number, after_sequence, limit, wanted)

    async def watch(
        self, job_id: str, run_number: int, after_sequence: int, *, is_full: bool
    ) -> AsyncIterator[Update]:
        """Yield a run, its events above a sequence, and then all news, until the run has ended.

        The watcher is registered before anything is read, and news is published only once it is stored. So
        nothing is missed, and repeated events are recognised by their sequence.

        Raises:
            JobNotFoundError, RunNotFoundError: there is no such job or run.
            DrainingError: the coordinator is about to stop.
        """
        run = await self._run(job_id, run_number)
        machine = run.machine
        watcher = Watcher(
            WatchState(after_sequence, machine.last_event_sequence, machine.record.has_finished)
        )
        run.watchers.add(watcher)
        try:
            await self._writer.flush()
            fetch = partial(self._store.events, job_id, run.number)
            view = partial(self._live.job, run, is_full=is_full)
            async for update in watcher.follow(view, fetch):
                yield update
        finally:
            run.watchers.discard(watcher)

    async def _load(self, job_id: str, *, may_be_unreadable: bool = False) -> None:
        """Load a job whose latest run is archived; it stays in memory until the next call of `evict`.

        Raises:
            JobUnreadableError: the job can't be read, and `may_be_unreadable` is not set.
            ServedElsewhereError: another coordinator serves it.
        """
        self._live.fleet.check_job(job_id)
        while self._live.get(job_id) is None and job_id not in self._live.unreadable:
            if job_id in self._being_deleted:
                await self._writer.flush()
            deletion_count = self._deletion_count
            numbers = await self._store.run_numbers(job_id)
            stored = await self._store.load_ended_run(job_id, numbers[0]) if numbers else None
            requests = await self._store.known_requests(job_id) if numbers else {}
            if deletion_count != self._deletion_count:
                continue  # the rows may have been deleted since
            # The job may have been loaded meanwhile, or a new run of it may not be stored yet.
            if stored is not None and self._live.get(job_id) is None:
                self._live.load_run(stored)
                self._requests[job_id] = dict(requests.get(job_id, {}))
            break
        if not may_be_unreadable:
            self._live.check_readable(job_id)

    def evict(self, retention: Retention, now_s: float) -> None:
        """Drop the runs from memory that ended too long ago; the store keeps their reports."""
        finished = [
            (run.machine.record.finish_time_s, run)
            for run in self._live
            if isinstance(run.machine, RunSnapshot) and run.machine.record.finish_time_s is not None
        ]
        finished.sort(key=lambda pair: pair[0], reverse=True)
        for later_count, (finish_time_s, run) in enumerate(finished):
            if not run.watchers and retention.is_run_due(finish_time_s, later_count, now_s):
                self._live.forget(run)
                self._requests.pop(run.job_id, None)

    async def _run(self, job_id: str, run_number: int) -> LiveRun:
        """Return a run: the live one, or an ended one from the store."""
        await self._load(job_id)
        run = self._live.find(job_id)
        if run_number in (LATEST, run.number):
            return run
        await self._writer.flush()  # A run that has just ended may not be stored yet.
        stored = await self._store.load_ended_run(job_id, run_number)
        if stored is None:
            raise RunNotFoundError(job_id=job_id, run_number=run_number)
        if isinstance(stored, UnreadableJob):
            raise JobUnreadableError(job_id=job_id, run_number=run_number, cause=stored.cause)
        stored.job.epoch = self._live.epoch
        return LiveRun(stored)


def _latest_run(run: LiveRun | None, spec: JobSpec) -> runs.LatestRun | None:
    """Return how a job's latest run, if there is one, compares with a specification."""
    if run is None:
        return None
    machine = run.machine
    return runs.LatestRun(
        machine.run_number, machine.record.has_finished, machine.has_live_rank, machine.spec.difference(spec)
    )


def _layers(spec: JobSpec, pipeline: Pipeline) -> list[int]:
    """Return the layers of a specification in the order of the model."""
    if not spec.stage_layers or not all(spec.stage_layers):
        raise LayersUnknownError(job_id=spec.job_id)
    return [spec.stage_layers[stage][chunk] for path in pipeline.schedule.paths for stage, chunk in path]


def _has_failed(work: asyncio.Task[frontier_pb2.Rebalancing]) -> bool:
    return work.done() and (work.cancelled() or work.exception() is not None)
