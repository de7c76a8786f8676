"""Every number of every request has bounds at the API: the contract lists the numbers, field by field.

Each request is valid with all its numbers set; then one number at a time gets an impossible value. It is
refused, and the coordinator continues. A number that is new in the contract fails here until it is set below.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_status import rpc_status

from perseus.service.domain.messages import problem_to_proto
from perseus.v1 import (
    agent_service_pb2,
    clock_statistics_pb2,
    computation_pb2,
    frontier_service_pb2,
    job_pb2,
    job_service_pb2,
    power_service_pb2,
    power_service_pb2_grpc,
)
from perseus.v1.agent_service_pb2 import ConnectRequest
from tests.service.api.test_translate_graphs import example as graph_example
from tests.service.frontiers import FRONTIER
from tests.service.grpc_fakes import ALL_PLACES, TIMEOUT_S, Client, FakeAgent, connected, make_settings

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
"""Numbers whose bounds `test_paging` tests."""

Path_ = tuple[str, ...]


def is_number(field: Any) -> bool:
    return field.cpp_type in INTEGERS or field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE


def declared(descriptor: Descriptor, path: Path_ = ()) -> Iterator[Path_]:
    """Return all numbers of a message, by their path; a bundle's messages also come alone."""
    for field in descriptor.fields:
        if field.name == "bundle":
            continue
        if field.message_type is not None:
            yield from declared(field.message_type, (*path, field.name))
        elif is_number(field):
            yield (*path, field.name)


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


# --- agents' messages
# ----------------------------------------------------------------------------------------


def clocks() -> clock_statistics_pb2.ClockStatistics:
    return clock_statistics_pb2.ClockStatistics(set_count=1, prediction_error_s=0.1)


def output(agent: FakeAgent) -> list[ConnectRequest]:
    """Return one valid message of each kind that has numbers, with all of them set."""
    rank = agent.ranks[ALL_PLACES[0]]
    rank.begin()
    telemetry = agent.telemetry(rank)
    telemetry.clocks.CopyFrom(clocks())
    for column in (
        telemetry.iterations.gap_time_s,
        telemetry.iterations.gap_energy_j,
        telemetry.iterations.gap_slowed_time_s,
        telemetry.iterations.relative_work,
    ):
        column.extend([0.5] * len(telemetry.iterations.iteration))
    telemetry.iterations.capped_clock_mhz.extend([1000] * len(telemetry.iterations.iteration))
    joined = agent.joined(rank)
    joined.gpu.workload_power_profiles.append(7)
    telemetry.foreign_clock.clock_mhz = telemetry.foreign_clock.wanted_clock_mhz = 1000
    telemetry.gpu_limits.power_limit_w = joined.gpu.power_limit_w
    telemetry.gpu_limits.workload_power_profiles.append(7)
    energy = telemetry.energy
    energy.undetermined.append(energy.samples.pop())
    row_count = len(energy.samples) + 2
    energy.power_information.extend([1.0] * (row_count * (row_count + 1) // 2))
    energy.power_information_vector.extend([1.0] * row_count)
    place = agent.place(ALL_PLACES[0])
    return [
        ConnectRequest(rank_joined=joined),
        ConnectRequest(telemetry=telemetry),
        ConnectRequest(rank_left=agent_service_pb2.RankLeft(job_id="job", rank=place, reason=1)),  # type: ignore[arg-type]
        ConnectRequest(
            plan_answer=agent_service_pb2.PlanAnswer(
                job_id="job",
                rank=place,
                epoch="e",
                version=1,
                accepted=True,
                iteration=0,
                refused_clocks_mhz=[1400],
            )
        ),
        ConnectRequest(plan_in_force=agent_service_pb2.PlanInForce(job_id="job", rank=place, iteration=0)),
        ConnectRequest(
            gpu_error=agent_service_pb2.GpuError(job_id="job", rank=place, reason=4, message="m")  # type: ignore[arg-type]
        ),
        ConnectRequest(trainer_unmarked=agent_service_pb2.TrainerUnmarked(job_id="job", rank=place)),
        ConnectRequest(heartbeat=agent_service_pb2.Heartbeat(clock_ahead_s=1.0)),
        ConnectRequest(message_refused=agent_service_pb2.MessageRefused(rank=place)),
        ConnectRequest(
            power_reading=agent_service_pb2.PowerReading(duration_s=1.0, gpu_uuid=["g"], power_w=[90.0])
        ),
    ]


NEVER_ANSWERED = {("message_refused", "rank", name) for name in ("pipeline", "stage", "tensor")}
"""Refusals: they are only logged."""
OF_STREAM = {("hello", "protocol_version"), ("hello", "max_bundle_bytes"), ("hello", "slot")}
OF_COORDINATOR = {
    ("heartbeat", "current_time", "nanos"),
    ("heartbeat", "current_time", "seconds"),
    ("heartbeat", "power_interval_s"),
    ("heartbeat", "savings", "energy_percent"),
    ("heartbeat", "savings", "slowdown_percent"),
}
"""Fields that the coordinator does not read."""


async def test_every_number_of_agents_messages_has_bounds(tmp_path: Path) -> None:
    async with connected(make_settings(tmp_path)) as client:
        await client.register()
        agent = FakeAgent(client, "agent", ALL_PLACES)
        await agent.join()
        bases = output(agent)
        paths = set(declared(ConnectRequest.DESCRIPTOR)) - OF_STREAM - OF_COORDINATOR
        found = {path for base in bases for path in paths if any(holders(base, path))}
        assert found == paths, "set what is missing"
        before = (await client.job()).SerializeToString()
        for base in bases:
            for path in sorted(path for path in paths - NEVER_ANSWERED if any(holders(base, path))):
                for value, message in spoiled(base, path):
                    count = refusals(agent)
                    if path[0] == "telemetry" and path[-1] != "sequence":  # or it counts as taken before
                        agent.sequence += 1
                        message.telemetry.sequence = agent.sequence
                    await agent.send(**{str(message.WhichOneof("message")): getattr(message, path[0])})
                    try:
                        async with asyncio.timeout(TIMEOUT_S):
                            await agent.until(lambda count=count: refusals(agent) > count)  # type: ignore[misc]
                    except TimeoutError:
                        pytest.fail(f"{'.'.join(path)}: {value} was let in")
        assert {refused.reason for refused in agent.messages_refused + agent.telemetry_refused} <= {
            "INVALID_FIELD",
            "RANK_OUT_OF_RANGE",
        }
        assert (await client.job()).SerializeToString() == before
        for _, name in sorted(OF_STREAM):
            for value in (-1, 2**31 - 1, -(2**31)):
                call = client.agents.Connect()
                hello = agent_service_pb2.Hello(instance_id="other")
                setattr(hello, name, value)
                await call.write(ConnectRequest(hello=hello))
                if value < 0:
                    assert await reason(call.read()) == "INVALID_FIELD"
                call.cancel()
        await agent.end()


def refusals(agent: FakeAgent) -> int:
    return len(agent.refused) + len(agent.messages_refused) + len(agent.telemetry_refused)


async def reason(call: Awaitable[object]) -> str:
    """Return the reason of the error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return _reason(caught.value)


# --- clients' requests
# ---------------------------------------------------------------------------------------


def spec(**changes: Any) -> job_pb2.JobSpec:
    return job_pb2.JobSpec(
        job_id="new",
        parallelism=job_pb2.Parallelism(pipeline_count=1, stage_count=1, tensor_count=1),
        **{
            "schedule": computation_pb2.Schedule(
                named=computation_pb2.NamedSchedule(
                    name=computation_pb2.SCHEDULE_NAME_ONE_FORWARD_ONE_BACKWARD,
                    microbatch_count=1,
                )
            ),
            **changes,
        },
    )


def registers() -> list[Message]:
    one = computation_pb2.Computation(kind=computation_pb2.COMPUTATION_KIND_FORWARD)
    back = computation_pb2.Computation(kind=computation_pb2.COMPUTATION_KIND_BACKWARD)
    explicit = computation_pb2.ExplicitSchedule(
        stages=[computation_pb2.StageOrder(computations=[one, back])],
        paths=[computation_pb2.Path(steps=[computation_pb2.PathStep()])],
    )
    policies = [
        job_pb2.OperatingPolicy(max_slowdown_percent=1),
        job_pb2.OperatingPolicy(deadline=job_pb2.Deadline(iteration_count=1, time_s=1)),
        job_pb2.OperatingPolicy(max_average_power_w=1),
        job_pb2.OperatingPolicy(budget_terms=job_pb2.BudgetTerms(tolerance_percent=1, weight=1)),
        *(
            job_pb2.OperatingPolicy(**{rule: job_pb2.LeastSignal(**{time: value})})  # type: ignore[arg-type]
            for rule in ("least_carbon", "least_cost")
            for time, value in signal_times().items()
        ),
    ]
    specs = [spec(policy=policy) for policy in policies]
    specs.append(spec(schedule=computation_pb2.Schedule(explicit=explicit)))
    specs.append(spec(stage_work=[job_pb2.StageWork(layer_counts=[4])]))
    return [job_service_pb2.RegisterJobRequest(spec=each, request_id="r") for each in specs]


def asked() -> list[Message]:
    """Return valid requests with all their numbers set."""
    events = job_service_pb2.ListJobEventsRequest(job_id="job", run_number=1, page_size=1)
    events.start_time.SetInParent()
    events.end_time.SetInParent()
    policies = [each.spec.policy for each in registers() if each.spec.HasField("policy")]  # type: ignore[attr-defined]
    return [
        *registers(),
        *(job_service_pb2.SetPolicyRequest(job_id="job", policy=policy) for policy in policies),
        job_service_pb2.GetJobRequest(job_id="job", run_number=1),
        job_service_pb2.ListJobsRequest(page_size=1),
        job_service_pb2.ListRunsRequest(job_id="job", page_size=1),
        job_service_pb2.ListRanksRequest(job_id="job", pipeline=0, stage=0, page_size=1),
        events,
        job_service_pb2.ReportStragglerRequest(job_id="job", pipeline=0, iteration_time_s=1.0),
        job_service_pb2.ReportStragglerRequest(job_id="job", pipeline=0, slowdown_factor=2.0),
        job_service_pb2.ClearStragglerRequest(job_id="job", pipeline=0),
        job_service_pb2.GetReportRequest(job_id="job", run_number=1, page_size=1),
        job_service_pb2.GetTimelineRequest(job_id="job", pipeline=0),
        job_service_pb2.WatchJobRequest(job_id="job", run_number=1, after_sequence=1),
        frontier_service_pb2.GetPlanRequest(job_id="job", iteration_time_s=1.0),
        frontier_service_pb2.GetRebalancingRequest(job_id="job", layer_counts=[4]),
        *solves(),
        *budgets(),
        power_service_pb2.ListBudgetsRequest(page_size=1),
    ]


def signal_times() -> dict[str, Message]:
    until = job_pb2.WorkUntil(iteration_count=1)
    until.end_time.FromSeconds(4_000_000_000)
    return {"extra_time": job_pb2.ExtraTime(percent=1, horizon_s=7200), "work_until": until}


def budgets() -> list[Message]:
    amounts: list[dict[str, Any]] = [{"limit_w": 1.0}, {"percent": 50.0}]
    made = [
        power_service_pb2.SetBudgetRequest(budget_id="b", request_id="r", ramp_w_per_s=1.0, **amount)
        for amount in amounts
    ]
    for each in made:
        each.start_time.SetInParent()
        each.end_time.FromSeconds(4_000_000_000)
    return [*made]


def solves() -> list[Message]:
    powers_w = tuple({1400: 1.1 * power_w, 700: power_w} for power_w in FRONTIER.pipeline.blocking_power_w)
    problem = replace(FRONTIER.pipeline, blocking_powers_w=powers_w)
    explicit = frontier_service_pb2.SolveRequest(problem=problem_to_proto(problem), point_count=5)
    named = frontier_service_pb2.SolveRequest()
    named.CopyFrom(explicit)
    named.problem.schedule.named.microbatch_count = 1
    named.problem.schedule.named.name = computation_pb2.SCHEDULE_NAME_GPIPE
    graph = frontier_service_pb2.SolveRequest(
        graph=graph_example(), point_count=10, plan_iteration_time_s=11.0
    )
    return [explicit, named, graph]


FAIR_ANSWERS = {
    ("GetJobRequest", "run_number"): "RUN_NOT_FOUND",
    ("ListJobEventsRequest", "run_number"): "RUN_NOT_FOUND",
    ("GetReportRequest", "run_number"): "RUN_NOT_FOUND",
    ("WatchJobRequest", "run_number"): "RUN_NOT_FOUND",
    ("GetPlanRequest", "iteration_time_s"): "JOB_NOT_SOLVED",
    ("WatchJobRequest", "after_sequence"): "",  # no event comes after the highest number, so none is sent
}
"""Numbers that name something: the request fails because it doesn't exist, or succeeds without it."""


def methods(client: Client) -> dict[str, Callable[..., Any]]:
    services = [
        (client.jobs, job_service_pb2.DESCRIPTOR.services_by_name["JobService"]),
        (client.frontiers, frontier_service_pb2.DESCRIPTOR.services_by_name["FrontierService"]),
        (
            power_service_pb2_grpc.PowerServiceStub(client.channel),
            power_service_pb2.DESCRIPTOR.services_by_name["PowerService"],
        ),
    ]
    return {
        method.input_type.name: getattr(stub, method.name)
        for stub, service in services
        for method in service.methods
    }


async def answer(call: Any) -> str:
    """Return the reason of a call's refusal, "" if it is answered."""
    try:
        if hasattr(call, "read"):
            await call.read()
            call.cancel()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return _reason(error)
    return ""


def _reason(error: grpc.aio.AioRpcError) -> str:
    status, info = rpc_status.from_call(error), ErrorInfo()
    assert status is not None, error
    assert status.details[0].Unpack(info)
    return str(info.reason)


async def test_every_number_of_clients_requests_has_bounds(tmp_path: Path) -> None:
    async with connected(make_settings(tmp_path)) as client:
        await client.register()
        stubs = methods(client)
        bases = asked()
        let_in = []
        for name, method in stubs.items():
            own = [base for base in bases if base.DESCRIPTOR.name == name]
            descriptor = _input(name)
            paths = set(declared(descriptor))
            assert {path for base in own for path in paths if any(holders(base, path))} == paths, name
            for path in sorted(paths):
                if path[-1] in CLAMPED:
                    continue
                base = next(each for each in own if any(holders(each, path)))
                for value, message in spoiled(base, path):
                    reported = await answer(method(message, timeout=TIMEOUT_S))
                    fair = FAIR_ANSWERS.get((name, path[-1]))
                    if not reported.startswith(("INVALID_", "PIPELINE_OUT_OF_RANGE", "ITERATION_TIME")) and (
                        fair is None or reported != fair
                    ):
                        let_in.append(f"{name}.{'.'.join(path)}: {value}: {reported or 'let in'}")
        assert let_in == []
        listed = await client.jobs.ListJobs(job_service_pb2.ListJobsRequest(), timeout=TIMEOUT_S)
        assert [job.job_id for job in listed.jobs] == ["job"]


def _input(name: str) -> Any:
    for module in (job_service_pb2, frontier_service_pb2, power_service_pb2):
        if (found := module.DESCRIPTOR.message_types_by_name.get(name)) is not None:
            return found
    raise AssertionError(name)
