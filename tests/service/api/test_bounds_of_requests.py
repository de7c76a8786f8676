"""Every number of every request has bounds at the API: the contract lists the numbers, field by field.

Each request is valid with all its numbers set; then one number at a time gets an impossible value. It is
refused, and the coordinator continues. A number that is new in the contract fails here until it is set below.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from perseus.service.domain.messages import problem_to_proto
from perseus.service.job import progress
from perseus.v1 import computation_pb2, frontier_service_pb2, job_pb2, rank_pb2
from perseus.v1.agent_service_pb2 import ConnectRequest
from tests.service.api.test_translate_graphs import example as graph_example
from tests.service.frontiers import FRONTIER
from tests.service.grpc_fakes import (
    ALL_PLACES,
    METHODS,
    Client,
    FakeAgent,
    joined,
    make_request,
    outcome,
    refusal,
    sent,
    spec_message,
)
from tests.torture.malformed_messages import paths

FLOATS = [math.nan, math.inf, -math.inf, 1.7e308, -1.7e308]
INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: [-(2**31), 2**31 - 1],
    FieldDescriptor.CPPTYPE_INT64: [-(2**63), 2**63 - 1],
}
OF_32_BITS = {
    "set_count",
    "computation_count",
    "late_raise_count",
    "missed_count",
    "iteration_count",
    "window_count",
    "discarded_window_count",
    "dropped_batch_count",
    "clock_event_reasons",
    "set_latency_count",
}
"""Numbers of telemetry whose upper bound is their type's."""
CLAMPED = {"page_size"}
"""Numbers whose bounds `tests/service/shell/test_coordinator_refusals.py` tests."""

Path_ = tuple[str, ...]


def is_number(field: Any) -> bool:
    return field.cpp_type in INTEGERS or field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE


def declared(descriptor: Descriptor) -> set[Path_]:
    """Return all numbers of a message, by their path; a bundle's messages also come alone."""
    numbers = (path for path in paths(descriptor) if is_number(path[-1]) and path[0].name != "bundle")
    return {tuple(field.name for field in path) for path in numbers}


def holders(message: Message, path: Path_) -> Iterator[tuple[Message, Any]]:
    """Return the messages in which the last field of a path is set."""
    field = message.DESCRIPTOR.fields_by_name[path[0]]
    if len(path) == 1:
        is_set = len(getattr(message, path[0])) if field.is_repeated else _is_set(message, field)
        if is_set:
            yield message, field
    elif field.is_repeated:
        for part in list(getattr(message, path[0]))[:1]:
            yield from holders(part, path[1:])
    elif message.HasField(path[0]):
        yield from holders(getattr(message, path[0]), path[1:])


def _is_set(message: Message, field: Any) -> bool:
    return message.HasField(field.name) if field.has_presence else True


def spoiled(base: Message, path: Path_) -> Iterator[tuple[Any, Any]]:
    """Yield the message with every impossible value in one place."""
    ((_, field),) = holders(base, path)
    for value in INTEGERS.get(field.cpp_type, FLOATS):
        if path[0] == "telemetry" and field.name in OF_32_BITS and value == 2**31 - 1:
            continue
        message = type(base)()
        message.CopyFrom(base)
        ((holder, _),) = holders(message, path)
        if field.is_repeated:
            getattr(holder, field.name)[0] = value
        else:
            setattr(holder, field.name, value)
        yield value, message


# ---------------------------------------------------------------------- agents' messages


def output(agent: FakeAgent) -> list[ConnectRequest]:
    """Return one valid message of each kind that has numbers, with all of them set."""
    rank = agent.ranks[ALL_PLACES[0]]
    rank.begin()
    telemetry = agent.telemetry(rank)
    telemetry.clocks.set_count, telemetry.clocks.prediction_error_s = 1, 0.1
    rows = telemetry.iterations
    for column in (rows.gap_time_s, rows.gap_energy_j, rows.gap_slowed_time_s, rows.relative_work):
        column.append(0.5)
    rows.capped_clock_mhz[:] = rows.work[:] = [1000]
    announced = agent.joined(rank)
    announced.gpu.workload_power_profiles.append(7)
    telemetry.foreign_clock.clock_mhz = telemetry.foreign_clock.wanted_clock_mhz = 1000
    telemetry.gpu_limits.power_limit_w = announced.gpu.power_limit_w
    telemetry.gpu_limits.workload_power_profiles.append(7)
    energy = telemetry.energy
    energy.undetermined.append(energy.samples.pop())
    row_count = len(energy.samples) + 2
    energy.power_information.extend([1.0] * (row_count * (row_count + 1) // 2))
    energy.power_information_vector.extend([1.0] * row_count)
    about: dict[str, Any] = {"job_id": "job", "rank": agent.place(ALL_PLACES[0])}
    offer = about | {"epoch": "e", "version": 1, "iteration": 0}
    failed = rank_pb2.GPU_ERROR_REASON_DRIVER_FAILED
    return [
        ConnectRequest(rank_joined=announced),
        ConnectRequest(telemetry=telemetry),
        sent(rank_left=about | {"reason": rank_pb2.RANK_LEFT_REASON_FINISHED}),
        sent(plan_answer=offer | {"accepted": True, "refused_clocks_mhz": [1400]}),
        sent(plan_in_force=about | {"iteration": 0}),
        sent(gpu_error=about | {"reason": failed, "message": "m"}),
        sent(trainer_unmarked=about),
        sent(heartbeat={"clock_ahead_s": 1.0}),
        sent(message_refused={"rank": about["rank"]}),
        sent(power_reading={"duration_s": 1.0, "gpu_uuid": ["g"], "power_w": [90.0]}),
    ]


NEVER_ANSWERED = {("message_refused", "rank", name) for name in ("pipeline", "stage", "tensor")}
"""Refusals: they are only logged."""
OF_STREAM = {("hello", "protocol_version"), ("hello", "max_bundle_bytes"), ("hello", "slot")}
OF_COORDINATOR = {
    ("heartbeat", "current_time", "nanos"),
    ("heartbeat", "current_time", "seconds"),
    ("heartbeat", "power_interval_s"),
    ("heartbeat", "savings", "energy_percent"),
    ("heartbeat", "savings", "energy_margin_percent"),
    ("heartbeat", "savings", "slowdown_margin_percent"),
    ("heartbeat", "savings", "slowdown_percent"),
}
"""Fields that the coordinator does not read."""


async def test_every_number_of_agents_messages_has_bounds(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "NO_PROGRESS_TIMEOUT_S", 3600.0)  # or the job stalls on a slow machine
    agent = await joined(client)
    bases = output(agent)
    bases[0].rank_joined.gpu.uuid = "another"  # or another place would be refused for its GPU
    numbers = declared(ConnectRequest.DESCRIPTOR) - OF_STREAM - OF_COORDINATOR
    found = {path for base in bases for path in numbers if any(holders(base, path))}
    assert found == numbers, "set what is missing"
    before = (await client.job()).SerializeToString()
    let_in = []
    for base in bases:
        for path in sorted(path for path in numbers - NEVER_ANSWERED if any(holders(base, path))):
            for value, message in spoiled(base, path):
                if path[0] == "telemetry" and path[-1] != "sequence":  # or it counts as taken before
                    agent.sequence += 1
                    message.telemetry.sequence = agent.sequence
                agent.clear_refusals()
                if path[0] != "heartbeat":
                    await agent.send(message)
                await agent.beat(message if path[0] == "heartbeat" else None)
                reasons = {each.reason for each in agent.refusals}
                if not reasons or reasons - {"INVALID_FIELD", "RANK_OUT_OF_RANGE"}:
                    let_in.append(f"{'.'.join(path)}: {value}: {agent.refusals or 'let in'}")
    assert let_in == []
    assert (await client.job()).SerializeToString() == before
    for _, name in sorted(OF_STREAM):
        for value in (-1, -(2**31)):
            other = FakeAgent(client)
            await other.send(hello={"instance_id": "other", name: value})
            assert (await refusal(other.reader))[1] == "INVALID_FIELD"


# ---------------------------------------------------------------------- clients' requests


def spec(**changes: Any) -> job_pb2.JobSpec:
    made = spec_message("new", pipelines=1, stages=1, microbatches=1)
    for name, value in changes.items():
        made.ClearField(name)  # type: ignore[arg-type]
        made.MergeFrom(job_pb2.JobSpec(**{name: value}))
    return made


def policies() -> list[job_pb2.OperatingPolicy]:
    until = {"iteration_count": 1, "end_time": {"seconds": 4_000_000_000}}
    rules: list[dict[str, Any]] = [
        {"max_slowdown_percent": 1},
        {"deadline": {"iteration_count": 1, "time_s": 1}},
        {"max_average_power_w": 1},
        {"budget_terms": {"tolerance_percent": 1, "weight": 1}},
        *(
            {rule: signal}
            for rule in ("least_carbon", "least_cost")
            for signal in ({"extra_time": {"percent": 1, "horizon_s": 7200}}, {"work_until": until})
        ),
    ]
    return [job_pb2.OperatingPolicy(**rule) for rule in rules]


def registers() -> list[Message]:
    forward, backward = computation_pb2.COMPUTATION_KIND_FORWARD, computation_pb2.COMPUTATION_KIND_BACKWARD
    order: Any = {"computations": [{"kind": forward}, {"kind": backward}]}
    path: Any = {"steps": [{}]}
    explicit = computation_pb2.ExplicitSchedule(stages=[order], paths=[path])
    specs = [spec(policy=policy) for policy in policies()]
    specs.append(spec(schedule=computation_pb2.Schedule(explicit=explicit)))
    specs.append(spec(stage_work=[job_pb2.StageWork(layer_counts=[4])]))
    return [make_request("RegisterJob", spec=each, request_id="r") for each in specs]


def asked() -> list[Message]:
    """Return valid requests with all their numbers set."""
    run = {"job_id": "job", "run_number": 1}
    pipeline = {"job_id": "job", "pipeline": 0}
    return [
        *registers(),
        *(make_request("SetPolicy", job_id="job", policy=policy) for policy in policies()),
        make_request("GetJob", **run),
        make_request("ListJobs", page_size=1),
        make_request("ListRuns", job_id="job", page_size=1),
        make_request("ListRanks", **pipeline, stage=0, page_size=1),
        make_request("ListJobEvents", **run, page_size=1, start_time={}, end_time={}),
        make_request("ReportStraggler", **pipeline, iteration_time_s=1.0),
        make_request("ReportStraggler", **pipeline, slowdown_factor=2.0),
        make_request("ClearStraggler", **pipeline),
        make_request("GetReport", **run, page_size=1),
        make_request("GetTimeline", **pipeline),
        make_request("WatchJob", **run, after_sequence=1),
        make_request("GetPlan", job_id="job", iteration_time_s=1.0),
        make_request("GetRebalancing", job_id="job", layer_counts=[4]),
        *solves(),
        *budgets(),
        make_request("ListBudgets", page_size=1),
    ]


def budgets() -> list[Message]:
    amounts: list[dict[str, float]] = [{"limit_w": 1.0}, {"percent": 50.0}]
    times = {"start_time": {}, "end_time": {"seconds": 4_000_000_000}}
    named = {"budget_id": "b", "request_id": "r"}
    return [make_request("SetBudget", **named, ramp_w_per_s=1.0, **times, **amount) for amount in amounts]


def solves() -> list[Message]:
    powers_w = tuple({1400: 1.1 * power_w, 700: power_w} for power_w in FRONTIER.pipeline.blocking_power_w)
    problem = replace(FRONTIER.pipeline, blocking_powers_w=powers_w)
    explicit = frontier_service_pb2.SolveRequest(problem=problem_to_proto(problem), point_count=5)
    named = frontier_service_pb2.SolveRequest()
    named.CopyFrom(explicit)
    named.problem.schedule.named.microbatch_count = 1
    named.problem.schedule.named.name = computation_pb2.SCHEDULE_NAME_GPIPE
    graph = make_request("Solve", graph=graph_example(), point_count=10, plan_iteration_time_s=11.0)
    return [explicit, named, graph]


FAIR_ANSWERS = {
    ("GetJob", "run_number"): "RUN_NOT_FOUND",
    ("ListJobEvents", "run_number"): "RUN_NOT_FOUND",
    ("GetReport", "run_number"): "RUN_NOT_FOUND",
    ("WatchJob", "run_number"): "RUN_NOT_FOUND",
    ("GetPlan", "iteration_time_s"): "JOB_NOT_SOLVED",
    ("WatchJob", "after_sequence"): "",  # no event comes after the highest number, so none is sent
}
"""Numbers that name something: the request fails because it doesn't exist, or succeeds without it."""
OF_CLIENTS = ("JobService", "FrontierService", "PowerService")


async def test_every_number_of_clients_requests_has_bounds(client: Client) -> None:
    await client.register()
    bases = asked()
    assert {*OF_CLIENTS} <= {method.containing_service.name for method in METHODS.values()}
    let_in = []
    for name, method in METHODS.items():
        if method.containing_service.name not in OF_CLIENTS:
            continue
        own = [base for base in bases if method.input_type == base.DESCRIPTOR]
        numbers = declared(method.input_type)
        assert {path for base in own for path in numbers if any(holders(base, path))} == numbers, name
        for path in sorted(path for path in numbers if path[-1] not in CLAMPED):
            base = next(each for each in own if any(holders(each, path)))
            for value, message in spoiled(base, path):
                reason, _ = await outcome(client.ask(name, message))
                is_refused = reason.startswith(("INVALID_", "PIPELINE_OUT_OF_RANGE", "ITERATION_TIME"))
                if not is_refused and reason != FAIR_ANSWERS.get((name, path[-1])):
                    let_in.append(f"{name}.{'.'.join(path)}: {value}: {reason or 'let in'}")
    assert let_in == []
    assert [job.job_id for job in (await client.ask("ListJobs")).jobs] == ["job"]
