"""A coordinator with feeds, and gateways, in their own processes, as an operator starts them."""

import json
import resource
from collections.abc import Mapping
from pathlib import Path

from joserfc.jwk import Key

from perseus.demo.processes import TIMEOUT_S, Coordinator, Process
from perseus.demo.security import Security
from perseus.tls.tokens import own_token
from perseus.v1 import token_service_pb2
from perseus.v1.token_service_pb2_grpc import TokenServiceStub
from tests.grid.brokers import TOKEN
from tests.grid.isv import agent_key
from tests.ports import free_port

NAME = "maxlps"


def grid_token(security: Security, address: str, folder: Path) -> Path:
    """Return a file with a token of scope grid."""
    request = token_service_pb2.CreateTokenRequest(name="grid", scope=token_service_pb2.SCOPE_GRID)
    with security.channels(address).open_blocking() as channel:
        answer = TokenServiceStub(channel).CreateToken(request, timeout=10)
    path = folder / "grid.token"
    own_token(path, answer.secret)
    return path


class CoordinatorProcess(Coordinator):
    """A coordinator with feeds and a durable database."""

    def __init__(self, folder: Path, feeds: Mapping[str, object]) -> None:
        folder.mkdir(exist_ok=True)
        self.security = Security(folder / "security")
        super().__init__(
            folder,
            folder / "perseus.db",
            environment={**self.security.of_coordinator(), "PERSEUS_COORDINATOR_FEEDS": json.dumps(feeds)},
            address=f"127.0.0.1:{free_port()}",
        )


class GatewayProcess(Process):
    """`perseus grid dsx-flex`, which can be killed and started again with the same state."""

    def __init__(self, folder: Path, security: Security, broker: str, coordinator: str, **more: str) -> None:
        folder.mkdir(exist_ok=True)
        self.keys = folder / "keys"
        self.state = folder / "state.db"
        self.key: Key
        signing_key, self.key = agent_key(folder)
        broker_token = folder / "broker.token"
        broker_token.write_text(TOKEN)
        files = {
            "TLS_CA": security.ca,
            "TLS_CERTIFICATE": security.client_certificate,
            "TLS_KEY": security.client_key,
        }
        settings = {
            **files,
            **{f"BROKER_{name}": path for name, path in files.items()},
            "TOKEN_FILE": grid_token(security, coordinator, folder),
            "BROKER": broker,
            "BROKER_TOKEN_FILE": broker_token,
            "COORDINATOR": coordinator,
            "IDENTIFIER": NAME,
            "KEYS": self.keys,
            "SIGNING_KEY": signing_key,
            "STATE": self.state,
            "LOG_FORMAT": "json",
            **more,
        }
        super().__init__(
            folder / "gateway.log",
            *("-m", "perseus.cli", "grid", "dsx-flex"),
            environment={f"PERSEUS_GRID_{name}": str(value) for name, value in settings.items()},
        )

    def start(self) -> None:
        """Start it, and wait until it is connected to both."""
        self.launch()
        self.logged("connected to the broker")

    def stop(self) -> int:
        """End it as an operator does; return its exit code."""
        return self.terminate()

    def fill_disk(self) -> None:
        """Stop all its files from growing."""
        size = self.state.with_name("state.db-wal").stat().st_size
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (size, size))

    def wait_for(self, event: str, count: int = 1, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until an event was logged `count` times."""
        self.until(lambda: self.count(event) >= count, f"{event!r}, {count} times", timeout_s)
