"""Messages to a watcher of a large job: events and summaries, and nothing that grows with the number of
ranks."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from perseus.service.domain.specification import Coordinates
from perseus.service.shell import jobs
from perseus.service.shell.watch_state import WatchState
from perseus.v1 import agent_service_pb2, event_pb2, job_service_pb2, rank_pb2
from tests.service.grpc_fakes import Client, FakeAgent, connected, make_settings, spec_message
from tests.service.service_fakes import FakeRank

PIPELINES, STAGES, TENSORS = 4, 8, 8
RANK_COUNT = PIPELINES * STAGES * TENSORS
QUEUE_LIMIT = 64
LIMIT_BYTES = 62_500
JOB_ID = "gpt3-175b-2026"


class Node(FakeAgent):
    """The agent of one node, with names as long as real ones."""

    def __init__(self, client: Client, pipeline: int, stage: int) -> None:
        super().__init__(client, f"{pipeline:02x}{stage:02x}{0:028x}", [], JOB_ID)
        self.hostname = f"gpu-{pipeline:03}-{stage:02}.cluster.internal"
        for tensor in range(TENSORS):
            place = Coordinates(pipeline, stage, tensor)
            self.ranks[place] = FakeRank(place, self.instance_id, ())

    def joined(self, rank: FakeRank) -> agent_service_pb2.RankJoined:
        message = super().joined(rank)
        place = rank.place
        message.gpu.uuid = f"GPU-{place.pipeline:08x}-{place.stage:04x}-{place.tensor:04x}-0000-000000000000"
        message.gpu.model = "NVIDIA A100-SXM4-80GB"
        return message


async def test_a_watcher_through_all_joins_of_a_large_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reader reads along; another begins when everything is over, long after its queue overflowed."""
    monkeypatch.setattr(jobs, "WatchState", partial(WatchState, queue_limit=QUEUE_LIMIT))

    def watch(client: Client) -> AsyncIterator[job_service_pb2.WatchJobResponse]:
        return aiter(client.ask("WatchJob", job_id=JOB_ID))

    spec = spec_message(JOB_ID, PIPELINES, STAGES, microbatches=96)
    spec.parallelism.tensor_count = TENSORS
    async with connected(make_settings(tmp_path, lease_s=3600.0)) as client:
        await client.ask("RegisterJob", spec=spec, request_id="r")
        late = watch(client)
        await anext(late)

        async def read() -> list[job_service_pb2.WatchJobResponse]:
            return [update async for update in watch(client)]

        reading = asyncio.create_task(read())
        for pipeline in range(PIPELINES):
            nodes = [Node(client, pipeline, stage) for stage in range(STAGES)]
            await asyncio.gather(*(node.join() for node in nodes))
        await client.finish(JOB_ID)
        updates = await reading
        for some in (updates, [update async for update in late]):
            assert not any(update.HasField("gap") for update in some)
            assert sum(update.HasField("caught_up") for update in some) == 1
            events = [update.event for update in some if update.HasField("event")]
            assert [event.sequence for event in events] == list(range(1, len(events) + 1))
            assert sum(is_join(event) for event in events) == RANK_COUNT
    size = sum(update.ByteSize() for update in updates)
    snapshots = [update.ByteSize() for update in updates if update.HasField("job")]
    print(f"{size} bytes in {len(updates)} messages, {sum(snapshots)} of them in {len(snapshots)} snapshots")
    assert size < LIMIT_BYTES


def is_join(event: event_pb2.JobEvent) -> bool:
    return event.rank_changed.state == rank_pb2.RANK_STATE_CONNECTED
