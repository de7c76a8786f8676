"""Agents' reports about ranks that may never join: GPU errors, and trainers that mark no iterations."""

from typing import Any

import grpc

from perseus.service.shell.agents import MAX_UNMARKED_COUNT
from perseus.v1 import agent_service_pb2, event_pb2, rank_pb2
from tests.service.grpc_fakes import Client, FakeAgent

WHY = "nvmlInit: Driver Not Loaded"
UNMARKED = "10 optimizer steps without a marked iteration: the attached model is in eval()"


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


async def report(agent: FakeAgent, message: str, stage: int = 0, job_id: str = "job") -> None:
    await agent.send(trainer_unmarked={"job_id": job_id, "rank": {"stage": stage}, "message": message})


async def next_step(client: Client) -> str:
    """Return a job's next step, or the error for an unregistered one."""
    try:
        return (await client.job()).next_step
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"


async def test_the_first_rank_without_marks_is_the_next_step_until_it_marks_or_its_agent_is_gone(
    client: Client,
) -> None:
    agent = FakeAgent(client, places=[])
    await agent.hello()
    await report(agent, "another reason", stage=1)
    await report(agent, UNMARKED)
    await report(agent, "of another job", job_id="GPT3")
    await agent.beat()
    first = f"pipeline 0, stage 0, tensor 0 on host: {UNMARKED}"
    assert await next_step(client) == f"NOT_FOUND: job 'job' is not registered: {first}"

    await client.register()
    assert await next_step(client) == first
    await report(agent, "")
    await agent.beat()
    assert await next_step(client) == "pipeline 0, stage 1, tensor 0 on host: another reason"
    await agent.end()
    again = FakeAgent(client, places=[])
    await again.hello()
    assert "stage 1" not in await next_step(client)


async def test_one_agents_reports_are_bounded(client: Client) -> None:
    agent = FakeAgent(client, places=[])
    await agent.hello()
    for number in range(MAX_UNMARKED_COUNT):
        await report(agent, UNMARKED, job_id=f"other-{number}")
    await report(agent, UNMARKED)
    await report(agent, "x" * 1025)
    await agent.until(lambda: len(agent.messages_refused) == 1)
    assert agent.messages_refused[0].field == "trainer_unmarked.message"
    assert await next_step(client) == "NOT_FOUND: job 'job' is not registered"
