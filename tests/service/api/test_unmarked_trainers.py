"""Trainers that mark no iterations are shown with their job, also before it is registered."""

import grpc

from perseus.service.shell.agents import MAX_UNMARKED_COUNT
from tests.service.grpc_fakes import Client, FakeAgent

WHY = "10 optimizer steps without a marked iteration: the attached model is in eval()"


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
    await report(agent, WHY)
    await report(agent, "of another job", job_id="GPT3")
    await agent.beat()
    first = f"pipeline 0, stage 0, tensor 0 on host: {WHY}"
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
        await report(agent, WHY, job_id=f"other-{number}")
    await report(agent, WHY)
    await report(agent, "x" * 1025)
    await agent.until(lambda: len(agent.messages_refused) == 1)
    assert agent.messages_refused[0].field == "trainer_unmarked.message"
    assert await next_step(client) == "NOT_FOUND: job 'job' is not registered"
