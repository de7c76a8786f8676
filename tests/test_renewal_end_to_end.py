"""Certificates renewed under a running job, with real processes: no iteration and no plan is lost."""

import asyncio
import json
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from perseus.demo.cluster import Cluster
from perseus.demo.observation import Observer
from perseus.demo.summary import Measurements
from perseus.v1 import event_pb2, job_pb2
from tests.workloads import SMALL

START_TIMEOUT_S = 150.0
RENEWAL_TIMEOUT_S = 60.0


def logged(log_dir: Path, name: str) -> Counter[str]:
    """How often a process has logged each event so far."""
    lines = (log_dir / f"{name}.log").read_text().splitlines()
    return Counter(json.loads(line)["event"] for line in lines if line.startswith("{") and line.endswith("}"))


@pytest.mark.timeout(300)
async def test_renewed_certificates_cost_no_iteration(tmp_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="perseus-") as folder,
        Cluster(SMALL, Path(folder), tmp_path, guard_tolerance_percent=1000) as cluster,
    ):
        address = await asyncio.to_thread(cluster.start_coordinator)
        await asyncio.to_thread(cluster.start_agents, address)
        cluster.start_trainers()
        agents = [f"agent-{pipeline}" for pipeline in range(SMALL.pipeline_count)]
        measurements = Measurements(SMALL.pipeline_count)
        async with cluster.security.channels(address).open() as channel:
            observer = Observer(channel, SMALL.job_id, measurements, lambda: None)
            following = asyncio.create_task(observer.follow())
            await observer.until(
                "a plan in force",
                lambda: observer.state == job_pb2.JOB_STATE_PLANNED and observer.is_in_force(),
                START_TIMEOUT_S,
            )
            first = measurements.latest
            event_count = len(observer.events)

            cluster.security.renew_coordinator()
            cluster.security.renew_client()
            await observer.until(
                "a new stream of each agent",
                lambda: all(logged(tmp_path, name)["connected"] == 2 for name in agents),
                RENEWAL_TIMEOUT_S,
            )
            begun = observer.next_whole_iteration
            numbers = range(begun, begun + 5)
            await observer.until(
                "iterations over it", lambda: measurements.are_complete(numbers), RENEWAL_TIMEOUT_S
            )
            assert observer.state == job_pb2.JOB_STATE_PLANNED
            last = numbers[-1]
            following.cancel()

        # The new certificate is what a newcomer gets to see.
        async with cluster.security.channels(address).open() as channel:
            newcomer = Observer(channel, SMALL.job_id, Measurements(SMALL.pipeline_count), lambda: None)
            joining = asyncio.create_task(newcomer.follow())
            await newcomer.until("an answer", lambda: newcomer.job is not None, RENEWAL_TIMEOUT_S)
            joining.cancel()

        await asyncio.to_thread(cluster.stop_training)
        await asyncio.to_thread(cluster.stop_services)

    assert measurements.are_complete(range(first, last + 1)), "every iteration, of every pipeline"
    # Ranks are away and back within a moment; their plans stay what they were.
    kinds = {event.type for event in observer.events[event_count:]}
    assert event_pb2.JOB_EVENT_TYPE_STATE_CHANGED not in kinds
    for name in agents:
        said = logged(tmp_path, name)
        assert said["certificates renewed: going on with a new stream"] == 1
        assert said["certificates reloaded"] == 1
        assert said["no coordinator"] == 0
    assert logged(tmp_path, "coordinator")["certificates reloaded"] == 1
