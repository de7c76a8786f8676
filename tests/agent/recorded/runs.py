"""Recorded runs of ranks on a node: messages of trainers, GPUs and the coordinator, and the output.

A run is a list of steps, each with its time: a rank that is served from then on, a packet of its trainer,
what its GPU says, a message of the coordinator's, the end of a stream. `Life` takes them one after another
with the agent's own rank sessions and its own connection logic; only sockets, threads and GPUs are left out.
What goes out is written as it leaves: messages as the contract writes them, clocks, notices to trainers. The
files beside hold both.
"""

import gzip
import json
from pathlib import Path
from typing import Any, cast

from google.protobuf.json_format import MessageToDict, ParseDict

from perseus.agent.claims.decision import Allowed
from perseus.agent.claims.grants import User
from perseus.agent.claims.registry import Claim
from perseus.agent.clocks.sets import ClockSet, ResetClock, ScheduleClock, SetClock
from perseus.agent.energy.counter import CounterChange
from perseus.agent.link.computation import Rank
from perseus.agent.link.packets import Hello, Reply, decode
from perseus.agent.rank import events
from perseus.agent.rank.commands import EstimateEnergy, Send
from perseus.agent.rank.messages import GpuDescription, GpuLimits, Welcome
from perseus.agent.rank.sampling import estimate
from perseus.agent.rank.session import Session
from perseus.agent.sidecar.gpus import AgentCounters
from perseus.agent.sidecar.roster import Roster, Trainer
from perseus.agent.sidecar.settings import AgentSettings
from perseus.agent.sidecar.uplink import Uplink
from perseus.agent.stream import translate
from perseus.v1 import agent_service_pb2 as wire

FILES = Path(__file__).parent / "data"
CLOCKS_MHZ = (1400, 1200, 1000, 800)

Step = dict[str, Any]
_BARE = {
    name: getattr(events, name) for name in ("TrainerGone", "SetNotPermitted", "GpuFailed", "AgentStops")
}


def place_of(rank: Rank) -> list[Any]:
    """Return a rank in the form of steps."""
    return [rank.job_id, rank.pipeline, rank.stage, rank.tensor]


class _Stream:
    """A stream that is open or not; keeps its messages."""

    def __init__(self) -> None:
        self.is_connected = False
        self.out: list[Any] = []

    def send(self, message: Any) -> None:
        if self.is_connected:
            self.out.append({"say": _shown(translate.request(message))})


class _Line:
    """A trainer's end of its connection."""

    def __init__(self, rank: Rank, out: list[Any]) -> None:
        self._rank = rank
        self._out = out

    def reply(self, reply: Reply) -> None:
        self._out.append({"notice": str(self._rank), "ok": reply.ok, "reason": reply.reason})


class _Served:
    """A rank's session, whose GPU the run emulates."""

    def __init__(self, recorded_run: "RecordedRun", session: Session) -> None:
        self.session = session
        self._recorded_run = recorded_run

    @property
    def has_ended(self) -> bool:
        return self.session.has_ended

    def handle(self, event: events.Event) -> None:
        recorded_run, out, place = (
            self._recorded_run,
            self._recorded_run.stream.out,
            place_of(self.session.rank),
        )
        final_messages: list[wire.RankLeft] = []
        for command in self.session.handle(event, recorded_run.now_s):
            match command:
                case SetClock(clock_mhz):
                    out.append({"set_mhz": clock_mhz, "rank": place})
                case ResetClock():
                    out.append({"set_mhz": None, "rank": place})
                case ScheduleClock(clock_mhz, at_s):
                    out.append({"schedule_mhz": clock_mhz, "at_s": at_s, "rank": place})
                case EstimateEnergy(request):
                    if (found := estimate(request)) is not None:
                        self.handle(found)
                case Send(wire.RankLeft() as message):
                    final_messages.append(message)
                case Send(message):
                    recorded_run.uplink.first.coordinator.send(message)
        self.session.validate()
        for message in final_messages:
            recorded_run.uplink.first.coordinator.send(message)


class RecordedRun:
    """A node's ranks, under one agent after another."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        settings = AgentSettings.model_validate({"coordinator": "localhost:1", "token": "t"})
        self.roster = Roster()
        self.uplink = Uplink(settings, self.roster, AgentCounters())
        self.stream = _Stream()
        self.uplink.first.coordinator._connection = cast(Any, self.stream)
        self.now_s = 0.0

    def take(self, step: Step) -> list[Any]:
        """Execute a step and return its output."""
        self.now_s = step["at_s"]
        match step:
            case {"serve": place, "gpu": gpu, **options}:
                self._serve(Rank(*place), gpu, options)
            case {"gone": place}:
                self._end(Rank(*place))
            case {"packet": packet, "rank": place}:
                self.roster.dispatch(Rank(*place), cast(Any, decode(bytes.fromhex(packet))))
            case {"specified": fingerprint, "rank": place}:
                self.roster.dispatch(Rank(*place), events.TrainerSpecified(fingerprint))
            case {"counter": change, "rank": place}:
                self.roster.dispatch(Rank(*place), CounterChange(*change))
            case {"clock_set": done, "rank": place}:
                self.roster.dispatch(Rank(*place), ClockSet(*done))
            case {"power_limit_w": power_limit_w, "rank": place}:
                self.roster.dispatch(Rank(*place), GpuLimits(power_limit_w, (3,)))
            case {"event": name, "rank": place, **arguments}:
                self.roster.dispatch(Rank(*place), _BARE[name](*arguments.get("with", ())))
            case {"tick": _}:
                self.roster.dispatch_to_all(events.Tick())
            case {"hears": message}:
                self._hear(message)
            case {"lost": _}:
                self.stream.is_connected = False
                self.uplink.first.coordinator.disconnected()
            case {"agent": _}:
                self._start()
            case _:
                raise AssertionError(f"no step: {step}")
        went, self.stream.out[:] = list(self.stream.out), []
        return went

    def _serve(self, rank: Rank, gpu: str, options: dict[str, Any]) -> None:
        user = User(1000, "ada")
        claim = Claim(rank, gpu, user, Allowed(is_granted=True, is_running=True))
        hello = Hello(rank, gpu, bool(options["is_registered"]))
        trainer = Trainer(claim, cast(Any, _Line(rank, self.stream.out)), hello, None)
        self.roster.enter(trainer)
        self.uplink.begin(rank)
        session = Session(
            rank,
            GpuDescription(gpu, "A100", CLOCKS_MHZ, GpuLimits(400.0)),
            observe=options["observe"],
            after_sequence=self.uplink.first.coordinator.telemetry_sequence,
            is_registered=options["is_registered"],
            owner="ada",
        )
        served = self.roster.served[rank] = cast(Any, _Served(self, session))
        served.handle(events.TrainerJoined())
        if (lease_s := self.uplink.first.lease_s) is not None:
            served.handle(events.Connected(lease_s))

    def _end(self, rank: Rank) -> None:
        self.roster.dispatch(rank, events.TrainerGone())
        self.roster.served.pop(rank)
        self.roster.leave(self.roster.trainers[rank])
        self.uplink.end(rank)

    def _hear(self, message: dict[str, Any]) -> None:
        output = ParseDict(message, wire.ConnectResponse())
        try:
            heard = translate.response(output)
        except translate.MalformedMessageError as error:
            self.stream.send(error.refused)
            return
        if isinstance(heard, Welcome):
            self.stream.is_connected = True
            self.uplink.first.coordinator.connected(heard)
        else:
            self.uplink.first.coordinator.received(heard)


def _shown(request: wire.ConnectRequest) -> Any:
    return MessageToDict(request, preserving_proto_field_name=True)


def save(name: str, steps: list[tuple[Step, list[Any]]]) -> None:
    """Write a run into its file, one line for each step and its output."""
    FILES.mkdir(exist_ok=True)
    text = "\n".join(json.dumps(step) for step in steps)
    (FILES / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def load(name: str) -> list[tuple[Step, list[Any]]]:
    """Return a run's steps, and the output after each."""
    text = gzip.decompress((FILES / f"{name}.jsonl.gz").read_bytes()).decode()
    return [(step, went) for step, went in map(json.loads, text.splitlines())]
