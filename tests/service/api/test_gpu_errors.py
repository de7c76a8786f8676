"""Agents' reports of GPU errors end in the job's event log, whether or not the rank ever joins."""

from typing import Any

import pytest

from perseus.service.api.translate_agents import gpu_error_from_proto
from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.model import GpuErrorReason
from perseus.v1 import agent_service_pb2, event_pb2, rank_pb2
from tests.service.grpc_fakes import Client, FakeAgent

WHY = "nvmlInit: Driver Not Loaded"


def gpu_error(stage: int, reason: int) -> agent_service_pb2.GpuError:
    parts: dict[str, Any] = {"rank": {"stage": stage}, "reason": reason}
    return agent_service_pb2.GpuError(job_id="job", gpu_uuid=f"GPU-{stage}", message=WHY, **parts)


async def test_each_gpu_error_is_one_event(client: Client) -> None:
    agent = FakeAgent(client, places=[])
    await agent.hello()
    lost = gpu_error(1, rank_pb2.GPU_ERROR_REASON_LOST)
    await agent.send(gpu_error=lost)
    await agent.until(lambda: len(agent.refused) == 1)
    assert (agent.refused[0].reason, agent.refused[0].rank) == ("JOB_NOT_FOUND", lost.rank)

    await client.register()
    failed = gpu_error(0, rank_pb2.GPU_ERROR_REASON_DRIVER_FAILED)
    outside = gpu_error(7, rank_pb2.GPU_ERROR_REASON_LOST)
    for error in (lost, lost, failed, outside):
        await agent.send(gpu_error=error)
    await agent.until(lambda: len(agent.messages_refused) == 1)
    assert agent.messages_refused[0].reason == "RANK_OUT_OF_RANGE"
    assert agent.messages_refused[0].rank.stage == 7

    await client.finish()
    events = [event for event in await client.events() if event.type == event_pb2.JOB_EVENT_TYPE_GPU_ERROR]
    assert [event.gpu_error for event in events] == [
        event_pb2.RankGpuError(
            rank=error.rank, gpu_uuid=error.gpu_uuid, reason=error.reason, agent_message=WHY
        )
        for error in (lost, failed)
    ]
    assert "stage 1" in events[0].message
    assert f"lost: {WHY}" in events[0].message


def test_every_reason_of_the_wire_is_known() -> None:
    wire = set(rank_pb2.GpuErrorReason.values()) - {0}
    assert {gpu_error_from_proto(gpu_error(0, reason)).reason for reason in wire} == set(GpuErrorReason)
    with pytest.raises(InvalidFieldError, match=r"gpu_error\.reason"):
        gpu_error_from_proto(gpu_error(0, rank_pb2.GPU_ERROR_REASON_UNSPECIFIED))
