"""Trainers that mark no iterations are shown with their job, also before it is registered."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from perseus.service.shell.agents import MAX_UNMARKED_COUNT
from perseus.v1 import agent_service_pb2, job_service_pb2, rank_pb2
from tests.service.grpc_fakes import TIMEOUT_S, Client, FakeAgent, connected, make_settings

WHY = "10 optimizer steps without a marked iteration: the attached model is in eval()"


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    async with connected(make_settings(tmp_path)) as client:
        yield client


def unmarked(message: str, stage: int = 0, job_id: str = "job") -> agent_service_pb2.TrainerUnmarked:
    rank = rank_pb2.RankCoordinates(stage=stage)
    return agent_service_pb2.TrainerUnmarked(job_id=job_id, rank=rank, message=message)


async def next_step(client: Client) -> str:
    """Return a job's next step, or the error for an unregistered one."""
    try:
        found = await client.jobs.GetJob(job_service_pb2.GetJobRequest(job_id="job"), timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return found.job.next_step


async def beat(agent: FakeAgent) -> None:
    """Wait until everything that was sent has arrived."""
    agent.received.clear()
    await agent.send(heartbeat=agent_service_pb2.Heartbeat())
    await agent.until(lambda: any(each.HasField("heartbeat") for each in agent.received))


async def test_the_first_rank_without_marks_is_the_next_step_until_it_marks_or_its_agent_is_gone(
    client: Client,
) -> None:
    agent = FakeAgent(client, "agent", [])
    await agent.hello()
    await agent.send(trainer_unmarked=unmarked("another reason", stage=1))
    await agent.send(trainer_unmarked=unmarked(WHY))
    await agent.send(trainer_unmarked=unmarked("of another job", job_id="GPT3"))
    await beat(agent)
    first = f"pipeline 0, stage 0, tensor 0 on host: {WHY}"
    assert await next_step(client) == f"NOT_FOUND: job 'job' is not registered: {first}"

    await client.register()
    assert await next_step(client) == first
    await agent.send(trainer_unmarked=unmarked(""))
    await beat(agent)
    assert await next_step(client) == "pipeline 0, stage 1, tensor 0 on host: another reason"
    await agent.end()
    again = FakeAgent(client, "agent", [])
    await again.hello()
    assert "stage 1" not in await next_step(client)


async def test_one_agents_reports_are_bounded(client: Client) -> None:
    agent = FakeAgent(client, "agent", [])
    await agent.hello()
    for number in range(MAX_UNMARKED_COUNT):
        await agent.send(trainer_unmarked=unmarked(WHY, job_id=f"other-{number}"))
    await agent.send(trainer_unmarked=unmarked(WHY))
    await agent.send(trainer_unmarked=unmarked("x" * 1025))
    await agent.until(lambda: len(agent.messages_refused) == 1)
    assert agent.messages_refused[0].field == "trainer_unmarked.message"
    assert await next_step(client) == "NOT_FOUND: job 'job' is not registered"
