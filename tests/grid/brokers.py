"""A real MQTT broker with TLS on loopback, in a process of its own, and an energy provider that uses it."""

import asyncio
import json
import os
import shutil
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiomqtt
from joserfc.jwk import Key
from pwdlib.hashers.argon2 import Argon2Hasher

from perseus.demo.processes import Process
from perseus.demo.security import Security
from tests.grid.isv import opened
from tests.ports import free_port

TOKEN = "password-of-all"
"""The password of every client; a gateway sends it as an OAuth2 token with the contract's user name."""

_RUN = """
import asyncio, json, sys
from amqtt.broker import Broker

async def main():
    broker = Broker(json.loads(sys.argv[1]))
    await broker.start()
    await asyncio.Event().wait()

asyncio.run(main())
"""


class MqttBroker(Process):
    """amqtt with a demo's certificates, which can be stopped and started again at the same address."""

    def __init__(self, security: Security, log: Path) -> None:
        super().__init__(log)
        self.port = free_port()
        self._security = security
        self._passwords = log.with_suffix(".passwords")
        self._passwords.write_text(
            "".join(f"{user}:{Argon2Hasher().hash(TOKEN)}\n" for user in ("oauthtoken", "isv"))
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it listens."""
        self.launch()
        self.until(self._is_listening, "the broker listens")

    def _is_listening(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def command(self) -> list[str]:
        listener = {
            "type": "tcp",
            "bind": self.address,
            "ssl": True,
            "cafile": str(self._security.ca),
            "certfile": str(self._security.coordinator_certificate),
            "keyfile": str(self._security.coordinator_key),
        }
        # No anonymous clients: amqtt keeps no messages for those.
        plugins = {"amqtt.plugins.authentication.FileAuthPlugin": {"password_file": str(self._passwords)}}
        config = json.dumps({"listeners": {"default": listener}, "plugins": plugins})
        return [sys.executable, "-c", _RUN, config]

    def client(self, name: str) -> aiomqtt.Client:
        """Return a client with one of the demo's certificates."""
        context = ssl.create_default_context(cafile=self._security.ca)
        context.load_cert_chain(self._security.client_certificate, self._security.client_key)
        return aiomqtt.Client(
            "127.0.0.1",
            self.port,
            identifier=name,
            username="isv",
            password=TOKEN,
            tls_context=context,
            timeout=10,
        )


class Mosquitto(MqttBroker):
    """Eclipse Mosquitto, which keeps unacknowledged messages; amqtt drops them after five seconds."""

    PROGRAM = shutil.which("mosquitto", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

    def command(self) -> list[str]:
        assert self.PROGRAM is not None
        config = self.log.with_suffix(".conf")
        config.write_text(
            f"listener {self.port} 127.0.0.1\n"
            f"cafile {self._security.ca}\n"
            f"certfile {self._security.coordinator_certificate}\n"
            f"keyfile {self._security.coordinator_key}\n"
            "require_certificate true\n"
            "allow_anonymous true\n"
            "user root\n"
        )
        return [self.PROGRAM, "-c", str(config)]


@contextmanager
def running(broker: MqttBroker) -> Iterator[MqttBroker]:
    with broker:
        broker.start()
        yield broker


class Heard:
    """Everything that gateways publish, verified with their key, in order of arrival."""

    def __init__(self, client: aiomqtt.Client, key: Key) -> None:
        self._client = client
        self._key = key
        self._news = asyncio.Event()
        self.messages: list[tuple[str, dict[str, Any], dict[str, Any]]] = []

    async def listen(self) -> None:
        """Subscribe, and listen until cancelled."""
        async for message in self._client.messages:
            assert isinstance(message.payload, bytes)
            self.messages.append((str(message.topic), *opened(message.payload, self._key)))
            self._news.set()

    def statuses(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return the envelopes and signed content of power states."""
        return [(envelope, data) for topic, envelope, data in self.messages if topic.endswith("/status")]

    def alerts(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return the envelopes and signed content of breach alerts."""
        return [(envelope, data) for topic, envelope, data in self.messages if topic.endswith("/powerbreach")]

    async def status(
        self, is_it: Callable[[dict[str, Any], dict[str, Any]], bool], what: str, timeout_s: float = 30.0
    ) -> dict[str, Any]:
        """Wait for a power state; return its signed content. Earlier ones count, too."""
        seen = 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._news.clear()
                    found = self.statuses()
                    for envelope, data in found[seen:]:
                        if is_it(envelope, data):
                            return data
                    seen = len(found)
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"{what}; heard {json.dumps(found[-3:], indent=1)}") from None
