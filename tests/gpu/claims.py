"""An agent that observes a GPU, and a second process that claims what the first one has."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from perseus.agent.probe.client import Probe
from tests.gpu.report import Finding, judged

_START_TIMEOUT_S = 30.0
_AGENT = (
    "import asyncio; from perseus.agent.sidecar.settings import AgentSettings; "
    "from perseus.agent.sidecar.shell import run; asyncio.run(run(AgentSettings()))"
)
_SECOND = """
import logging, sys
from perseus.agent.probe.client import Probe
logging.basicConfig(format="%(message)s", stream=sys.stdout)
probe = Probe.connect(sys.argv[1], job_id="second", pipeline=0, stage=0, gpu_uuid=sys.argv[2])
sys.exit(0 if probe.is_connected else 3)
"""


class AgentError(Exception):
    """The agent did not come up, and what it said last."""


@contextmanager
def observing_agent(folder: Path, environment: Mapping[str, str]) -> Iterator[Path]:
    """An agent that never sets a clock, with no coordinator; yields its socket.

    `environment` says where its GPUs are, if not in NVML. AgentError if it doesn't come up.
    """
    socket, log = folder / "agent.sock", folder / "agent.log"
    settings = {
        "OBSERVE": "true",
        "COORDINATOR": "127.0.0.1:1",
        "SOCKET": str(socket),
        "RESTORE_FOLDER": str(folder / "records"),
        "GRANTS": str(folder / "grants"),
    }
    with log.open("wb") as output:
        agent = subprocess.Popen(
            [sys.executable, "-c", _AGENT],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                **{f"PERSEUS_AGENT_{name}": value for name, value in settings.items()},
                **environment,
            },
        )
    try:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not socket.exists():
            if agent.poll() is not None or time.monotonic() > deadline_s:
                message = log.read_text(errors="replace").strip().splitlines() or ["nothing"]
                raise AgentError(f"the agent does not listen; it said: {message[-1]}")
            time.sleep(0.05)
        yield socket
    finally:
        agent.terminate()
        agent.wait()


def claim_findings(socket: Path, gpu_uuid: str) -> list[Finding]:
    """Claim a GPU, and have another process of the same user claim it, too."""
    first = Probe.connect(socket, job_id="first", pipeline=0, stage=0, gpu_uuid=gpu_uuid)
    if not first.is_connected:
        return [judged("claim of the GPU", "refused, see the agent's log above", "accepted", False)]
    try:
        second = subprocess.run(
            [sys.executable, "-c", _SECOND, str(socket), gpu_uuid],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
    finally:
        first.finish()
        first.close()
    message = (second.stdout or second.stderr).strip().splitlines() or ["nothing"]
    is_refused = second.returncode == 3 and "another rank runs on it" in message[-1]
    expected = "refused, as another rank runs on it"
    return [judged("claim by a second process", message[-1], expected, is_refused)]
