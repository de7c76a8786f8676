"""Messages to a watcher of a large job: events and summaries, and nothing that grows with the number of
ranks."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perseus.service.shell import jobs
from perseus.service.shell.watch_state import WatchState
from perseus.v1 import agent_service_pb2, computation_pb2, event_pb2, job_pb2, job_service_pb2, rank_pb2
from perseus.v1.agent_service_pb2 import ConnectRequest, ConnectResponse
from tests.service.grpc_fakes import TIMEOUT_S, Client, connected, make_settings

PIPELINES, STAGES, TENSORS = 4, 8, 8
RANK_COUNT = PIPELINES * STAGES * TENSORS
QUEUE_LIMIT = 64
LIMIT_BYTES = 62_500

SPEC = job_pb2.JobSpec(
    job_id="gpt3-175b-2026",
    parallelism=job_pb2.Parallelism(pipeline_count=PIPELINES, stage_count=STAGES, tensor_count=TENSORS),
    schedule=computation_pb2.Schedule(
        named=computation_pb2.NamedSchedule(
            name=computation_pb2.SCHEDULE_NAME_ONE_FORWARD_ONE_BACKWARD, microbatch_count=96
        )
    ),
)


async def join_node(client: Client, pipeline: int, stage: int) -> Any:
    """Join the ranks of one node as its agent does, with names as long as real ones; return the stream."""
    call = client.agents.Connect()
    instance_id = f"{pipeline:02x}{stage:02x}{0:028x}"
    hello = agent_service_pb2.Hello(
        instance_id=instance_id,
        agent_version="1.0.0",
        hostname=f"gpu-{pipeline:03}-{stage:02}.cluster.internal",
    )
    await call.write(ConnectRequest(hello=hello))
    for tensor in range(TENSORS):
        rank = rank_pb2.RankCoordinates(pipeline=pipeline, stage=stage, tensor=tensor)
        uuid = f"GPU-{pipeline:08x}-{stage:04x}-{tensor:04x}-0000-000000000000"
        gpu = agent_service_pb2.Gpu(
            uuid=uuid, model="NVIDIA A100-SXM4-80GB", supported_clocks_mhz=[1410, 1395]
        )
        joined = agent_service_pb2.RankJoined(job_id=SPEC.job_id, rank=rank, gpu=gpu, iteration=-1)
        await call.write(ConnectRequest(rank_joined=joined))
    accepted = 0
    while accepted < TENSORS:
        message = await call.read()
        assert isinstance(message, ConnectResponse)
        accepted += message.HasField("rank_accepted")
    return call


async def test_a_watcher_through_all_joins_of_a_large_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reader reads along; another begins when everything is over, long after its queue overflowed."""
    monkeypatch.setattr(jobs, "WatchState", partial(WatchState, queue_limit=QUEUE_LIMIT))

    def watch(client: Client) -> AsyncIterator[job_service_pb2.WatchJobResponse]:
        return aiter(
            client.jobs.WatchJob(job_service_pb2.WatchJobRequest(job_id=SPEC.job_id), timeout=TIMEOUT_S)
        )

    async with connected(make_settings(tmp_path, lease_s=3600.0)) as client:
        registration = job_service_pb2.RegisterJobRequest(spec=SPEC, request_id="r")
        await client.jobs.RegisterJob(registration, timeout=TIMEOUT_S)
        late = watch(client)
        await anext(late)

        async def read() -> list[job_service_pb2.WatchJobResponse]:
            return [update async for update in watch(client)]

        reading = asyncio.create_task(read())
        streams: list[Any] = []
        for pipeline in range(PIPELINES):
            nodes = (join_node(client, pipeline, stage) for stage in range(STAGES))
            streams += await asyncio.gather(*nodes)
        await client.jobs.FinishJob(job_service_pb2.FinishJobRequest(job_id=SPEC.job_id), timeout=TIMEOUT_S)
        updates = await reading
        for some in (updates, [update async for update in late]):
            assert not any(update.HasField("gap") for update in some)
            assert sum(update.HasField("caught_up") for update in some) == 1
            events = [update.event for update in some if update.HasField("event")]
            assert [event.sequence for event in events] == list(range(1, len(events) + 1))
            assert sum(is_join(event) for event in events) == RANK_COUNT
        for stream in streams:
            stream.cancel()
    size = sum(update.ByteSize() for update in updates)
    snapshots = [update.ByteSize() for update in updates if update.HasField("job")]
    print(f"{size} bytes in {len(updates)} messages, {sum(snapshots)} of them in {len(snapshots)} snapshots")
    assert size < LIMIT_BYTES


def is_join(event: event_pb2.JobEvent) -> bool:
    return event.rank_changed.state == rank_pb2.RANK_STATE_CONNECTED
