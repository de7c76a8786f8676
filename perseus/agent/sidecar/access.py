"""Whether a peer may have a GPU: gathers facts for `claims.decision` from the kernel and the driver.

These calls block (the driver, a directory service, a subprocess), so dedicated threads make them: restoring
and setting clocks never wait for peers, however many ask. Driver calls go through the GPU's executor, so a
driver that hangs does not block these threads.

This module also reads the grant files; `claims.grants` parses their content. The folder and the files count
only if nobody but root and the agent's user can write them, and the files must be regular. Names that begin
with a dot or end with a tilde are skipped. Links are followed, since a mounted ConfigMap consists of them;
its folder is writable by all (0777), but on a read-only mount.
"""

import asyncio
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import structlog

from perseus.agent.claims.decision import (
    NOT_GRANTED,
    Access,
    Allowed,
    GpuObservation,
    Refused,
    by_grant,
    by_observation,
)
from perseus.agent.claims.grants import Grant, Grants, MalformedGrantError, User, parse
from perseus.agent.gpu import GpuUse
from perseus.agent.gpu.executor import GpuExecutor
from perseus.agent.sidecar import openable
from perseus.agent.sidecar.backends import Backend
from perseus.agent.sidecar.peer import (
    Peer,
    cgroup_mounts,
    cgroups_of,
    cgroups_to_enter,
    owner_of,
    sees_the_whole_node,
    user_named,
    user_of,
)
from perseus.rate_limited_log import RateLimitedLog
from perseus.regular_file import open_regular

_log = structlog.get_logger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_THREADS = 2
_MAX_CONCURRENT_INSPECTIONS = 8
_OPENABLE_TIMEOUT_S = 5.0


class AccessChecker:
    """Judges claims. The folder `grants` need not exist."""

    def __init__(self, gpus: Backend, grants: Path, executor: GpuExecutor) -> None:
        self._gpus = gpus
        self._grants = grants
        self._executor = executor
        self._inspections = asyncio.Semaphore(_MAX_CONCURRENT_INSPECTIONS)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="access")
        self._problems = RateLimitedLog(_log)
        self._sees_the_whole_node = sees_the_whole_node()

    async def user(self, peer: Peer) -> User:
        """Return the user whose process a peer is."""
        return await self._run(user_of, peer.uid)

    async def judge(self, peer: Peer, user: User, gpu_uuid: str, before: Allowed | None) -> Allowed | Refused:
        """Return whether the peer may have a GPU; `before` is the latest verdict on its claim.

        Raises `GpuError` if the GPU can't be inspected.
        """
        use = await self._inspect(gpu_uuid)
        if self._sees_the_whole_node and (unseen := await self._run(_unseen, use)):
            # A process that has just ended is missing from a second query. One that stays may be anybody's.
            use = await self._inspect(gpu_uuid)
            if unseen & frozenset(use.process_ids or ()):
                use = replace(use, process_ids=None)
        return await self._run(self._judge, peer, user, gpu_uuid, use, before)

    async def judge_use(self, name: str, gpu_uuid: str) -> Allowed | Refused:
        """Return whether a GPU is a user's, whom the operator has named for it: by grants and its processes.

        Raises `GpuError` if the GPU can't be inspected.
        """
        user = await self._run(user_named, name)
        if user is None:
            return Refused(NOT_GRANTED, f"user: expected one of this node, found {name!r}")
        use = await self._inspect(gpu_uuid)
        return await self._run(self._judge_use, user, gpu_uuid, use)

    def _judge_use(self, user: User, uuid: str, use: GpuUse) -> Allowed | Refused:
        owners = _owners(use)
        output = by_grant(read_grants(self._grants), user, uuid, use.index)
        if isinstance(output, Allowed):
            return replace(output, is_running=owners is not None and user.uid in owners)
        return output or by_observation(user, uuid, GpuObservation(Access.OPEN, owners=owners), stands=False)

    async def _inspect(self, gpu_uuid: str) -> GpuUse:
        async with self._inspections:
            return await self._executor.run(gpu_uuid, lambda: self._gpus.inspect(gpu_uuid))

    def close(self) -> None:
        """Stop judging, without waiting for calls in progress."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def _judge(
        self, peer: Peer, user: User, uuid: str, use: GpuUse, before: Allowed | None
    ) -> Allowed | Refused:
        owners = _owners(use)
        grants = read_grants(self._grants)
        for problem in grants.problems:
            self._problems.warning("grants not understood", reason=problem)
        output = by_grant(grants, user, uuid, use.index)
        if isinstance(output, Refused):
            return output
        if output is not None:
            return replace(output, is_running=owners is not None and user.uid in owners)
        if before is not None and before.is_running and not before.is_granted:
            return by_observation(user, uuid, GpuObservation(Access.OPEN, owners=owners), stands=True)
        access, problem = self._access(peer, Path(use.device_node))
        observation = GpuObservation(access, problem, owners, is_agents_user=peer.uid == os.geteuid())
        return by_observation(user, uuid, observation, stands=False)

    # --- The device -----------------------------------------------------------------------------------------

    def _access(self, peer: Peer, node: Path) -> tuple[Access, str]:
        """Return whether the kernel lets the peer open a GPU's device, and if not, why."""
        if peer.pid == 0 or not self._sees_the_whole_node:
            # In a container, only its own cgroup shows which GPUs it may use.
            self._problems.warning(
                "processes of others can't be seen: trainers are known by user and connection only"
            )
            folders: list[Path] | None = []
        else:
            try:
                of_peer = cgroups_of(peer.pid)
                folders = cgroups_to_enter(cgroup_mounts(), cgroups_of("self"), of_peer)
            except OSError as error:
                return Access.UNKNOWN, f"its process can't be seen: {error.strerror}"
            if peer.has_ended:  # the cgroups may be those of another process
                return Access.UNKNOWN, "its process has ended"
        is_agents_user = peer.uid == os.geteuid()
        if is_agents_user and (not folders or os.geteuid() != 0):
            # A peer with all the agent's rights gains none through it, even without a device node.
            is_open = not _is_there(node) or os.access(node, os.R_OK | os.W_OK)
            return (Access.OPEN, "") if is_open else (Access.CLOSED, f"{node} is closed to them")
        if folders is None:
            return Access.UNKNOWN, "its cgroup is out of the agent's reach"
        if not _is_there(node):
            return Access.UNKNOWN, f"{node} is not there" if node.name else "it has no device node"
        return _ask_as(peer, node, folders)


def _owners(use: GpuUse) -> frozenset[int] | None:
    """Return the users of a GPU's processes; None if the driver does not report these."""
    if use.process_ids is None:
        return None
    found = (owner_of(pid) for pid in use.process_ids)
    return frozenset(uid for uid in found if uid is not None)


def _unseen(use: GpuUse) -> frozenset[int]:
    """Return the processes on a GPU that the kernel does not know."""
    return frozenset(pid for pid in use.process_ids or () if owner_of(pid) is None)


def _is_there(node: Path) -> bool:
    return bool(node.name) and node.exists()


def _ask_as(peer: Peer, node: Path, folders: list[Path]) -> tuple[Access, str]:
    groups = ",".join(map(str, peer.groups))
    command = [sys.executable, "-I", "-S", openable.__file__, str(node), str(peer.uid), str(peer.gid), groups]
    try:
        done = subprocess.run(
            [*command, *map(str, folders)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_OPENABLE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Access.UNKNOWN, f"the access check failed: {error}"
    if done.returncode == openable.OPENABLE:
        return Access.OPEN, ""
    if done.returncode == openable.NOT_OPENABLE and not done.stderr:
        return Access.CLOSED, f"{node} is closed to them"
    output = done.stderr.strip().splitlines()
    return Access.UNKNOWN, output[-1][:300] if output else f"the access check exited with {done.returncode}"


_MAX_FILES = 4096
_MAX_BYTES = 64 * 1024
_OTHERS_WRITE = 0o022


def read_grants(folder: Path) -> Grants:
    """Return the grants in the files of a folder; none if the folder is missing."""
    try:
        names = sorted(os.listdir(folder))
        _check_owner(folder, os.stat(folder), is_read_only=bool(os.statvfs(folder).f_flag & os.ST_RDONLY))
    except FileNotFoundError:
        return Grants()
    except OSError as error:
        return Grants(problems=(f"{folder}: {error.strerror}",))
    names = [name for name in names if not name.startswith(".") and not name.endswith("~")]
    if len(names) > _MAX_FILES:
        return Grants(problems=(f"{folder}: expected at most {_MAX_FILES} files, found {len(names)}",))
    grants: list[Grant] = []
    problems: list[str] = []
    for name in names:
        path = folder / name
        try:
            grants += parse(_read_grant_file(path))
        except FileNotFoundError:
            continue  # revoked since the listing
        except OSError as error:
            problems.append(f"{str(path)!a}: {error.strerror}")
        except (MalformedGrantError, UnicodeDecodeError) as error:
            problems.append(f"{str(path)!a}: {error}")
    return Grants(tuple(grants), tuple(problems))


def _read_grant_file(path: Path) -> str:
    file = open_regular(path)
    try:
        _check_owner(path, os.fstat(file))
        content = os.read(file, _MAX_BYTES + 1)
    finally:
        os.close(file)
    if len(content) > _MAX_BYTES:
        raise OSError(27, f"expected at most {_MAX_BYTES} bytes, found more")
    return content.decode()


def _check_owner(path: Path, found: os.stat_result, *, is_read_only: bool = False) -> None:
    is_open = found.st_mode & _OTHERS_WRITE and not is_read_only
    if found.st_uid not in (0, os.geteuid()) or is_open:
        mode = stat.filemode(found.st_mode)
        raise PermissionError(
            1,
            f"expected to be writable by root or the agent's user only, found user {found.st_uid}'s, {mode}",
        )
