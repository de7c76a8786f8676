"""A load target by MQTT, two jobs in real processes under it, and all that the door says of that."""

import asyncio
import json
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiomqtt
import pytest

from perseus.agent.gpu.physics import A100_SXM, Work
from perseus.demo.cluster import Cluster
from perseus.demo.workload import Workload
from perseus.grid.contract.messages import moment
from perseus.v1 import job_pb2, job_service_pb2
from tests.grid.brokers import Heard, MqttBroker, running
from tests.grid.contract.contract_schemas import CONTRACT, problems
from tests.grid.doors import NAME, DoorProcess
from tests.grid.isv import Sender, target_of
from tests.service.grpc_fakes import Client

FIRST = Workload(
    job_id="first",
    pipeline_count=1,
    stage_weights=(0.7, 1.0),
    microbatch_count=4,
    forward=Work(compute_s=0.018, memory_s=0.004, activity=0.85),
    backward=Work(compute_s=0.038, memory_s=0.008, activity=0.95),
    optimizer_s=0.01,
    gpu=A100_SXM.with_clocks(6),
)
SECOND = replace(FIRST, job_id="second", stage_weights=(1.0, 0.8))
PLANNED_TIMEOUT_S, TIMEOUT_S = 120.0, 40.0
TARGET_S = 45.0
MOST_SECONDS = 5.0
"""From the message until what is drawn is under the target; there is no ramp."""


async def until(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = TIMEOUT_S) -> None:
    begun_s = time.monotonic()
    while not await condition():
        assert time.monotonic() < begun_s + timeout_s, what
        await asyncio.sleep(0.1)


async def power_w(client: Client) -> float:
    """What both jobs drew in their latest iterations."""
    return sum([(await client.job(each.job_id)).figures.power_w for each in (FIRST, SECOND)])


async def mean_power_w(client: Client, duration_s: float) -> float:
    found = []
    ends_s = time.monotonic() + duration_s
    while time.monotonic() < ends_s:
        found.append(await power_w(client))
        await asyncio.sleep(0.25)
    return sum(found) / len(found)


async def are_planned(client: Client) -> bool:
    listed = await client.jobs.ListJobs(job_service_pb2.ListJobsRequest())
    if {job.job_id for job in listed.jobs} != {"first", "second"}:
        return False
    jobs = [await client.job(each.job_id) for each in (FIRST, SECOND)]
    return all(
        job.state == job_pb2.JOB_STATE_PLANNED and job.figures.HasField("mean_iteration_time_s")
        for job in jobs
    )


def feed(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = data["feeds"]["default"]
    return found


async def breach_it(heard: Heard, mqtt: aiomqtt.Client, isv: Sender, limit_w: float) -> None:
    """Send a target that no plan can keep, wait for a breach and its hints, and lift it."""
    sent = isv.envelope(time.time(), {"targets": [target_of(limit_w)]})
    await mqtt.publish(isv.topic, json.dumps(sent), qos=1)

    async def is_told(count: int) -> bool:
        return len(heard.alerts()) >= count

    await until(lambda: is_told(1), "the breach is told")
    lifted = isv.envelope(time.time(), {"targets": [target_of(None)]})
    await mqtt.publish(isv.topic, json.dumps(lifted), qos=1)
    await until(lambda: is_told(2), "its end is told")
    (active, resolved) = [data for _, data in heard.alerts()]
    assert (active["status"], resolved["status"]) == ("active", "resolved")
    assert active["severity"] == "critical"
    assert active["breach"]["breach_id"] == resolved["breach"]["breach_id"]
    assert active["target"]["correlation_id"] == sent["correlationid"]
    assert active["measured_load"]["value"] > 1.2 * limit_w
    assert [hint["resource_id"] for hint in active["shed_hints"]] == [socket.gethostname()]
    assert active["shed_hints"][0]["action"] == "suspend"
    if CONTRACT.exists():
        for envelope, data in heard.alerts():
            assert problems("PowerBreachAlertEvent", envelope) == []
            assert problems("PowerBreachAlertData", data) == []


@pytest.mark.timeout(300)
async def test_a_load_target_of_less_by_30_percent_is_kept_told_and_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSEUS_COORDINATOR_FEEDS", json.dumps({"default": {"limit_w": 5000}}))
    for each in (FIRST, SECOND):
        (tmp_path / each.job_id).mkdir()
    async with AsyncExitStack() as stack:
        first, second = (
            stack.enter_context(Cluster(each, tmp_path / each.job_id, tmp_path / "logs" / each.job_id))
            for each in (FIRST, SECOND)
        )
        address = first.start_coordinator()
        second.security = first.security
        for cluster in (first, second):
            cluster.start_agents(address)
            cluster.start_trainers()
        broker = stack.enter_context(running(MqttBroker(first.security, tmp_path / "broker.log")))
        door = DoorProcess(tmp_path / "door", first.security, broker.address, address, HEARTBEAT_S="5")
        isv = Sender(door.keys)
        door.start()
        stack.callback(door.stop)
        channel = await stack.enter_async_context(first.security.channels(address).open())
        client = Client(channel)
        mqtt = await stack.enter_async_context(broker.client(f"isv-{uuid.uuid4()}"))
        await mqtt.subscribe(f"grid/v1/dsx-flex-agent/{NAME}/#", qos=2)
        heard = Heard(mqtt, door.key)
        listening = asyncio.create_task(heard.listen())
        stack.callback(listening.cancel)

        await until(lambda: are_planned(client), "both jobs are planned", PLANNED_TIMEOUT_S)
        before_w = await mean_power_w(client, 5.0)
        limit_w = 0.7 * before_w
        sent_s = time.time()
        interval = {"end_time": moment(sent_s + TARGET_S)}
        sent = isv.envelope(sent_s, {"targets": [target_of(limit_w, interval=interval)]})
        await mqtt.publish(isv.topic, json.dumps(sent), qos=1)

        async def is_under() -> bool:
            return await power_w(client) <= limit_w

        await until(is_under, f"{limit_w:.0f} of {before_w:.0f} W")
        took_s = time.time() - sent_s
        print(f"{before_w:.0f} W before, target {limit_w:.0f} W, under it after {took_s:.2f} s")
        assert took_s <= MOST_SECONDS

        def is_kept(envelope: dict[str, Any], data: dict[str, Any]) -> bool:
            return bool(feed(data)["event"] == "end_ramp_down")

        told = feed(await heard.status(is_kept, "the ramp's end is told"))
        assert told["compliant"]
        assert not told["in_flight"]
        assert told["calculated_load"]["value"] <= limit_w
        (target,) = told["targets"]
        assert target["active"]
        assert target["correlation_id"] == sent["correlationid"]
        under_w = await mean_power_w(client, 15.0)
        print(f"mean of 15 s under it: {under_w:.0f} W")
        assert under_w <= 1.02 * limit_w

        def is_over(envelope: dict[str, Any], data: dict[str, Any]) -> bool:
            return bool(feed(data)["event"] == "end_ramp_up")

        told = feed(await heard.status(is_over, "the end is told", TARGET_S))
        assert told["compliant"]
        assert told["targets"] == []

        async def is_back() -> bool:
            return await power_w(client) >= 0.95 * before_w

        await until(is_back, f"{before_w:.0f} W are drawn again")
        events = [feed(data)["event"] for _, data in heard.statuses()]
        told_of = [event for event in events if event != "periodic"]
        assert told_of[0] in ("target_set", "start_ramp_down")
        assert sorted(told_of) == sorted(
            ["target_set", "start_ramp_down", "end_ramp_down", "start_ramp_up", "end_ramp_up"]
        )
        assert events.count("periodic") >= 3, "heartbeats"
        assert heard.alerts() == []
        await breach_it(heard, mqtt, isv, 0.1 * before_w)
        if CONTRACT.exists():
            for envelope, data in heard.statuses():
                assert problems("PowerStateStatusEvent", envelope) == []
                assert problems("PowerStateStatusData", data) == []
