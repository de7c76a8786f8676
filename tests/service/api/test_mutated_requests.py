"""Random messages of an agent: its stream ends as the contract lists or not at all, and nobody else is
affected.

Valid messages are changed at random, field by field, and some in their bytes. They go through the adapter
into a real coordinator with a real store; only the transport is left out.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from perseus.service.api.agent_service import AgentService
from perseus.service.api.authentication import calling
from perseus.service.domain.model import RankFilter, RankState
from perseus.service.domain.principals import ANYBODY
from perseus.service.domain.specification import Coordinates, Registration
from perseus.service.job.machine import JobMachine
from perseus.service.job.rules import Rules
from perseus.service.shell import writer
from perseus.service.shell.coordinator import Coordinator
from perseus.v1 import agent_service_pb2 as wire
from perseus.v1 import computation_pb2
from tests.service.grpc_fakes import TIMEOUT_S, FakeAgent, coordinator_without_api, sent
from tests.service.service_fakes import make_gpu, make_spec
from tests.torture.malformed_messages import extremes

JOB = make_spec(pipelines=2, stages=1, microbatches=1)
RULES = Rules(baseline_iterations=2)
BEGINNING = 4
MINE, THEIRS = Coordinates(0, 0, 0), Coordinates(1, 0, 0)
FORWARD, BACKWARD = computation_pb2.COMPUTATION_KIND_FORWARD, computation_pb2.COMPUTATION_KIND_BACKWARD


class EndedError(Exception):
    pass


class StreamContext:
    """A stream's server side: keeps the written messages; `answered` is set by the answer to a heartbeat."""

    def __init__(self) -> None:
        self.written: list[wire.ConnectResponse] = []
        self.answered = asyncio.Event()
        self.status: grpc.Status | None = None

    async def send_initial_metadata(self, _: object) -> None:
        """Do nothing: nobody reads them."""

    async def write(self, data: bytes) -> None:
        message = wire.ConnectResponse.FromString(data)
        self.written.append(message)
        if message.HasField("heartbeat"):
            self.answered.set()

    async def abort_with_status(self, status: grpc.Status) -> None:
        self.status = status
        raise EndedError

    def done(self) -> bool:
        return False


def joined(rank: Coordinates) -> wire.ConnectRequest:
    gpu = make_gpu(rank)
    described = {"uuid": gpu.uuid, "model": gpu.model, "supported_clocks_mhz": gpu.supported_clocks_mhz}
    return sent(rank_joined=about(rank) | {"gpu": described, "iteration": -1})


def about(rank: Coordinates) -> dict[str, Any]:
    return {"job_id": "job", "rank": FakeAgent.place(rank)}


def telemetry(rank: Coordinates, sequence: int) -> wire.ConnectRequest:
    under_stock = {"plan_version": [0], "is_regular": [True], "clock_event_reasons": [0]}
    iterations = {"iteration": [sequence - 1], "duration_s": [0.5], "energy_j": [50.0], **under_stock}
    identities = {"kind": [FORWARD, BACKWARD], "microbatch": [0, 0], "chunk": [0, 0]}
    measured = {"begin_s": [0.0, 0.1], "duration_s": [0.1, 0.2], "clock_mhz": [0, 0]}
    computations = {"iteration": [sequence - 1] * 2, **identities, **measured}
    energy = {
        "iteration_count": 3,
        "samples": [
            {"kind": FORWARD, "computation_count": 3, "time_s": 0.1, "energy_j": 10.0},
            {"kind": BACKWARD, "computation_count": 3, "time_s": 0.2, "energy_j": 20.0},
        ],
        "blocking_power_w": 60.0,
        "power_information": [3.0, 1.0, 3.0, 1.0, 1.0, 3.0],
        "power_information_vector": [400.0, 400.0, 300.0],
    }
    parts = {"iterations": iterations, "computations": computations, "energy": energy}
    batch = about(rank) | parts | {"sequence": sequence, "clocks": {"set_count": 1}}
    return sent(telemetry=batch)


GPU_ERROR: dict[str, Any] = {"gpu_uuid": "GPU-0-0-0", "reason": 4, "message": "m"}
VALID = [
    joined(MINE),
    telemetry(MINE, BEGINNING + 1),
    sent(rank_left=about(MINE) | {"reason": 2}),
    sent(plan_answer=about(MINE) | {"epoch": "e", "version": 1, "accepted": True}),
    sent(plan_in_force=about(MINE)),
    sent(gpu_error=about(MINE) | GPU_ERROR),
    sent(trainer_unmarked=about(MINE) | {"message": "m"}),
    sent(message_refused={"reason": "R", "field": "f[3]"}),
    sent(power_reading={"duration_s": 1.0, "gpu_uuid": ["GPU-0-0-0", "GPU-x"], "power_w": [90.0, 60.0]}),
    sent(heartbeat={}),
    sent(bundle={"messages": [telemetry(MINE, BEGINNING + 1), {"heartbeat": {}}]}),
    sent(hello={"instance_id": "mine"}),
    sent(goodbye={"reason": "r"}),
]


def mutate(message: Message, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
    """Change one thing somewhere in a message."""
    field = draw(st.sampled_from(list(message.DESCRIPTOR.fields)))
    is_message = field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
    if draw(st.integers(0, 9)) == 0:
        message.ClearField(field.name)
    elif field.is_repeated:
        column = getattr(message, field.name)
        row = draw(st.integers(0, len(column) - 1)) if len(column) else 0
        match draw(st.sampled_from(["change", "append", "remove"])):
            case "remove" if len(column):
                del column[row]
            case "change" if len(column) and is_message:
                mutate(column[row], draw)
            case "change" if len(column):
                column[row] = draw(st.sampled_from(extremes(field)))
            case _ if is_message:
                column.add()
            case _:
                column.append(draw(st.sampled_from(extremes(field))))
    elif is_message:
        part = getattr(message, field.name)
        part.SetInParent()
        mutate(part, draw)
    else:
        setattr(message, field.name, draw(st.sampled_from(extremes(field))))


@st.composite
def requests(draw: Callable[[st.SearchStrategy[Any]], Any]) -> wire.ConnectRequest:
    request = wire.ConnectRequest()
    request.CopyFrom(draw(st.sampled_from(VALID)))
    part = getattr(request, str(request.WhichOneof("message")))
    for _ in range(draw(st.integers(0, 3))):
        if part.DESCRIPTOR.fields:
            mutate(part, draw)
    if draw(st.integers(0, 4)) == 0:
        text = bytearray(request.SerializeToString())
        for _ in range(draw(st.integers(1, 3))):
            text[draw(st.integers(0, len(text) - 1))] = draw(st.integers(0, 255))
        with suppress(DecodeError):  # gRPC itself would refuse that
            request = wire.ConnectRequest.FromString(bytes(text))
    return request


def beginning(rank: Coordinates) -> list[wire.ConnectRequest]:
    """Return a rank's messages until the baseline is measured: then there are offers, with start
    iterations."""
    return [joined(rank), *(telemetry(rank, sequence) for sequence in range(1, BEGINNING + 1))]


async def output_of(coordinator: Coordinator, rank: Coordinates) -> tuple[object, ...]:
    """Return what a job knows of a rank from its own agent."""
    found = next(
        each for _, each in await coordinator.jobs.ranks("job", RankFilter(), 0) if each.coordinates == rank
    )
    return found.state, found.instance_id, found.gpu, found.in_force_version, found.iteration, found.clocks


async def converse(
    coordinator: Coordinator, instance_id: str, output: list[wire.ConnectRequest]
) -> StreamContext:
    """Send all messages on one stream, and wait until they are answered or the stream has ended."""
    context = StreamContext()

    async def speak() -> AsyncIterator[wire.ConnectRequest]:
        yield wire.ConnectRequest(hello=wire.Hello(instance_id=instance_id))
        for request in output:
            yield request
        context.answered.clear()
        yield wire.ConnectRequest(heartbeat=wire.Heartbeat())
        await context.answered.wait()

    async with asyncio.timeout(TIMEOUT_S):
        with suppress(EndedError):
            await AgentService(coordinator.agents, coordinator.quotas).Connect(speak(), context)  # type: ignore[arg-type]
    return context


async def check(path: Path, output: list[wire.ConnectRequest]) -> None:
    async with coordinator_without_api(path, RULES) as coordinator:
        await coordinator.jobs.register(JOB, Registration("one"))
        others = StreamContext()
        over = asyncio.Event()

        async def speak() -> AsyncIterator[wire.ConnectRequest]:
            yield wire.ConnectRequest(hello=wire.Hello(instance_id="theirs"))
            for request in beginning(THEIRS):
                yield request
            yield wire.ConnectRequest(heartbeat=wire.Heartbeat())
            await over.wait()
            others.answered.clear()
            yield telemetry(THEIRS, BEGINNING + 1)
            await coordinator.flush()  # as for an acknowledgement; a heartbeat's answer does not wait for it
            yield wire.ConnectRequest(heartbeat=wire.Heartbeat())
            await others.answered.wait()

        service = AgentService(coordinator.agents, coordinator.quotas)
        theirs = asyncio.create_task(service.Connect(speak(), others))  # type: ignore[arg-type]
        await others.answered.wait()
        await coordinator.flush()
        before = await output_of(coordinator, THEIRS)
        assert before[0] is RankState.CONNECTED

        with capture_logs() as logs:
            context = await converse(coordinator, "mine", [*beginning(MINE), *output])
        assert [line for line in logs if line["log_level"] == "error"] == []
        if context.status is not None:
            assert context.status.details.startswith("Connect: expected hello once")
        await coordinator.flush()
        assert await output_of(coordinator, THEIRS) == before
        for job in coordinator.live:
            assert isinstance(job.machine, JobMachine), "no job is quarantined"
            job.machine.validate()

        over.set()
        await theirs
        assert others.status is None
        kinds = [message.WhichOneof("message") for message in others.written]
        assert "plan_offer" in kinds
        assert "telemetry_refused" not in kinds
        acknowledged = [message.telemetry_ack.sequence for message in others.written]
        assert max(acknowledged) == BEGINNING + 1
    # The stored state can be loaded and continued.
    async with coordinator_without_api(path, RULES) as restarted:
        assert (await output_of(restarted, THEIRS))[1:3] == before[1:3]


def hostile() -> list[wire.ConnectRequest]:
    """Messages that once ended a coordinator, or kept it from starting again."""
    far = joined(MINE)
    far.rank_joined.iteration = 2**63 - 1
    long = telemetry(MINE, BEGINNING + 1)
    long.telemetry.iterations.duration_s[0] = 1e155
    dear = telemetry(MINE, BEGINNING + 2)
    dear.telemetry.iterations.energy_j[0] = 1.7e308
    slow = telemetry(MINE, BEGINNING + 3)
    slow.telemetry.energy.samples[0].time_s = 1e200
    late = telemetry(MINE, BEGINNING + 4)
    late.telemetry.iterations.iteration[0] = 2**63 - 1
    late.telemetry.computations.iteration[:] = [2**63 - 1] * 2
    return [long, dear, slow, late, far]


async def test_formerly_harmful_messages_affect_only_their_sender(tmp_path: Path) -> None:
    with calling(ANYBODY):
        await check(tmp_path / "jobs.db", hostile())


@pytest.mark.slow("every example starts a coordinator and its store twice")
@pytest.mark.timeout(600)
@given(output=st.lists(requests(), min_size=1, max_size=12))
def test_random_messages_of_an_agent_affect_only_itself(
    tmp_path_factory: Any, output: list[wire.ConnectRequest]
) -> None:
    with calling(ANYBODY), patch.object(writer, "GATHERING_S", 0.0):
        asyncio.run(check(tmp_path_factory.mktemp("store") / "jobs.db", output))
