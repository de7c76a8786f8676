"""Recorded runs: their inputs with times, and their outputs as agents and clients see them.

A run is a list of steps: its beginning, an input, a restart of the coordinator from its store, or a fault
that quarantines it. `RecordedRun` takes the steps one after another, with a real store between restarts, and
returns the output of each in the contract's messages. The files beside hold both: steps as
`perseus.service.job.recording` writes values, and the outputs at the time of recording.
"""

import dataclasses
import gzip
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from perseus.service.api.translate_agents import max_clock_to_proto, offer_to_proto
from perseus.service.api.translate_jobs import period_to_proto, rank_to_proto
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
from perseus.service.domain.errors import CoordinatorError
from perseus.service.domain.figures import RankColumns
from perseus.service.domain.inputs import Input, TelemetryArrived
from perseus.service.domain.job_power import NO_POWER
from perseus.service.domain.ledger import HourFilter
from perseus.service.domain.messages import timeline_to_proto
from perseus.service.domain.model import FaultyPart, RankFilter
from perseus.service.domain.records import EndedRun, StoredJob
from perseus.service.domain.snapshot import Fault, RunSnapshot
from perseus.service.job import quarantine, views
from perseus.service.job.iterations.iteration_log import report
from perseus.service.job.machine import JobMachine
from perseus.service.job.ranks.rank_table import select
from perseus.service.job.recording import Begun, SolverAnswered, from_json, to_json
from perseus.service.job.run import Run
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import Entry, EventEntry, JobEntry, NewRun
from perseus.v1 import job_pb2
from perseus.v1.agent_service_pb2 import ConnectResponse
from tests.service.service_fakes import refined, solved

FILES = Path(__file__).parent / "data"
FIELDS = FILES / "job_fields.json"


@dataclass(frozen=True)
class Restart:
    """The coordinator is killed, and continues from its store with the same clocks."""


@dataclass(frozen=True)
class Broken:
    """The coordinator fails for the run."""

    part: str
    error: str


@dataclass(frozen=True)
class Step:
    """One thing that happens to a run, at a time of the jobs' clock and of the wall clock."""

    what: Begun | Input | SolverAnswered | Restart | Broken
    now_s: float
    wall_time_s: float


_OWN: dict[str, Any] = {kind.__name__: kind for kind in (Restart, Broken)}


class RecordedRun:
    """A run of a job, and the runs after it, in a store of their own.

    Attributes:
        has_ended: whether one of them has.
    """

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self._run: JobMachine | RunSnapshot | None = None
        self._begun: Begun | None = None
        self._entries: list[Entry] = []
        self._asked: Solve | Refine | None = None
        self.has_ended = False

    async def take(self, step: Step) -> list[Any]:
        """Perform a step; return its output."""
        match step.what:
            case Begun() as begun:
                shown = await self._view() if self._run is not None else []
                run = Run(
                    begun.spec,
                    begun.run_number,
                    begun.rules,
                    begun.epoch,
                    begun.create_time_s,
                    begun.created_s,
                )
                machine = JobMachine(run)
                self._run, self._begun = machine, begun
                self._entries.append(NewRun(begun.spec, begun.run_number, begun.create_time_s))
                return [*shown, *self._take(machine.register(begun.registration, begun.version), step)]
            case Restart():
                shown = await self._view()
                if (ended := await self._ended()) is not None:
                    self._run = ended
                    return [*shown, *await self._view()]
                stored = await self._stored()
                self._run, commands = JobMachine.restore(
                    stored, self._the.rules, self._the.epoch, step.now_s, step.wall_time_s
                )
                return [*shown, *self._take(commands, step), *await self._view()]
            case Broken(part, error):
                shown, stored = await self._view(), await self._stored()
                self._run, commands = quarantine.quarantine(
                    stored,
                    Fault(FaultyPart(part), error),
                    self._the.rules,
                    self._the.epoch,
                    step.wall_time_s,
                )
                return [*shown, *self._take(commands, step), *await self._view()]
            case event:
                return self._give(self._answer() if isinstance(event, SolverAnswered) else event, step)

    def take_telemetry(self, steps: Sequence[Step]) -> list[list[Any]]:
        """Let telemetry arrive together, at the time of the first step; return the output of each."""
        assert isinstance(self._run, JobMachine)
        batches = [step.what for step in steps if isinstance(step.what, TelemetryArrived)]
        answers = list(self._run.handle_telemetry(batches, steps[0].now_s, steps[0].wall_time_s))
        self._run.validate()
        return [
            _refusal(answer) if isinstance(answer, CoordinatorError) else self._take(answer, step)
            for answer, step in zip(answers, steps, strict=True)
        ]

    async def end(self) -> list[Any]:
        """Return the final state of the run, including its store."""
        return await self._view()

    @property
    def _the(self) -> Begun:
        assert self._begun is not None
        return self._begun

    def _give(self, event: Input, step: Step) -> list[Any]:
        assert self._run is not None
        try:
            if isinstance(self._run, JobMachine):
                commands = self._run.handle(event, step.now_s, step.wall_time_s)
                self._run.validate()
            else:
                self._run, commands = quarantine.handle(self._run, event, step.now_s, step.wall_time_s)
        except CoordinatorError as error:
            return _refusal(error)
        return self._take(commands, step)

    def _answer(self) -> Input:
        assert self._asked is not None
        return solved(self._asked) if isinstance(self._asked, Solve) else refined(self._asked.refinement)

    def _take(self, commands: list[Command], step: Step) -> list[Any]:
        job_id, number = self._the.spec.job_id, self._the.run_number
        out = []
        for command in commands:
            match command:
                case Store(record):
                    self._entries.append(JobEntry(job_id, number, record))
                    if isinstance(record, EndedRun) and isinstance(self._run, JobMachine):
                        self._run = views.snapshot(self._run.run, record)
                        self.has_ended = True
                case Announce(event):
                    self._entries.append(EventEntry(job_id, number, event))
                    out.append({"event": _shown(event)})
                case SendOffer(rank, _, offer):
                    lease_s = self._the.rules.lease_s
                    sent = offer_to_proto(job_id, rank, offer, self._the.epoch, lease_s).SerializeToString()
                    out.append({"offer": _shown(ConnectResponse.FromString(sent).plan_offer)})
                case AcceptRank(rank, _, max_clock):
                    out.append({"accepted": str(rank), "max_clock": _shown(max_clock_to_proto(max_clock))})
                case SendMaxClock(rank, _, max_clock):
                    out.append({"limited": str(rank), "max_clock": _shown(max_clock_to_proto(max_clock))})
                case RefuseRank(rank, _, why, max_clock):
                    reported = {"why": type(why).__name__, **why.metadata}
                    out.append(
                        {"refused": str(rank), **reported, "max_clock": _shown(max_clock_to_proto(max_clock))}
                    )
                case EndStream(instance_id):
                    out.append({"ended": instance_id})
                case ReportIteration(summary):
                    out.append({"iteration": _shown(summary)})
                case FindProfile(keys):
                    out.append({"find": list(keys)})
                case Solve() | Refine():
                    self._asked = command
                    out.append({"ask": type(command).__name__})
                case DropSolve():
                    out.append({"ask": "nothing"})
        return out

    async def _stored(self) -> StoredJob:
        await self._write()
        stored = await self._store.load_run(self._the.spec.job_id, self._the.run_number)
        assert isinstance(stored, StoredJob)
        return stored

    async def _ended(self) -> RunSnapshot | None:
        await self._write()
        ended = await self._store.load_ended_run(self._the.spec.job_id, self._the.run_number)
        assert ended is None or isinstance(ended, RunSnapshot)
        return ended

    async def _write(self) -> None:
        entries, self._entries = self._entries, []
        if entries:
            await self._store.write(entries)

    async def _view(self) -> list[Any]:
        """Return the run's public view, and its hours of the ledger."""
        run = self._run
        assert run is not None
        await self._write()
        ledger = [
            {name: value for name, value in to_json(group).items() if name not in ("cost", "carbon")}
            for group in await self._store.ledger(HourFilter())
        ]
        job_id, number, spec = self._the.spec.job_id, self._the.run_number, self._the.spec
        count = spec.parallelism.pipeline_count
        if isinstance(run, JobMachine):
            job, power = views.job(run.run, is_full=True), views.power(run.run)
            ranks, periods = list(run.run.ranks), run.run.log.periods
            columns = views.rank_columns(run.run, 0, count)
        else:
            stored = await self._store.load_ranks(job_id, number, 0, count)
            job, power, lost = run.job, NO_POWER, quarantine.lost(stored)
            ranks = [rank for _, rank in select(spec, lost, RankFilter(), 0)]
            periods = await self._store.load_periods(job_id, number)
            columns = run.columns(0, count) or RankColumns.of_ranks(ranks)
        shown: dict[str, Any] = {
            "job": _shown(job),
            "ranks": [_shown(rank_to_proto(rank)) for rank in ranks],
            "columns": [[str(each) for each in columns.state], *map(list, _figures(columns))],
            "power": {name: getattr(power, name) for name in _POWER},
            "report": [_shown(period_to_proto(*each)) for each in report(periods, 0)],
            "ledger": ledger,
        }
        try:
            timeline = run.timeline(0) if isinstance(run, RunSnapshot) else views.timeline(run.run, 0)
            shown["timeline"] = _shown(timeline_to_proto(timeline))
        except CoordinatorError as error:
            shown["timeline"] = type(error).__name__
        return [{"look": shown}]


_POWER = ("power_w", "iteration_time_s", "is_changing", "is_in_force", "target_time_s", "placement_count")
"""The fields of a run's power that are compared."""


def _refusal(error: CoordinatorError) -> list[Any]:
    return [{"refused": type(error).__name__, **error.metadata}]


def _figures(columns: Any) -> Iterator[Any]:
    for name in ("iteration", "clock_mhz", "slowness", "power_w"):
        yield getattr(columns, name)


def _shown(message: Message | None) -> Any:
    if message is None:
        return None
    return MessageToDict(_without_new_fields(message), preserving_proto_field_name=True)


def fields_of(descriptor: Descriptor, seen: Collection[str] = ()) -> set[str]:
    """Return the full names of the fields of a message and of those in it."""
    names = {field.full_name for field in descriptor.fields}
    for field in descriptor.fields:
        if field.message_type is not None and field.message_type.full_name not in seen:
            names |= fields_of(field.message_type, {*seen, descriptor.full_name})
    return names


_KNOWN_FIELDS = frozenset(json.loads(FIELDS.read_text())) if FIELDS.exists() else None
"""The fields of a job at the time of recording; newer ones are not compared."""


def _without_new_fields(message: Message) -> Message:
    if _KNOWN_FIELDS is None or not isinstance(message, job_pb2.Job):
        return message
    known = job_pb2.Job()
    known.CopyFrom(message)
    parts: list[Any] = [known]
    for part in parts:
        for field, value in part.ListFields():
            if field.full_name not in _KNOWN_FIELDS:
                part.ClearField(field.name)
            elif field.message_type is not None:
                parts += [*value] if field.is_repeated else [value]
    return known


def save(name: str, steps: list[Step], out: list[list[Any]]) -> None:
    """Write a run to its file, one line for each step and its output."""
    FILES.mkdir(exist_ok=True)
    lines = [json.dumps([_step_to_json(step), went]) for step, went in zip([*steps, None], out, strict=True)]
    (FILES / f"{name}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))


def load(name: str) -> tuple[list[Step], list[list[Any]]]:
    """Return a run's steps, the output of each, and the final state."""
    text = gzip.decompress((FILES / f"{name}.jsonl.gz").read_bytes()).decode()
    *found, (_, last) = [json.loads(line) for line in text.splitlines()]
    return [_step_from_json(step) for step, _ in found], [*(went for _, went in found), last]


def _step_to_json(step: Step | None) -> Any:
    if step is None:
        return None
    what = step.what
    own = type(what).__name__ in _OWN
    return [
        {"own": type(what).__name__, **dataclasses.asdict(what)} if own else to_json(what),
        step.now_s,
        step.wall_time_s,
    ]


def _step_from_json(found: Any) -> Step:
    what, now_s, wall_time_s = found
    match what:
        case {"own": kind, **parts}:
            return Step(
                _OWN[str(kind)](**{str(name): part for name, part in parts.items()}), now_s, wall_time_s
            )
    return Step(from_json(what), now_s, wall_time_s)
