"""One node, as its agent's settings describe it: GPUs, privileges, clocks left changed, socket, agent.

Nothing is changed: a GPU's record left by a dead agent is reported, not acted upon.
"""

import asyncio
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from perseus.agent.gpu import GpuError, RecordError, RecordHeldError
from perseus.agent.gpu.executor import ALL_GPUS, GpuExecutor
from perseus.agent.gpu.nvml import module_problem
from perseus.agent.link.packets import MalformedPacket
from perseus.agent.restore.records import RecordFolder
from perseus.agent.sidecar.backends import backend
from perseus.agent.sidecar.health_client import FOREIGN_CLOCK, UNMARKED, ask_health
from perseus.agent.sidecar.self_test import all_gpu_findings, gpu_findings, may_set_clocks
from perseus.agent.sidecar.settings import AgentSettings
from perseus.doctor.checks import Check, Verdict

_TIMEOUT_S = 5.0
_START = "start it: systemctl start perseus-agent, or perseus agent; its log has the reason of its end"
_FOREIGN_CLOCK_ADVICE = (
    "find who sets it (nvidia-smi -lgc, DCGM, a script) and end that; the agent then sets the wanted clock "
    "again, within an hour at most; if stock is wanted, nvidia-smi -rgc -i GPU, or -rac for application "
    "clocks (clock event reason 0x2); if these are the node's own clocks, set the agent's restore_clocks"
)


def node_checks(settings: AgentSettings) -> Iterator[Check]:
    """Check this node."""
    yield _gpus(settings)
    yield _privileges(settings)
    yield _clocks_left(settings.restore_folder)
    socket = _socket(settings.socket)
    yield socket
    if socket.verdict is not Verdict.BAD:
        yield _agent(settings.socket)


def _gpus(settings: AgentSettings) -> Check:
    subject = "GPUs"
    try:
        # A driver that hangs is a finding; don't wait for it.
        listed = asyncio.run(GpuExecutor().run(ALL_GPUS, backend(settings).listed))
    except GpuError as error:
        advice = "install NVIDIA's driver, and check that nvidia-smi lists the GPUs"
        if module_problem():
            advice = "do so in the agent's Python environment"
        return Check(subject, Verdict.BAD, str(error), advice)
    except OSError as error:
        return Check(
            subject, Verdict.BAD, str(error), "emulated_gpus must contain emulated GPUs and nothing else"
        )
    lost = [str(each) for each in listed if isinstance(each, GpuError)]
    if lost:
        return Check(
            subject, Verdict.BAD, "; ".join(lost), "nvidia-smi and the kernel's log (Xid) have details"
        )
    if not listed:
        found = "there is none, or none visible here"
        return Check(subject, Verdict.BAD, found, "check nvidia-smi and CUDA_VISIBLE_DEVICES")
    details = "perseus agent --self-test shows details"
    if settings.gpu_backend == "nvml":
        gpus = asyncio.run(all_gpu_findings(listed, gpu_findings))
        unusable = [f"{gpu.uuid} can't be used: {gpu.problem}" for gpu in gpus if not gpu.is_usable]
        if len(unusable) == len(gpus):
            return Check(subject, Verdict.BAD, "; ".join(unusable), details)
        limitations = [f"{gpu.uuid}: {limitation}" for gpu in gpus for limitation in gpu.limitations]
        if problems := [*filter(None, [module_problem()]), *unusable, *limitations]:
            return Check(subject, Verdict.WARNING, "; ".join(problems), details)
    return Check(subject, Verdict.GOOD, f"{len(listed)} can be read; {details}")


def _privileges(settings: AgentSettings) -> Check:
    subject = "privileges"
    if settings.observe:
        return Check(
            subject, Verdict.GOOD, "the agent only observes and needs none; jobs on its GPUs stay at stock"
        )
    if settings.gpu_backend != "nvml":
        return Check(subject, Verdict.GOOD, "emulated GPUs need none")
    if may_set_clocks():
        return Check(subject, Verdict.GOOD, "this user may set clocks")
    return Check(
        subject,
        Verdict.UNKNOWN,
        "this user may not set clocks; the agent's user may differ",
        "run it as the agent's user, who needs root or CAP_SYS_ADMIN, or --observe",
    )


def _clocks_left(path: Path) -> Check:
    """Look for records of GPUs whose agent has died; a living agent holds its own."""
    subject = "clocks left changed"
    folder = RecordFolder(path)
    left, served = [], 0
    try:
        for uuid in folder.gpu_uuids():
            try:
                record = folder.find(uuid)
            except RecordHeldError:
                served += 1
                continue
            if record is not None:
                record.release()
                left.append(uuid)
    except RecordError as error:
        return Check(subject, Verdict.UNKNOWN, str(error), "run it as the agent's user")
    if left:
        found = f"a dead agent left {', '.join(left)}"
        return Check(subject, Verdict.BAD, found, "perseus agent --restore, with the agent's settings")
    return Check(subject, Verdict.GOOD, f"none; a running agent holds {served} GPUs")


def _socket(path: Path) -> Check:
    subject = f"socket {path}"
    try:
        found = path.stat()
    except FileNotFoundError:
        return Check(subject, Verdict.BAD, "it does not exist: no agent runs with these settings", _START)
    except OSError as error:
        advice = "make the folders above it searchable for trainers (o+x)"
        return Check(subject, Verdict.BAD, f"can't be read: {error.strerror}", advice)
    if not stat.S_ISSOCK(found.st_mode):
        return Check(subject, Verdict.BAD, "the path is not a socket", "remove it, and start the agent")
    permissions = f"{stat.filemode(found.st_mode)}, user {found.st_uid}, group {found.st_gid}"
    if not os.access(path, os.W_OK):
        advice = "add the user to the socket's group (usermod -aG), or set socket_group and socket_mode"
        return Check(subject, Verdict.BAD, f"user {os.geteuid()} may not connect ({permissions})", advice)
    return Check(subject, Verdict.GOOD, f"this user may connect ({permissions})")


def _agent(path: Path) -> Check:
    subject = "agent"
    try:
        answer = ask_health(path, _TIMEOUT_S)
    except TimeoutError:
        return Check(subject, Verdict.BAD, f"no answer within {_TIMEOUT_S:g} s", "its log shows the cause")
    except ConnectionRefusedError:
        return Check(subject, Verdict.BAD, "nobody listens: the agent that made the socket is gone", _START)
    except (OSError, MalformedPacket) as error:
        return Check(subject, Verdict.BAD, f"it can't be queried: {error}", "check its log")
    if not answer.ok:
        return Check(subject, Verdict.BAD, answer.message, "see above, and the agent's log")
    if answer.reason == UNMARKED:
        advice = "change those trainers accordingly; until then their GPUs stay at stock"
        return Check(subject, Verdict.WARNING, answer.message, advice)
    if answer.reason == FOREIGN_CLOCK:
        return Check(subject, Verdict.WARNING, answer.message, _FOREIGN_CLOCK_ADVICE)
    return Check(subject, Verdict.GOOD, answer.message)
