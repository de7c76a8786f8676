"""A real coordinator with feeds, at a place where it can be killed and started again."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from perseus.demo.security import Security
from tests.grid.brokers import free_port

_START_TIMEOUT_S = 30.0


class CoordinatorProcess:
    """`perseus coordinator`, with a database that outlasts it."""

    def __init__(self, folder: Path, feeds: Mapping[str, object]) -> None:
        folder.mkdir(exist_ok=True)
        self.security = Security(folder / "security")
        self.address = f"127.0.0.1:{free_port()}"
        self._folder = folder
        self._feeds = feeds
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it listens."""
        environment = {"PERSEUS_COORDINATOR_FEEDS": json.dumps(self._feeds)}
        with (self._folder / "coordinator.log").open("ab") as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "perseus.cli", "coordinator"),
                    f"--listen={self.address}",
                    f"--database={self._folder / 'perseus.db'}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.security.of_coordinator(), **environment},
            )
        host, _, port = self.address.partition(":")
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                socket.create_connection((host, int(port)), timeout=1).close()
                return
            except OSError:
                assert self._process.poll() is None, (self._folder / "coordinator.log").read_text()
                assert time.monotonic() < deadline_s, "the coordinator does not listen"
                time.sleep(0.05)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
