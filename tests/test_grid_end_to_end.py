"""A load target by MQTT, two jobs in real processes under it, and all that the door says of that."""

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

from perseus.grid.contract.messages import moment
from tests.grid.brokers import Heard, MqttBroker, running
from tests.grid.contract.contract_schemas import CONTRACT, problems
from tests.grid.doors import NAME, DoorProcess
from tests.grid.isv import Sender, target_of
from tests.service.grpc_fakes import Client
from tests.small_jobs import JOBS, mean_power_w, power_w, training, until, until_planned

TARGET_S = 45.0
MOST_SECONDS = 5.0
"""From the message until what is drawn is under the target; there is no ramp."""


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


@pytest.mark.timeout(500)
async def test_a_load_target_of_less_by_30_percent_is_kept_told_and_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSEUS_COORDINATOR_FEEDS", json.dumps({"default": {"limit_w": 5000}}))
    async with AsyncExitStack() as stack:
        first, address = stack.enter_context(training(tmp_path, *JOBS))
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

        await until_planned(client, *JOBS)
        before_w = await mean_power_w(client, 5.0, *JOBS)
        limit_w = 0.7 * before_w
        sent_s = time.time()
        interval = {"end_time": moment(sent_s + TARGET_S)}
        sent = isv.envelope(sent_s, {"targets": [target_of(limit_w, interval=interval)]})
        await mqtt.publish(isv.topic, json.dumps(sent), qos=1)

        async def is_under() -> bool:
            return await power_w(client, *JOBS) <= limit_w

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
        under_w = await mean_power_w(client, 15.0, *JOBS)
        print(f"mean of 15 s under it: {under_w:.0f} W")
        assert under_w <= 1.02 * limit_w

        def is_over(envelope: dict[str, Any], data: dict[str, Any]) -> bool:
            return bool(feed(data)["event"] == "end_ramp_up")

        told = feed(await heard.status(is_over, "the end is told", TARGET_S))
        assert told["compliant"]
        assert told["targets"] == []

        async def is_back() -> bool:
            return await power_w(client, *JOBS) >= 0.95 * before_w

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
