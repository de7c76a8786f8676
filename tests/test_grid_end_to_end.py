"""Two jobs in real processes: under a load target by MQTT, which the gateway reports; then under a signal."""

import asyncio
import json
import socket
import time
import uuid
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiomqtt
import pytest

from perseus.demo.processes import ENVIRONMENT
from perseus.v1 import job_pb2, job_service_pb2
from tests.grid.brokers import Heard, MqttBroker, running
from tests.grid.contract.contract_schemas import CONTRACT, problems
from tests.grid.gateways import NAME, GatewayProcess
from tests.grid.isv import Sender, target_of
from tests.service.grpc_fakes import Client
from tests.service.shell.test_coordinator_signals import CLEAN, DIRTY, LEAST_CARBON, write
from tests.small_jobs import JOBS, power_w, training, until, until_planned

pytestmark = pytest.mark.slow("real processes train, are planned, and change their plans several times")

STEERED = JOBS[0].job_id


def feed(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = data["feeds"]["default"]
    return found


async def breach_it(heard: Heard, mqtt: aiomqtt.Client, isv: Sender, limit_w: float) -> None:
    """Send an infeasible target, wait for a breach and its hints, and lift it."""
    sent = isv.envelope(time.time(), {"targets": [target_of(limit_w)]})
    await mqtt.publish(isv.topic, json.dumps(sent), qos=1)

    async def is_reported(count: int) -> bool:
        return len(heard.alerts()) >= count

    await until(lambda: is_reported(1), "the breach is reported")
    lifted = isv.envelope(time.time(), {"targets": [target_of(None)]})
    await mqtt.publish(isv.topic, json.dumps(lifted), qos=1)
    await until(lambda: is_reported(2), "its end is reported")
    (active, resolved) = [data for _, data in heard.alerts()]
    assert (active["status"], resolved["status"]) == ("active", "resolved")
    assert active["severity"] == "critical"
    assert active["breach"]["breach_id"] == resolved["breach"]["breach_id"]
    assert active["target"]["correlation_id"] == sent["correlationid"]
    assert active["measured_load"]["value"] > limit_w
    assert [hint["resource_id"] for hint in active["shed_hints"]] == [socket.gethostname()]
    assert active["shed_hints"][0]["action"] == "suspend"
    if CONTRACT.exists():
        for envelope, data in heard.alerts():
            assert problems("PowerBreachAlertEvent", envelope) == []
            assert problems("PowerBreachAlertData", data) == []


async def keep_it(heard: Heard, mqtt: aiomqtt.Client, isv: Sender, client: Client) -> float:
    """Send a target 30 percent below the draw, and then its end; return the draw before it."""
    before_w = await power_w(client, *JOBS)
    limit_w = 0.7 * before_w
    sent = isv.envelope(time.time(), {"targets": [target_of(limit_w)]})
    await mqtt.publish(isv.topic, json.dumps(sent), qos=1)

    def is_kept(envelope: dict[str, Any], data: dict[str, Any]) -> bool:
        return bool(feed(data)["event"] == "end_ramp_down")

    reported = feed(await heard.status(is_kept, "the ramp's end is reported"))
    assert reported["compliant"]
    assert not reported["in_flight"]
    assert reported["calculated_load"]["value"] <= limit_w
    (target,) = reported["targets"]
    assert target["active"]
    assert target["correlation_id"] == sent["correlationid"]

    async def is_under() -> bool:
        return await power_w(client, *JOBS) <= limit_w

    await until(is_under, f"{limit_w:.0f} of {before_w:.0f} W")
    lifted = isv.envelope(time.time(), {"targets": [target_of(None)]})
    await mqtt.publish(isv.topic, json.dumps(lifted), qos=1)

    def is_over(envelope: dict[str, Any], data: dict[str, Any]) -> bool:
        return bool(feed(data)["event"] == "end_ramp_up")

    reported = feed(await heard.status(is_over, "the end is reported"))
    assert reported["compliant"]
    assert reported["targets"] == []
    events = [feed(data)["event"] for _, data in heard.statuses()]
    reported_events = [event for event in events if event != "periodic"]
    assert reported_events[0] in ("target_set", "start_ramp_down")
    assert sorted(reported_events) == sorted(
        ["target_set", "start_ramp_down", "end_ramp_down", "target_set", "start_ramp_up", "end_ramp_up"]
    ), "both messages, and both ways"
    assert events.count("periodic") >= 3, "heartbeats"
    assert heard.alerts() == []
    return before_w


async def steered(client: Client, *, is_slow: bool) -> job_pb2.Job:
    """Wait until a job has the wanted target iteration time, and has trained under it."""
    begun = 0

    async def is_so() -> bool:
        nonlocal begun
        job = await client.job(STEERED)
        if job.signal_target.HasField("iteration_time_s") != is_slow:
            begun = 0
        elif not begun:
            begun = job.signal_target.done_count + 1
        return 0 < begun <= job.signal_target.done_count - 2

    await until(is_so, "the job is slow" if is_slow else "the job is as fast as it can be")
    return await client.job(STEERED)


async def follow_signal(client: Client, csv: Path) -> None:
    """Let a job follow a signal: slower while energy is dirty, and at full speed without a signal."""
    write(csv, DIRTY)
    request = job_service_pb2.SetPolicyRequest(job_id=STEERED, policy=LEAST_CARBON)
    await client.jobs.SetPolicy(request)
    slow = await steered(client, is_slow=True)
    write(csv, CLEAN)
    fast = await steered(client, is_slow=False)
    assert slow.signal_target.value_per_kwh == DIRTY[0]
    assert fast.signal_target.value_per_kwh == CLEAN[0]
    assert slow.max_planned_iteration_time_s > 1.05 * fast.max_planned_iteration_time_s
    assert fast.max_planned_iteration_time_s == pytest.approx(fast.t_min_s, rel=0.01)

    write(csv, DIRTY)
    await steered(client, is_slow=True)
    write(csv, (400.0,), begin_s=time.time() - 86_400)

    async def is_blind() -> bool:
        reported = (await client.job(STEERED)).signal_target
        return reported.state == job_pb2.SIGNAL_TARGET_STATE_NO_SIGNAL and not reported.HasField(
            "iteration_time_s"
        )

    await until(is_blind, "the signal is stale")


@pytest.mark.timeout(1200)
async def test_jobs_keep_a_load_target_report_a_breach_and_follow_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    csv = tmp_path / "carbon.csv"
    grid = {"kind": "carbon", "csv": str(csv), "column": "g"}
    monkeypatch.setitem(ENVIRONMENT, "PERSEUS_COORDINATOR_SIGNALS", json.dumps({"grid": grid}))
    feeds = {"default": {"limit_w": 5000}}
    monkeypatch.setitem(ENVIRONMENT, "PERSEUS_COORDINATOR_FEEDS", json.dumps(feeds))
    async with AsyncExitStack() as stack:
        first, address = stack.enter_context(training(tmp_path, *JOBS))
        broker = stack.enter_context(running(MqttBroker(first.security, tmp_path / "broker.log")))
        gateway = GatewayProcess(
            tmp_path / "gateway", first.security, broker.address, address, HEARTBEAT_S="1"
        )
        isv = Sender(gateway.keys)
        gateway.start()
        stack.callback(gateway.stop)
        channel = await stack.enter_async_context(first.security.channels(address).open())
        client = Client(channel)
        mqtt = await stack.enter_async_context(broker.client(f"isv-{uuid.uuid4()}"))
        await mqtt.subscribe(f"grid/v1/dsx-flex-agent/{NAME}/#", qos=2)
        heard = Heard(mqtt, gateway.key)
        listening = asyncio.create_task(heard.listen())
        stack.callback(listening.cancel)

        await until_planned(client, *JOBS)
        before_w = await keep_it(heard, mqtt, isv, client)
        await breach_it(heard, mqtt, isv, 0.1 * before_w)
        if CONTRACT.exists():
            for envelope, data in heard.statuses():
                assert problems("PowerStateStatusEvent", envelope) == []
                assert problems("PowerStateStatusData", data) == []
        await follow_signal(client, csv)
        first.check()
