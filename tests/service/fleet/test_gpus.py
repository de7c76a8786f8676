"""A GPU runs one rank: the index against a plain search, and the refusal over gRPC."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.errors import GpuAlreadyServedError
from perseus.service.domain.gpu_claims import Place
from perseus.service.domain.principals import Grant, Principal, Scope
from perseus.service.domain.specification import Coordinates
from perseus.service.fleet.gpus import GpuIndex
from perseus.v1 import agent_service_pb2, job_service_pb2, rank_pb2
from tests.service.grpc_fakes import ALL_PLACES, TIMEOUT_S, FakeAgent, connected, make_settings

places = st.tuples(
    st.sampled_from(["a", "b"]), st.builds(Coordinates, st.just(0), st.integers(0, 1), st.just(0))
)
gpus = st.sampled_from(["GPU-0", "GPU-1", "GPU-2"])
steps = st.lists(st.tuples(st.sampled_from(["join", "leave"]), places, gpus), max_size=30)


@given(steps, st.sampled_from(["token mine", ""]))
def test_a_rank_is_refused_only_if_another_live_rank_of_its_principal_is_on_its_gpu(
    steps: list[tuple[str, Place, str]], claimant: str
) -> None:
    other_user = Principal("token theirs", Grant(Scope.AGENT, ("c-*",)))
    live: dict[Place, str] = {}
    index = GpuIndex(
        lambda job_id, rank, gpu: 3.0 if live.get((job_id, rank)) == gpu else None, lambda *_: ""
    )
    mine = Principal("token mine", Grant(Scope.AGENT, ("a", "b")))
    for what, place, gpu in steps:
        if what == "leave":
            live.pop(place, None)
            continue
        others = [other for other, own in live.items() if own == gpu and other != place]
        if others:
            ((job_id, rank),) = others
            with pytest.raises(
                GpuAlreadyServedError, match=f"stage {rank.stage}, tensor 0 of job '{job_id}'"
            ) as caught:
                index.check(mine, *place, gpu)
            assert caught.value.lease_left_s == 3.0
            index.check(other_user, *place, gpu)  # another principal's claim blocks nothing
        else:
            index.check(mine, *place, gpu)
            live[place] = gpu
            index.put(claimant, *place, gpu)
        assert len(index) <= 4


def joined_on(agent: FakeAgent, place: Coordinates, gpu_uuid: str) -> agent_service_pb2.RankJoined:
    message = agent.joined(agent.ranks[place])
    message.gpu.uuid = gpu_uuid
    return message


async def answer(agent: FakeAgent, message: agent_service_pb2.RankJoined) -> str:
    """Announce a rank; return the reason of its refusal, "" if it is served."""
    before = len(agent.accepted), len(agent.refused)
    await agent.send(rank_joined=message)
    await agent.until(lambda: (len(agent.accepted), len(agent.refused)) != before)
    return agent.refused[-1].reason if len(agent.refused) > before[1] else ""


async def test_one_gpu_serves_one_rank_of_one_job_until_that_has_left(tmp_path: Path) -> None:
    first, second = ALL_PLACES[:2]
    async with connected(make_settings(tmp_path, lease_s=2.0)) as client:
        await client.register()
        await client.register(job_id="other")
        agent = FakeAgent(client, "agent", ALL_PLACES)
        elsewhere = FakeAgent(client, "elsewhere", ALL_PLACES, job_id="other")
        await agent.hello()
        await elsewhere.hello()
        assert await answer(agent, joined_on(agent, first, "GPU-X")) == ""
        assert await answer(agent, joined_on(agent, second, "GPU-X")) == "GPU_ALREADY_SERVED"
        assert await answer(elsewhere, joined_on(elsewhere, first, "GPU-X")) == "GPU_ALREADY_SERVED"
        refused = elsewhere.refused[-1]
        assert (refused.metadata["job_id"], refused.metadata["gpu_uuid"]) == ("job", "GPU-X")
        assert 0 < refused.lease_left_s <= 2.0
        assert await answer(agent, joined_on(agent, first, "GPU-X")) == "", "the same rank again"

        # It leaves, and another rank gets the GPU.
        left = agent_service_pb2.RankLeft(
            job_id="job",
            rank=agent.place(first),
            reason=rank_pb2.RANK_LEFT_REASON_TRAINER_GONE,
        )
        await agent.send(rank_left=left)
        assert await answer(agent, joined_on(agent, second, "GPU-X")) == ""
        assert await answer(agent, joined_on(agent, first, "GPU-X")) == "GPU_ALREADY_SERVED"

        # It moves to another GPU, and the old one is free.
        assert await answer(agent, joined_on(agent, second, "GPU-Y")) == ""
        assert await answer(elsewhere, joined_on(elsewhere, first, "GPU-X")) == ""

        # Its job ends, and its GPU is free although it is still connected.
        await client.jobs.FinishJob(job_service_pb2.FinishJobRequest(job_id="other"), timeout=TIMEOUT_S)
        assert await answer(agent, joined_on(agent, first, "GPU-X")) == ""

        # Its agent dies, and its GPU is free when the lease has expired.
        await client.register(job_id="third")
        third = FakeAgent(client, "third", ALL_PLACES, job_id="third")
        await third.hello()
        await agent.end()
        reason = "GPU_ALREADY_SERVED"
        while reason:
            assert reason == "GPU_ALREADY_SERVED"
            reason = await answer(third, joined_on(third, first, "GPU-X"))


async def test_a_restarted_coordinator_knows_which_gpus_are_taken(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    async with connected(settings) as client:
        await client.register()
        agent = FakeAgent(client, "agent", ALL_PLACES)
        await agent.join()
    async with connected(settings) as client:
        await client.register(job_id="other")
        other = FakeAgent(client, "other", ALL_PLACES, job_id="other")
        await other.join()
        assert {refused.reason for refused in other.refused} == {"GPU_ALREADY_SERVED"}
        agent.use(client)
        agent.refused.clear()
        await agent.join()
        assert not agent.refused
