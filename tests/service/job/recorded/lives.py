"""Recorded lives of runs: what came in, at which times, and what went out, as agents and clients see it.

A life is a list of steps; each is how a run begins, an input, a restart of the coordinator from its store,
or a fault that quarantines the run. `Life` takes the steps one after another, with a real store between
restarts, and says what goes out of each in the contract's messages. The files beside hold both: steps as
`perseus.service.job.recording` writes values, and what went out when they were recorded.
"""

import dataclasses
import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from perseus.service.api.translate_agents import ceiling_to_proto, offer_to_proto
from perseus.service.api.translate_jobs import (
    job_to_proto,
    period_to_proto,
    rank_to_proto,
    summary_to_proto,
    timeline_to_proto,
)
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
    SendCeiling,
    SendOffer,
    Solve,
    Store,
)
from perseus.service.domain.errors import CoordinatorError
from perseus.service.domain.inputs import Input
from perseus.service.domain.ledger import HourFilter
from perseus.service.domain.model import FaultyPart, RankFilter
from perseus.service.domain.records import StoredJob
from perseus.service.job.machine import JobMachine
from perseus.service.job.quarantine import Fault, QuarantinedRun
from perseus.service.job.recording import Begun, SolverAnswered, from_json, to_json
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import Entry, EventEntry, JobEntry, NewRun
from tests.service.service_fakes import refined, solved

FILES = Path(__file__).parent / "lives"
_TOLERANCE = 1e-9
"""Of figures: processors add up in other orders."""


@dataclass(frozen=True)
class Restart:
    """The coordinator is killed, and goes on from its store: with the same clocks."""


@dataclass(frozen=True)
class Broken:
    """The coordinator fails at the run."""

    part: str
    error: str


@dataclass(frozen=True)
class Step:
    """One thing that happens to a run, at a time of the jobs' clock and of the wall clock."""

    what: Begun | Input | SolverAnswered | Restart | Broken
    now_s: float
    wall_time_s: float


_OWN: dict[str, Any] = {kind.__name__: kind for kind in (Restart, Broken)}


class Life:
    """A run of a job, and the runs after it, in a store of their own."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self._run: JobMachine | QuarantinedRun | None = None
        self._begun: Begun | None = None
        self._entries: list[Entry] = []
        self._asked: Solve | Refine | None = None

    async def take(self, step: Step) -> list[Any]:
        """Let a step happen; return what goes out."""
        match step.what:
            case Begun() as begun:
                shown = await self._look() if self._run is not None else []
                machine = JobMachine(
                    begun.spec,
                    begun.run_number,
                    begun.rules,
                    begun.epoch,
                    begun.create_time_s,
                    begun.created_s,
                )
                self._run, self._begun = machine, begun
                self._entries.append(NewRun(begun.spec, begun.run_number, begun.create_time_s))
                return [*shown, *self._take(machine.register(begun.registration, begun.version), step)]
            case Restart():
                shown = await self._look()
                stored = await self._stored()
                self._run, commands = JobMachine.restore(
                    stored, self._the.rules, self._the.epoch, step.now_s, step.wall_time_s
                )
                return [*shown, *self._take(commands, step), *await self._look()]
            case Broken(part, error):
                shown, stored = await self._look(), await self._stored()
                self._run = QuarantinedRun(
                    stored,
                    Fault(FaultyPart(part), error),
                    self._the.rules,
                    self._the.epoch,
                    step.wall_time_s,
                )
                return [*shown, *self._take(self._run.begin(), step), *await self._look()]
            case event:
                return self._give(self._answer() if isinstance(event, SolverAnswered) else event, step)

    async def end(self) -> list[Any]:
        """Return how the run stands at last, also in the store."""
        return await self._look()

    @property
    def _the(self) -> Begun:
        assert self._begun is not None
        return self._begun

    def _give(self, event: Input, step: Step) -> list[Any]:
        assert self._run is not None
        try:
            commands = self._run.handle(event, step.now_s, step.wall_time_s)
        except CoordinatorError as error:
            return [{"refused": type(error).__name__, **error.metadata}]
        if isinstance(self._run, JobMachine):
            self._run.validate()
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
                    continue
                case Announce(event):
                    self._entries.append(EventEntry(job_id, number, event))
                    out.append({"event": _shown(event)})
                case SendOffer(rank, _, offer):
                    lease_s = self._the.rules.lease_s
                    out.append(
                        {"offer": _shown(offer_to_proto(job_id, rank, offer, self._the.epoch, lease_s))}
                    )
                case AcceptRank(rank, _, ceiling):
                    out.append({"accepted": str(rank), "ceiling": _shown(ceiling_to_proto(ceiling))})
                case SendCeiling(rank, _, ceiling):
                    out.append({"limited": str(rank), "ceiling": _shown(ceiling_to_proto(ceiling))})
                case RefuseRank(rank, _, why, ceiling):
                    told = {"why": type(why).__name__, **why.metadata}
                    out.append({"refused": str(rank), **told, "ceiling": _shown(ceiling_to_proto(ceiling))})
                case EndStream(instance_id):
                    out.append({"ended": instance_id})
                case ReportIteration(summary):
                    out.append({"iteration": _shown(summary_to_proto(summary))})
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

    async def _write(self) -> None:
        entries, self._entries = self._entries, []
        if entries:
            await self._store.write(entries)

    async def _look(self) -> list[Any]:
        """Say what is shown of the run, and what the ledger has of it."""
        run = self._run
        assert run is not None
        await self._write()
        ledger = [to_json(group) for group in await self._store.ledger(HourFilter())]
        columns = run.rank_columns(0, self._the.spec.parallelism.pipeline_count)
        shown: dict[str, Any] = {
            "job": _shown(job_to_proto(run.view())),
            "ranks": [_shown(rank_to_proto(rank)) for _, rank in run.ranks(RankFilter())],
            "columns": [[str(each) for each in columns.state], *map(list, _figures(columns))],
            "power": {name: getattr(run.power(), name) for name in _POWER},
            "report": [_shown(period_to_proto(*each)) for each in run.report(0)],
            "ledger": ledger,
        }
        try:
            shown["timeline"] = _shown(timeline_to_proto(run.timeline(0)))
        except CoordinatorError as error:
            shown["timeline"] = type(error).__name__
        return [{"look": shown}]


_POWER = ("power_w", "iteration_time_s", "is_changing", "is_in_force", "pace_s", "placement_count")
"""Of what power budgets know of a run."""


def _figures(columns: Any) -> Iterator[Any]:
    for name in ("iteration", "clock_mhz", "slowness", "power_w"):
        yield getattr(columns, name)


def _shown(message: Message | None) -> Any:
    if message is None:
        return None
    return MessageToDict(message, preserving_proto_field_name=True)


def differences(expected: Any, found: Any, path: str = "") -> Iterator[str]:
    """Yield where what goes out is another than what was recorded; figures may differ by rounding."""
    match expected, found:
        case (dict(), dict()):
            for name in expected.keys() | found.keys():
                yield from differences(expected.get(name), found.get(name), f"{path}.{name}")
        case (list(), list()) if len(expected) == len(found):
            for index, pair in enumerate(zip(expected, found, strict=True)):
                yield from differences(*pair, f"{path}[{index}]")
        case (float() | int(), float() | int()) if not isinstance(expected, bool):
            if not math.isclose(expected, found, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
                yield f"{path}: expected {expected}, found {found}"
        case _ if expected != found:
            yield f"{path}: expected {expected}, found {found}"


def save(name: str, steps: list[Step], out: list[list[Any]]) -> None:
    """Write a life into its file, one line for each step and what went out."""
    FILES.mkdir(exist_ok=True)
    lines = [json.dumps([_step_to_json(step), went]) for step, went in zip([*steps, None], out, strict=True)]
    (FILES / f"{name}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))


def load(name: str) -> tuple[list[Step], list[list[Any]]]:
    """Return a life's steps, and what went out after each, and at last."""
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
