"""The agents' token revoked under a running job, with real processes: said on both sides, and soon over."""

import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from perseus.demo.cluster import Cluster
from perseus.demo.observation import Observer
from perseus.demo.security import AGENTS
from perseus.demo.summary import Measurements
from perseus.v1 import job_pb2, token_service_pb2
from perseus.v1.token_service_pb2_grpc import TokenServiceStub
from tests.test_renewal_end_to_end import START_TIMEOUT_S, logged
from tests.workloads import SMALL

REVOKED_WITHIN_S = 5.0
READMITTED_WITHIN_S = 90.0


def lines(log_dir: Path, name: str) -> list[dict[str, str]]:
    text = (log_dir / f"{name}.log").read_text().splitlines()
    return [json.loads(line) for line in text if line.startswith("{") and line.endswith("}")]


def all_in(folder: Path, pattern: str) -> list[str]:
    return [path.read_text().strip() for path in folder.glob(pattern)]


async def within(limit_s: float, condition: Callable[[], bool], what: str) -> float:
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < limit_s, f"{what}: not within {limit_s} s"
        await asyncio.sleep(0.05)
    return time.monotonic() - began_s


@pytest.mark.timeout(300)
async def test_a_revoked_token_ends_the_agents_streams_and_another_brings_them_back(tmp_path: Path) -> None:
    agents = [f"agent-{pipeline}" for pipeline in range(SMALL.pipeline_count)]
    with (
        tempfile.TemporaryDirectory(prefix="perseus-") as folder,
        Cluster(SMALL, Path(folder), tmp_path, guard_tolerance_percent=1000) as cluster,
    ):
        address = await asyncio.to_thread(cluster.start_coordinator)
        await asyncio.to_thread(cluster.start_agents, address)
        cluster.start_trainers()
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

            request = token_service_pb2.RevokeTokenRequest(name=AGENTS)
            await TokenServiceStub(channel).RevokeToken(request, timeout=30)

            def is_told() -> bool:
                return all(logged(tmp_path, name)["no coordinator"] for name in agents)

            took_s = await within(REVOKED_WITHIN_S, is_told, "the end of the agents' streams")
            for name in agents:
                said = [line["reason"] for line in lines(tmp_path, name) if line["event"] == "no coordinator"]
                assert said[0] == f"UNAUTHENTICATED: token '{AGENTS}' is revoked", (name, took_s)
            refusals = [line for line in lines(tmp_path, "coordinator") if line["event"] == "caller refused"]
            assert refusals
            assert {(line["reason"], line["rpc"]) for line in refusals} == {
                ("TOKEN_REVOKED", "/perseus.v1.AgentService/Connect")
            }

            # With another token they come back by themselves, and nothing that was measured is lost.
            await asyncio.to_thread(cluster.security.admit_agents, address, "more-agents")
            await within(
                READMITTED_WITHIN_S,
                lambda: all(logged(tmp_path, name)["connected"] == 2 for name in agents),
                "the agents with their new token",
            )
            begun = observer.next_whole_iteration
            numbers = range(begun, begun + 5)
            await observer.until(
                "iterations over it", lambda: measurements.are_complete(numbers), READMITTED_WITHIN_S
            )
            following.cancel()
        secrets = all_in(cluster.security.token_file.parent, "*.token")
        await asyncio.to_thread(cluster.stop_training)
        await asyncio.to_thread(cluster.stop_services)
    assert measurements.are_complete(range(first, numbers[-1] + 1)), "every iteration, of every pipeline"
    everything = "".join(all_in(tmp_path, "*.log"))
    assert len(secrets) == 2
    assert not any(secret in everything for secret in secrets)
