"""Agents' reports of GPU errors end in the job's event log, whether or not the rank ever joins."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perseus.service.api.translate_agents import gpu_error_from_proto
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.model import GpuErrorReason
from perseus.v1 import agent_service_pb2, event_pb2, job_service_pb2, rank_pb2
from tests.service.grpc_fakes import TIMEOUT_S, Client, FakeAgent, connected, make_settings


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    async with connected(make_settings(tmp_path)) as client:
        yield client


def gpu_error(stage: int, reason: rank_pb2.GpuErrorReason.ValueType) -> agent_service_pb2.GpuError:
    return agent_service_pb2.GpuError(
        job_id="job",
        rank=rank_pb2.RankCoordinates(stage=stage),
        gpu_uuid=f"GPU-{stage}",
        reason=reason,
        message="nvmlInit: Driver Not Loaded",
    )


async def test_each_gpu_error_is_one_event(client: Client) -> None:
    agent = FakeAgent(client, "agent", [])
    await agent.hello()
    lost = gpu_error(1, rank_pb2.GPU_ERROR_REASON_LOST)
    await agent.send(gpu_error=lost)
    await agent.until(lambda: len(agent.refused) == 1)
    assert (agent.refused[0].reason, agent.refused[0].rank) == ("JOB_NOT_FOUND", lost.rank)

    await client.register()
    for _ in range(2):
        await agent.send(gpu_error=lost)
    await agent.send(gpu_error=gpu_error(0, rank_pb2.GPU_ERROR_REASON_DRIVER_FAILED))
    await agent.send(gpu_error=gpu_error(7, rank_pb2.GPU_ERROR_REASON_LOST))
    await agent.until(lambda: len(agent.messages_refused) == 1)
    assert agent.messages_refused[0].reason == "RANK_OUT_OF_RANGE"
    assert agent.messages_refused[0].rank.stage == 7

    await client.jobs.FinishJob(job_service_pb2.FinishJobRequest(job_id="job"), timeout=TIMEOUT_S)
    watching = client.jobs.WatchJob(job_service_pb2.WatchJobRequest(job_id="job"), timeout=TIMEOUT_S)
    events = [
        update.event
        async for update in watching
        if update.event.type == event_pb2.JOB_EVENT_TYPE_GPU_ERROR and update.HasField("event")
    ]
    assert [event.gpu_error.reason for event in events] == [
        rank_pb2.GPU_ERROR_REASON_LOST,
        rank_pb2.GPU_ERROR_REASON_DRIVER_FAILED,
    ]
    assert events[0].gpu_error == event_pb2.RankGpuError(
        rank=lost.rank, gpu_uuid="GPU-1", reason=lost.reason, agent_message="nvmlInit: Driver Not Loaded"
    )
    assert "stage 1" in events[0].message
    assert "lost: nvmlInit: Driver Not Loaded" in events[0].message


def test_every_reason_of_the_wire_is_known() -> None:
    wire = set(rank_pb2.GpuErrorReason.values()) - {0}
    assert {gpu_error_from_proto(gpu_error(0, reason)).reason for reason in wire} == set(GpuErrorReason)
    with pytest.raises(InvalidFieldError, match=r"gpu_error\.reason"):
        gpu_error_from_proto(gpu_error(0, rank_pb2.GPU_ERROR_REASON_UNSPECIFIED))
