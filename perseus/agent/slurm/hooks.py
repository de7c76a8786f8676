"""The prolog and the epilog of a Slurm job on its node: `perseus slurm prolog` and `… epilog`.

    prolog    grants the job its GPUs; checks that an agent serves, and starts one if asked to
    epilog    revokes the grant; returns when the job's GPUs are back at stock, or reports those that are not

The epilog works without an agent, too: it restores the GPUs of a dead one from its records. A living one
restores its GPUs itself once their trainers are gone; the epilog waits for that.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from perseus.agent.gpu import GpuError
from perseus.agent.gpu.executor import ALL_GPUS, GpuExecutor
from perseus.agent.link.packets import MalformedPacket
from perseus.agent.restore.records import RecordFolder
from perseus.agent.restore.restorer import Restoration, Restorer
from perseus.agent.sidecar.backends import Backend, backend
from perseus.agent.sidecar.health_client import ask_health
from perseus.agent.sidecar.settings import AgentSettings
from perseus.agent.slurm.grant_writing import take_back, write_grant
from perseus.agent.slurm.job import SlurmError, SlurmJob, uuids_of

_START_S = 10.0
_ANSWER_S = 2.0
_RESTORE_S = 15.0
_POLL_INTERVAL_S = 0.1
# An agent serves all jobs, so it must not inherit slurmd's variables of one job.
_OF_THE_JOB = ("SLURM", "SPANK_", "CUDA_", "GPU_", "ROCR_", "ZE_")


class NoAgentError(SlurmError):
    """No agent listens on the socket."""


class NotRestoredError(SlurmError):
    """Some GPUs of the job are not back at stock."""


def prolog(job: SlurmJob, settings: AgentSettings, start: "AgentStart | None" = None) -> None:
    """Grant a job its GPUs before it starts, and check that an agent serves them.

    Raises:
        SlurmError: a GPU is unknown; or the GPUs are granted, but there is no agent.
        GpuError: the driver does not answer.
        OSError: the grant can't be written, or the agent can't be started.
    """
    if not job.gpu_numbers:
        return
    write_grant(settings.grants, job, asyncio.run(_uuids(job, backend(settings), GpuExecutor())))
    if _answers(settings.socket):
        return
    if start is None:
        raise NoAgentError(f"no agent at {settings.socket}: the job will train at stock clocks")
    start.start()
    end_s = time.monotonic() + _START_S
    while not _answers(settings.socket):
        if time.monotonic() > end_s:
            raise NoAgentError(f"no agent at {settings.socket} within {_START_S:g} s: see {start.log}")
        time.sleep(_POLL_INTERVAL_S)


def epilog(job: SlurmJob, settings: AgentSettings) -> None:
    """Revoke a job's grant after its processes have ended, and wait until its GPUs are back at stock.

    Raises:
        NotRestoredError: some GPUs are not back after 15 s.
        GpuError: the restore records can't be read.
        OSError: the grant can't be revoked.
    """
    asyncio.run(_restored(job, take_back(settings.grants, job), settings))


async def _restored(job: SlurmJob, gpu_uuids: Collection[str], settings: AgentSettings) -> None:
    gpus, executor = backend(settings), GpuExecutor()
    records = RecordFolder(settings.restore_folder)
    restorer = Restorer(records, gpus.open, executor)
    if not gpu_uuids and job.gpu_numbers:  # the prolog failed or had other settings
        gpu_uuids = await _uuids(job, gpus, executor)
    end_s = time.monotonic() + _RESTORE_S
    while True:
        found: list[Restoration] = await restorer.restore_once()
        left = [uuid for uuid in records.gpu_uuids() if uuid in gpu_uuids]
        if not left:
            return
        if time.monotonic() > end_s:
            why = {each.gpu_uuid: str(each.error) for each in found if each.error is not None}
            held = "an agent holds it: a process of the job may still run"
            raise NotRestoredError(
                "\n".join(f"GPU {uuid}: not back at stock: {why.get(uuid, held)}" for uuid in left)
            )
        await asyncio.sleep(_POLL_INTERVAL_S)


class AgentStart:
    """Starts an agent that outlives the prolog, with a TOML file, and a log that it appends to."""

    def __init__(self, config: Path | None, log: Path) -> None:
        self.log = log
        self._command = [
            *[sys.executable, "-m", "perseus.cli", "agent"],
            *(["--config", str(config)] if config is not None else []),
        ]

    def start(self) -> None:
        """Start the agent in a new session. Raises OSError."""
        with self.log.open("ab") as log:
            subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=for_all_jobs(os.environ),
                start_new_session=True,
            )


def for_all_jobs(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a prolog's environment without the variables of its job."""
    return {name: value for name, value in environment.items() if not name.startswith(_OF_THE_JOB)}


async def _uuids(job: SlurmJob, gpus: Backend, executor: GpuExecutor) -> list[str]:
    """Return the UUIDs of the job's GPUs. Raises `NoSuchGpuError`; `GpuError` if GPUs can't be listed.

    A lost or hanging GPU counts as absent and does not keep jobs from the others.
    """

    async def device_node(uuid: str) -> str:
        try:
            return (await executor.run(uuid, lambda: gpus.inspect(uuid))).device_node
        except GpuError:
            return ""

    uuids = [uuid for uuid in await executor.run(ALL_GPUS, gpus.listed) if isinstance(uuid, str)]
    nodes = await asyncio.gather(*map(device_node, uuids))
    return uuids_of(job.gpu_numbers, dict(zip(uuids, nodes, strict=True)))


def _answers(socket: Path) -> bool:
    try:
        ask_health(socket, _ANSWER_S)
    except (OSError, MalformedPacket):
        return False
    return True
