"""Ports for tests' servers: 0, for which the kernel picks one, or one of this worker's own.

Workers share the machine. Another test may use the same hard-coded port, and a port that the kernel gave and
got back may belong to anybody a moment later. So each worker has its own ports, below those that Linux
assigns (net.ipv4.ip_local_port_range begins at 32,768), and a test that binds any other fails.
"""

import os
import random
import socket
import sys
from collections.abc import Callable
from itertools import cycle
from typing import Any

from grpc import _server as sync_server
from grpc.aio import _server as aio_server

_PORTS_PER_WORKER = 1_000
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 12
_OWN = range(20_000 + _WORKER * _PORTS_PER_WORKER, 20_000 + (_WORKER + 1) * _PORTS_PER_WORKER)
# Another checkout's tests have the same ports: each run takes them in another order.
_next_port = cycle(random.sample(_OWN, _PORTS_PER_WORKER))


class SharedPortError(Exception):
    """A test binds a port that other tests may bind at the same time."""

    def __init__(self, port: int) -> None:
        super().__init__(f"expected port 0, or one from tests.ports.free_port(), found {port}")


def free_port() -> int:
    """Return a port that nothing listens on; it is reused only after all others of this worker."""
    for _ in _OWN:
        port = next(_next_port)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise AssertionError(f"expected a free port in {_OWN}, found none")


def pytest_sessionstart() -> None:
    sys.addaudithook(_check_bind)
    # gRPC's servers bind in C, without an audit event.
    for server in (aio_server.Server, sync_server._Server):
        for name in ("add_insecure_port", "add_secure_port"):
            setattr(server, name, _checked(getattr(server, name)))


def _check_bind(event: str, args: tuple[Any, ...]) -> None:
    if event == "socket.bind" and isinstance(args[1], tuple):
        _check(args[1][1])


def _checked(add_port: Callable[..., int]) -> Callable[..., int]:
    def checked(server: object, address: str, *credentials: object) -> int:
        port = address.rpartition(":")[2]
        _check(int(port) if port.isdecimal() else 0)
        return add_port(server, address, *credentials)

    return checked


def _check(port: int) -> None:
    if port and port not in _OWN:
        raise SharedPortError(port)
