"""Gateways in their own processes, as an operator starts them."""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from joserfc.jwk import Key

from perseus.demo.security import Security
from perseus.tls.tokens import own_token
from perseus.v1 import token_service_pb2
from perseus.v1.token_service_pb2_grpc import TokenServiceStub
from tests.grid.brokers import TOKEN
from tests.grid.isv import agent_key

NAME = "maxlps"


def grid_token(security: Security, address: str, folder: Path) -> Path:
    """Return a file with a token of scope grid."""
    request = token_service_pb2.CreateTokenRequest(name="grid", scope=token_service_pb2.SCOPE_GRID)
    with security.channels(address).open_blocking() as channel:
        answer = TokenServiceStub(channel).CreateToken(request, timeout=10)
    path = folder / "grid.token"
    own_token(path, answer.secret)
    return path


class GatewayProcess:
    """`perseus grid dsx-flex`, which can be killed and started again with the same state."""

    def __init__(self, folder: Path, security: Security, broker: str, coordinator: str, **more: str) -> None:
        folder.mkdir(exist_ok=True)
        self.keys = folder / "keys"
        self.log = folder / "gateway.log"
        self.state = folder / "state.db"
        self.key: Key
        signing_key, self.key = agent_key(folder)
        files = {
            "TLS_CA": security.ca,
            "TLS_CERTIFICATE": security.client_certificate,
            "TLS_KEY": security.client_key,
        }
        broker_token = folder / "broker.token"
        broker_token.write_text(TOKEN)
        self._environment: Mapping[str, str] = {
            **{f"PERSEUS_GRID_{name}": str(path) for name, path in files.items()},
            **{f"PERSEUS_GRID_BROKER_{name}": str(path) for name, path in files.items()},
            "PERSEUS_GRID_TOKEN_FILE": str(grid_token(security, coordinator, folder)),
            "PERSEUS_GRID_BROKER": broker,
            "PERSEUS_GRID_BROKER_TOKEN_FILE": str(broker_token),
            "PERSEUS_GRID_COORDINATOR": coordinator,
            "PERSEUS_GRID_IDENTIFIER": NAME,
            "PERSEUS_GRID_KEYS": str(self.keys),
            "PERSEUS_GRID_SIGNING_KEY": str(signing_key),
            "PERSEUS_GRID_STATE": str(self.state),
            "PERSEUS_GRID_LOG_FORMAT": "json",
            **{f"PERSEUS_GRID_{name}": value for name, value in more.items()},
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it is connected to both."""
        met = self.count("connected to the broker")
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "perseus.cli", "grid", "dsx-flex"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment},
            )
        self.wait_for("connected to the broker", met + 1)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """End it as an operator does; return its exit code."""
        assert self._process is not None
        self._process.terminate()
        return self.end()

    def end(self) -> int:
        """Wait for its end; return its exit code."""
        assert self._process is not None
        return self._process.wait(15)

    def fill_disk(self) -> None:
        """Stop all its files from growing."""
        assert self._process is not None
        size = self.state.with_name("state.db-wal").stat().st_size
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (size, size))

    def published(self) -> list[dict[str, Any]]:
        """Return its log. The last line may be incomplete."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return found

    def count(self, event: str) -> int:
        return sum(line["event"] == event for line in self.published())

    def wait_for(self, event: str, count: int = 1, timeout_s: float = 30.0) -> None:
        """Wait until an event was logged `count` times."""
        deadline_s = time.monotonic() + timeout_s
        while self.count(event) < count:
            assert self._process is not None
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline_s, f"{event!r} is not in {self.log.read_text()}"
            time.sleep(0.05)
