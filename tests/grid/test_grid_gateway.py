"""A gateway's process between a real broker with TLS and a real coordinator: each message has one answer."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiomqtt
import pytest

from perseus.demo.processes import entries
from perseus.grid.contract.messages import moment
from perseus.v1 import power_service_pb2
from perseus.v1.power_service_pb2_grpc import PowerServiceStub
from tests.grid.brokers import Heard, Mosquitto, MqttBroker, running
from tests.grid.gateways import NAME, CoordinatorProcess, GatewayProcess
from tests.grid.isv import Sender, target_of

if TYPE_CHECKING:
    from perseus.v1.power_service_pb2_grpc import PowerServiceAsyncStub

pytestmark = [
    pytest.mark.slow("processes of a coordinator, a broker and a gateway start, and some of them restart"),
    pytest.mark.timeout(180),
]

FEEDS = {"hall-a": {"hosts": ["a-*"], "limit_w": 1e6}, "hall-b": {"hosts": ["b-*"], "limit_w": 5e5}}


@dataclass
class Site:
    """The processes of a test."""

    coordinator: CoordinatorProcess
    broker: MqttBroker
    gateway: GatewayProcess
    isv: Sender

    @asynccontextmanager
    async def power(self) -> "AsyncIterator[PowerServiceAsyncStub]":
        async with self.coordinator.security.channels(self.coordinator.address).open() as channel:
            yield PowerServiceStub(channel)

    async def budgets(self) -> list[power_service_pb2.Budget]:
        """Return the budgets that have not ended."""
        async with self.power() as power:
            listed = await power.ListBudgets(power_service_pb2.ListBudgetsRequest())
        over = (power_service_pb2.BUDGET_STATE_ENDED, power_service_pb2.BUDGET_STATE_CANCELLED)
        return [budget for budget in listed.budgets if budget.state not in over]

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[tuple[aiomqtt.Client, Heard]]:
        """Yield the energy provider's client, and everything that the gateway publishes meanwhile."""
        async with self.broker.client(f"isv-{uuid.uuid4()}") as client:
            await client.subscribe(f"grid/v1/dsx-flex-agent/{NAME}/#", qos=2)
            heard = Heard(client, self.gateway.key)
            listening = asyncio.create_task(heard.listen())
            try:
                yield client, heard
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)

    async def send(self, client: aiomqtt.Client, envelope: Mapping[str, Any]) -> None:
        await client.publish(self.isv.topic, json.dumps(envelope), qos=1)


@contextmanager
def site_with(tmp_path: Path, kind: type[MqttBroker]) -> Iterator[Site]:
    coordinator = CoordinatorProcess(tmp_path / "coordinator", FEEDS)
    try:
        coordinator.launch()
        with running(kind(coordinator.security, tmp_path / "broker.log")) as broker:
            coordinator.logged("listening")
            gateway = GatewayProcess(
                tmp_path / "gateway", coordinator.security, broker.address, coordinator.address
            )
            isv = Sender(gateway.keys)
            gateway.start()
            yield Site(coordinator, broker, gateway, isv)
            assert gateway.stop() == 0
    finally:
        coordinator.kill()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with site_with(tmp_path, MqttBroker) as made:
        yield made


def of(correlation_id: str) -> Any:
    return lambda envelope, _: envelope.get("correlationid") == correlation_id


async def until_it_is_published(site: Site, client: aiomqtt.Client, heard: Heard) -> None:
    """Check that a target becomes a budget and is reported under its correlation identifier."""
    now_s = time.time()
    targets = [
        target_of(700e3, feed_tags=["hall-a"], interval={"end_time": moment(now_s + 600)}),
        {
            "interval": {"start_time": moment(now_s + 3600), "end_time": moment(now_s + 7200)},
            "load_constraint": {"value": 0.3, "unit": "megawatt"},
        },
    ]
    sent = site.isv.envelope(now_s, {"targets": targets}, tracestate="acme=1")
    correlation_id = sent["correlationid"]
    await site.send(client, sent)
    reported = await heard.status(of(correlation_id), "a snapshot for the target")
    assert reported["feeds"]["hall-a"]["event"] == "target_set"
    assert [target["active"] for target in reported["feeds"]["hall-a"]["targets"]] == [True, False]
    assert [target["load_constraint"] for target in reported["feeds"]["hall-b"]["targets"]] == [
        {"value": 0.3, "unit": "megawatt"}
    ]
    (envelope, _) = next(each for each in heard.statuses() if of(correlation_id)(*each))
    assert envelope["traceparent"].split("-")[1] == sent["traceparent"].split("-")[1]
    assert envelope["traceparent"] != sent["traceparent"]
    assert envelope["tracestate"] == "acme=1"
    found = [(budget.feed, budget.limit_w, budget.correlation_id) for budget in await site.budgets()]
    assert sorted(found) == [
        ("hall-a", 300e3, correlation_id),
        ("hall-a", 700e3, correlation_id),
        ("hall-b", 300e3, correlation_id),
    ]


async def test_every_message_has_one_answer(site: Site) -> None:
    """Signed but invalid messages get a snapshot under their identifier, unverified ones a log line.

    A message is unverified, too, if its source is not the sender whose topic it is on. What makes a message
    invalid is tested with the state machine and the contract's messages.
    """
    async with site.listening() as (client, heard):
        await until_it_is_published(site, client, heard)
        lifted = site.isv.envelope(time.time(), {"targets": [target_of(None)]})
        await site.send(client, lifted)
        await heard.status(of(lifted["correlationid"]), "the end of the first ones is reported")
    now_s = time.time()
    isv, other_user = site.isv, Sender(site.gateway.keys.parent / "elsewhere")
    good = {"targets": [target_of(7e5)]}
    accepted = isv.envelope(now_s, good)
    refused = isv.envelope(now_s, {"targets": [target_of(1, feed_tags=["cellar"])]})
    unsigned = isv.envelope(now_s, good, data=other_user.signed(good))
    forged = Sender(site.gateway.keys, "volt").envelope(now_s, good)
    last = isv.envelope(now_s, {"targets": [target_of(6e5, feed_tags=["hall-b"])]})
    async with site.listening() as (client, heard):
        await site.send(client, accepted)
        await heard.status(of(accepted["correlationid"]), "the target is reported")
        for sent in (refused, accepted, unsigned, forged):
            await site.send(client, sent)
        await client.publish(isv.topic, b"no json", qos=1)
        await site.send(client, last)
        await heard.status(of(last["correlationid"]), "the last one is reported")
        reported = [
            (envelope.get("correlationid"), data)
            for envelope, data in heard.statuses()
            if not any("ramp" in feed["event"] for feed in data["feeds"].values())  # it answers no message
        ]
        ids = [correlation_id for correlation_id, _ in reported]
        counts = [ids.count(sent["correlationid"]) for sent in (refused, accepted, unsigned, forged)]
        assert counts == [1, 2, 0, 0], "a duplicate is reported again"
        ((_, data),) = (each for each in reported if each[0] == refused["correlationid"])
        targets = [target["correlation_id"] for target in data["feeds"]["hall-a"]["targets"]]
        assert refused["correlationid"] not in targets
    lines = entries(site.gateway.log)
    _, _, first, unknown, *others = [line["verdict"] for line in lines if line["event"] == "load targets"]
    assert [first, *others] == ["accepted", "accepted before", "accepted"]
    assert "a feed that is not served" in unknown
    reasons = [line["reason"] for line in lines if line["event"] == "message refused"]
    wanted = ("expected a signature by", "source: expected //grid/v1/isv/acme-energy", "expected JSON")
    for each, reason in zip(wanted, reasons, strict=True):
        assert each in reason
    limits = {(budget.feed, budget.limit_w) for budget in await site.budgets()}
    assert limits == {("hall-a", 7e5), ("hall-b", 6e5)}


async def test_nothing_is_lost_or_applied_twice_when_gateway_and_broker_and_coordinator_are_killed(
    site: Site,
) -> None:
    async with site.listening() as (client, heard):
        first = site.isv.envelope(time.time(), {"targets": [target_of(7e5, feed_tags=["hall-a"])]})
        await site.send(client, first)
        await heard.status(of(first["correlationid"]), "the first target is reported")
        (before,) = await site.budgets()

        # While the gateway is down, messages wait in its session with the broker.
        site.gateway.kill()
        second = site.isv.envelope(time.time(), {"targets": [target_of(4e5, feed_tags=["hall-b"])]})
        for _ in range(2):
            await site.send(client, second)
        site.gateway.start()
        await heard.status(of(second["correlationid"]), "the message that arrived meanwhile is reported")
    (again, other) = sorted(await site.budgets(), key=lambda budget: budget.feed)
    assert (again, other.limit_w) == (before, 4e5), "the existing budget is unchanged"

    # Budgets for messages accepted while the coordinator is down are requested when it is back.
    site.coordinator.kill()
    site.gateway.wait_for("no coordinator")
    async with site.listening() as (client, heard):
        accepted = site.gateway.count("load targets")
        third = site.isv.envelope(time.time(), {"targets": [target_of(6e5, feed_tags=["hall-a"])]})
        await site.send(client, third)
        site.gateway.wait_for("load targets", accepted + 1)
        site.gateway.kill()
        site.coordinator.start()
        site.gateway.start()
        await heard.status(
            lambda _, data: any(
                target["correlation_id"] == third["correlationid"] and target["active"]
                for target in data["feeds"]["hall-a"]["targets"]
            ),
            "the third target is enforced",
        )
    found = sorted((budget.feed, budget.limit_w) for budget in await site.budgets())
    assert found == [("hall-a", 6e5), ("hall-b", 4e5)]

    # The gateway reconnects to a broker that is back.
    met = site.gateway.count("connected to the broker")
    site.broker.terminate()
    site.gateway.wait_for("no broker")
    site.broker.start()
    site.gateway.wait_for("connected to the broker", met + 1, 60.0)
    async with site.listening() as (client, heard):
        fourth = site.isv.envelope(time.time(), {"targets": [target_of(5e5)]})
        await site.send(client, fourth)
        await heard.status(of(fourth["correlationid"]), "the fourth target is reported")


async def test_a_message_that_cannot_be_stored_ends_the_gateway_and_is_delivered_again(
    tmp_path: Path,
) -> None:
    with site_with(tmp_path, MqttBroker if Mosquitto.PROGRAM is None else Mosquitto) as site:
        async with site.listening() as (client, heard):
            site.gateway.fill_disk()
            sent = site.isv.envelope(time.time(), {"targets": [target_of(7e5)]})
            await site.send(client, sent)
            assert await asyncio.to_thread(site.gateway.wait) == 1
            text = site.gateway.log.read_text()
            assert "state.db: can't be written" in " ".join(text.split())
            assert "Traceback" not in text
            assert await site.budgets() == []
            site.gateway.start()
            if Mosquitto.PROGRAM is not None:  # it keeps unacknowledged messages
                await heard.status(of(sent["correlationid"]), "it is delivered again")
