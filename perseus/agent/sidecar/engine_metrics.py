"""Reading an engine's metrics over HTTP four times a second, on a thread: a slow one delays nothing else."""

import http.client
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import structlog

from perseus.rate_limited_log import RateLimitedLog
from perseus.serving.errors import ServingError
from perseus.serving.scrape import EngineTotals, parse_metrics

_log = structlog.get_logger(__name__)

INTERVAL_S = 0.25
_TIMEOUT_S = 0.75
"""For a whole answer: later ones would be too old."""
_MAX_BYTES = 8 * 1024 * 1024


class _Connection(http.client.HTTPConnection):
    """A connection whose answers must be complete by `deadline_s`: `timeout` begins again with every byte."""

    deadline_s = 0.0

    def connect(self) -> None:
        super().connect()
        self.sock = _Socket(self, self.sock.detach())


class _Socket(socket.socket):
    def __init__(self, connection: _Connection, descriptor: int) -> None:
        super().__init__(fileno=descriptor)
        self._connection = connection
        self.settimeout(connection.timeout)

    def recv_into(self, *arguments: Any) -> int:
        left_s = self._connection.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"expected a whole answer within {self._connection.timeout:g} s")
        self.settimeout(left_s)
        return super().recv_into(*arguments)


class MetricsReader:
    """Reads /metrics of `host`:`port`; its thread calls `on_totals` with the time of each scrape."""

    def __init__(self, host: str, port: int, on_totals: Callable[[float, EngineTotals], None]) -> None:
        self._host, self._port, self._on_totals = host, port, on_totals
        self._failures = RateLimitedLog(_log)
        self._closing = threading.Event()
        self._connection: _Connection | None = None
        self._thread = threading.Thread(target=self._run, name=f"metrics of {host}:{port}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; blocks while a scrape is in progress, which has a time limit."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._closing.wait(max(0.0, due_s - time.monotonic())):
            due_s = max(due_s + INTERVAL_S, time.monotonic())
            try:
                self._on_totals(time.monotonic(), parse_metrics(self._read()))
            except Exception as error:  # whatever it is, the next scrape may succeed
                self._disconnect()
                address, reason = f"{self._host}:{self._port}", str(error) or type(error).__name__
                self._failures.warning("engine's metrics not read", address, address=address, reason=reason)
        self._disconnect()

    def _read(self) -> str:
        if self._connection is None:
            self._connection = _Connection(self._host, self._port, timeout=_TIMEOUT_S)
        self._connection.deadline_s = time.monotonic() + _TIMEOUT_S
        self._connection.request("GET", "/metrics")
        answer = self._connection.getresponse()
        content = answer.read(_MAX_BYTES + 1)
        if answer.status != http.client.OK:
            raise ServingError(f"expected status 200, found {answer.status}")
        if len(content) > _MAX_BYTES:
            raise ServingError(f"expected at most {_MAX_BYTES} bytes, found more")
        return content.decode(errors="replace")

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
