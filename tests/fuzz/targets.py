"""Parsers of untrusted input: each takes any bytes, and refuses them in its own words only."""

import json
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError, Message

from perseus.agent.link import packets
from perseus.agent.link.computation import Computation, Kind, Rank
from perseus.agent.link.packets import (
    ComputationMark,
    Edge,
    EngineHello,
    EngineReport,
    Hello,
    MalformedPacket,
    Membership,
    Registration,
)
from perseus.grid.contract import messages
from perseus.grid.contract.messages import MalformedError
from perseus.service.api import translate_agents, translate_jobs, translate_power
from perseus.service.api.translate_problems import problem_from_proto
from perseus.service.domain.errors import ServiceError
from perseus.service.domain.signals import SignalKind
from perseus.service.signals.csv_file import SignalFileError, read_signal_csv
from perseus.service.web.json_text import from_json
from perseus.serving.errors import ServingError
from perseus.serving.profile_csv import read_profile
from perseus.serving.scrape import parse_metrics
from perseus.simulation.scenario import ScenarioError, read_scenario
from perseus.solver import SolverError, read_profile_csv
from perseus.v1 import frontier_service_pb2, job_service_pb2, power_service_pb2
from perseus.v1.agent_service_pb2 import ConnectRequest
from tests.grid.isv import TRACEPARENT
from tests.torture.malformed_messages import conversation, valid

_FOLDER = Path(tempfile.gettempdir())


@dataclass(frozen=True)
class Target:
    """A parser.

    Attributes:
        parse: takes the bytes.
        refusals: the errors by which it may refuse them; any other is a finding.
        valid: what it accepts, to start from.
    """

    parse: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]
    valid: tuple[bytes, ...]

    def run(self, data: bytes) -> bool:
        """Parse the bytes; return whether they were accepted."""
        try:
            self.parse(data)
        except self.refusals:
            return False
        return True


# ---------------------------------------------------------------------- from agents and clients, over gRPC

_AGENT_MESSAGES: Mapping[str, Callable[[Any], object]] = {
    "hello": translate_agents.check_hello,
    "rank_joined": lambda message: translate_agents.joined_from_proto(message, "instance", "host"),
    "rank_left": lambda message: translate_agents.left_from_proto(message, "instance"),
    "telemetry": lambda message: translate_agents.telemetry_from_proto(message, "instance"),
    "plan_answer": lambda message: translate_agents.answer_from_proto(message, "instance"),
    "plan_in_force": lambda message: translate_agents.in_force_from_proto(message, "instance"),
    "gpu_error": translate_agents.gpu_error_from_proto,
    "trainer_unmarked": translate_agents.unmarked_from_proto,
    "power_reading": translate_agents.reading_from_proto,
}


def _agent_message(data: bytes) -> None:
    message = ConnectRequest.FromString(data)
    kind = message.WhichOneof("message") or ""
    if kind in _AGENT_MESSAGES:
        _AGENT_MESSAGES[kind](getattr(message, kind))


_CALLS: tuple[tuple[type[Message], Callable[[Any], object]], ...] = (
    (job_service_pb2.RegisterJobRequest, lambda request: translate_jobs.spec_from_proto(request.spec)),
    (frontier_service_pb2.SolveRequest, lambda request: problem_from_proto(request.problem)),
    (
        job_service_pb2.SetPolicyRequest,
        lambda request: translate_jobs.policy_from_proto(request.policy),
    ),
    (job_service_pb2.ListJobEventsRequest, translate_jobs.event_filter_from_proto),
    (power_service_pb2.SetBudgetRequest, translate_power.wanted_from_proto),
)


def _call(data: bytes) -> None:
    """The first byte chooses the call."""
    kind, translate = _CALLS[data[0] % len(_CALLS)] if data else _CALLS[0]
    translate(kind.FromString(data[1:]))


def _http(data: bytes) -> None:
    kind, translate = _CALLS[data[0] % len(_CALLS)] if data else _CALLS[0]
    translate(from_json(data[1:], kind))


# ---------------------------------------------------------------------- from the broker, and in files

_ENVELOPE = {
    "specversion": "1.0.2",
    "id": "0af76519-16cd-43dd-8448-eb211c80319c",
    "source": "//grid/v1/isv/acme-energy",
    "type": "grid.loadtarget.set.v1",
    "time": "2026-01-01T00:00:00Z",
    "datacontenttype": "application/json",
    "subject": "loadtarget",
    "traceparent": TRACEPARENT,
    "data": "e30.e30.e30",
}
_TARGETS = {
    "targets": [
        {
            "interval": {"start_time": "2026-01-01T00:00:00Z", "end_time": "2026-01-01T01:00:00Z"},
            "load_constraint": {"value": 5.0, "unit": "kilowatt"},
            "feed_tags": ["a"],
        }
    ]
}


def _grid(data: bytes) -> None:
    """The first byte chooses envelope, content or report."""
    match data[:1], data[1:]:
        case b"e", rest:
            messages.read_envelope(rest, "grid.loadtarget.set.v1")
        case b"t", rest:
            envelope = messages.read_envelope(json.dumps(_ENVELOPE).encode(), "grid.loadtarget.set.v1")
            messages.read_load_targets(envelope, rest)
        case _, rest:
            messages.read_enforcement(rest)


def _in_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    path = _FOLDER / f"fuzz-{uuid.uuid4().hex}-{name}"

    def parse(data: bytes) -> None:
        path.write_bytes(data)
        try:
            read(path)
        finally:
            path.unlink()

    return parse


_PROFILE = b"""stage,instruction,frequency,time,energy
0,forward,1410,0.05,20
0,forward,1200,0.06,18
0,backward,1410,0.09,40
0,backward,1200,0.10,36
"""
_SCENARIO = b"""start = 2022-01-01T00:00:00Z
duration_h = 2
[[jobs]]
job_id = "x"
profile = "x.csv"
microbatches = 4
[[budgets]]
budget_id = "b"
begin_h = 1
limit_w = 1000.0
[[signals]]
kind = "carbon"
file = "c.csv"
column = "g"
"""
_SIGNAL = b"timestamp,g\n2022-01-01T00:00:00Z,300\n2022-01-01T01:00:00Z,\n1640998800,250.5\n"

_METRICS = b"""vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1"} 4.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 5.0
vllm:generation_tokens_total{engine="0"} 120.0
"""
_STEPS = b"""clock_mhz,prefill_tokens,decoding_count,context_tokens,time_s,energy_j
1410,0,0,0,1,60
1410,512,0,2000,0.07,20
705,512,0,2000,0.12,22
705,0,16,8000,0.03,4
"""


TARGETS: Mapping[str, Target] = {
    "engine_metrics": Target(
        lambda data: parse_metrics(data.decode(errors="replace")), (ServingError,), (_METRICS,)
    ),
    "engine_profile": Target(
        lambda data: read_profile(data.decode(errors="replace"), "profile"), (ServingError,), (_STEPS,)
    ),
    "packets": Target(
        packets.decode_all,
        (MalformedPacket,),
        tuple(
            packets.encode(message)
            for message in (
                Hello(Rank("job", 0, 0, 0), "GPU-0"),
                Registration({"job_id": "job", "orders": [[0, 1], [1, 0]]}, "request", "fingerprint"),
                Membership("fingerprint"),
                EngineHello("chat", 0),
                EngineReport(0.25, 3, 0, 0.2, 100, 30, 10, 0.6, {-20: 1}, {-41: 27}),
                ComputationMark(Edge.BEGIN, 1, 0, Computation(Kind.FORWARD, 0, 0), 10**9),
            )
        ),
    ),
    "agent_messages": Target(
        _agent_message,
        (ServiceError, DecodeError),
        tuple(message.SerializeToString() for message in conversation()),
    ),
    "calls": Target(
        _call,
        (ServiceError, SolverError, DecodeError),
        tuple(bytes([number]) + valid(kind).SerializeToString() for number, (kind, _) in enumerate(_CALLS)),
    ),
    "http": Target(
        _http,
        (ServiceError, SolverError),
        (
            b'\0{"spec":{"job_id":"x","parallelism":{"pipeline_count":1,"stage_count":2,"tensor_count":1}}}',
            b"\3{}",
        ),
    ),
    "grid": Target(
        _grid,
        (MalformedError,),
        (b"e" + json.dumps(_ENVELOPE).encode(), b"t" + json.dumps(_TARGETS).encode()),
    ),
    "profile_csv": Target(
        _in_file("profile.csv", lambda path: read_profile_csv(path, 8)), (SolverError,), (_PROFILE,)
    ),
    "scenario": Target(_in_file("scenario.toml", read_scenario), (ScenarioError,), (_SCENARIO,)),
    "scenario_json": Target(
        _in_file("scenario.json", read_scenario),
        (ScenarioError,),
        (
            b'{"start":"2022-01-01T00:00:00Z","duration_h":2,"jobs":[{"job_id":"x","profile":"x.csv","microbatches":4}]}',
        ),
    ),
    "signal_csv": Target(
        _in_file("signal.csv", lambda path: read_signal_csv(path, SignalKind.CARBON, "g")),
        (SignalFileError,),
        (_SIGNAL,),
    ),
}
