"""An agent that observes a GPU, and a second process that claims what the first one has."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from perseus.agent.probe.client import Probe
from perseus.demo.processes import ClusterError, Process
from tests.gpu.report import Finding, judged

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


@contextmanager
def observing_agent(folder: Path, environment: Mapping[str, str]) -> Iterator[Path]:
    """An agent that never sets a clock, with no coordinator; yields its socket.

    `environment` says where its GPUs are, if not in NVML. ClusterError if it doesn't come up.
    """
    socket = folder / "agent.sock"
    settings = {
        **os.environ,
        "PERSEUS_AGENT_OBSERVE": "true",
        "PERSEUS_AGENT_COORDINATOR": "127.0.0.1:1",
        "PERSEUS_AGENT_SOCKET": str(socket),
        "PERSEUS_AGENT_RESTORE_FOLDER": str(folder / "records"),
        "PERSEUS_AGENT_GRANTS": str(folder / "grants"),
        **environment,
    }
    with Process(folder / "agent.log", "-c", _AGENT, environment=settings) as agent:
        agent.launch()
        try:
            agent.until(socket.exists, "an agent that listens")
        except ClusterError as error:
            said = agent.log.read_text(errors="replace").strip().splitlines() or ["nothing"]
            raise ClusterError(f"{error}; it said: {said[-1]}") from None
        yield socket


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
