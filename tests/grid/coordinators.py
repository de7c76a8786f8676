"""A real coordinator with feeds, which can be killed and started again."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from perseus.demo.security import Security
from tests.ports import free_port

_START_TIMEOUT_S = 30.0


class CoordinatorProcess:
    """`perseus coordinator` with a durable database."""

    def __init__(self, folder: Path, feeds: Mapping[str, object], **more: str) -> None:
        folder.mkdir(exist_ok=True)
        self.security = Security(folder / "security")
        self.address = f"127.0.0.1:{free_port()}"
        self._folder = folder
        self._settings = {
            f"PERSEUS_COORDINATOR_{name}": value
            for name, value in {"FEEDS": json.dumps(feeds), **more}.items()
        }
        self.log = folder / "coordinator.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it listens."""
        self.launch()
        self.await_listening()

    def launch(self) -> None:
        """Start it without waiting until it listens."""
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "perseus.cli", "coordinator"),
                    f"--listen={self.address}",
                    f"--database={self._folder / 'perseus.db'}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.security.of_coordinator(), **self._settings},
            )

    def await_listening(self) -> None:
        """Wait until it listens."""
        assert self._process is not None
        host, _, port = self.address.partition(":")
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                socket.create_connection((host, int(port)), timeout=1).close()
                return
            except OSError:
                assert self._process.poll() is None, self.log.read_text()
                assert time.monotonic() < deadline_s, "the coordinator does not listen"
                time.sleep(0.05)

    @property
    def pid(self) -> int:
        """The identifier of the running process."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
