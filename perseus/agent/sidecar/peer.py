"""The peer of the local socket, as identified by the kernel, never by the peer itself.

The kernel records the user who connected, their groups and the process (SO_PEERCRED, SO_PEERGROUPS). A pidfd
identifies the process, since its number may be reused before the agent looks: it comes from the socket where
the kernel has SO_PEERPIDFD (Linux 6.5), else it is opened by number and checked (`_opened_by_number`). A peer
in a pid namespace outside the agent's has number 0: then only the user and the connection's end are known.

The kernel also shows the process's CLOCK_MONOTONIC, which must be the agent's for marks and clocks to be
matched, and the cgroups that can deny it a device.
"""

import os
import pwd
import select
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from perseus.agent.claims.decision import Refused
from perseus.agent.claims.grants import User
from perseus.agent.link.packets import MAX_NAME_LENGTH

# asm-generic/socket.h; the module `socket` has no names for these.
_SO_PEERGROUPS = 59
_SO_PEERPIDFD = 77
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_GROUP = struct.Struct("I")
_FEW_GROUPS = 256
_MAX_GROUPS = 65_536

_INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""The inode of the node's own pid namespace (PROC_PID_INIT_INO in the kernel's proc_ns.h)."""


class UnknownPeerError(Exception):
    """The kernel does not identify the peer."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A connected peer. `pid` is 0 and `pidfd` None where its process is not visible from here."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    pid: int
    pidfd: int | None

    @property
    def has_ended(self) -> bool:
        """Whether the process is known to have ended; its number may then be reused."""
        return self.pidfd is not None and has_ended(self.pidfd)

    def close(self) -> None:
        """Close the pidfd."""
        if self.pidfd is not None:
            os.close(self.pidfd)


def identify(connection: socket.socket) -> Peer:
    """Return the peer of a Unix connection, for the caller to close. Raises `UnknownPeerError`."""
    try:
        pid, uid, gid = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        groups = _groups(connection)
    except OSError as error:
        raise UnknownPeerError(f"the kernel does not identify the peer: {error.strerror}") from error
    if uid == _overflow_uid() and not _is_initial_user_namespace():
        raise UnknownPeerError("the user who connected has no number in the agent's user namespace")
    if pid == 0:
        return Peer(uid, gid, groups, 0, None)
    return Peer(uid, gid, groups, pid, _pidfd(connection, pid, uid))


def user_of(uid: int) -> User:
    """Return a user with their name on this node. May query a directory service and take long."""
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = ""
    return User(uid, name if 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable() else str(uid))


def user_named(text: str) -> User | None:
    """Return a user of this node by name or number; None if there is none. May take long, as `user_of`."""
    try:
        return user_of(int(text) if text.isdecimal() else pwd.getpwnam(text).pw_uid)
    except (KeyError, OverflowError):
        return None


def has_ended(pidfd: int) -> bool:
    """Whether the process of a pidfd has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def sees_the_whole_node() -> bool:
    """Whether the agent is in the node's own pid namespace, and so sees every process."""
    return Path("/proc/self/ns/pid").stat().st_ino == _INITIAL_PID_NAMESPACE


def _groups(connection: socket.socket) -> tuple[int, ...]:
    for maximum in (_FEW_GROUPS, _MAX_GROUPS):
        try:
            found = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, maximum * _GROUP.size)
        except OSError:
            if maximum == _MAX_GROUPS:
                raise
            continue
        return tuple(gid for (gid,) in _GROUP.iter_unpack(found))
    raise AssertionError


def _pidfd(connection: socket.socket, pid: int, uid: int) -> int:
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno not in _NO_SUCH_OPTION:
            raise UnknownPeerError("the process that connected has ended") from error
    return _opened_by_number(pid, uid)


_NO_SUCH_OPTION = (92, 95)  # ENOPROTOOPT, EOPNOTSUPP


def _opened_by_number(pid: int, uid: int) -> int:
    """Open a pidfd for a process known by its number. Raises `UnknownPeerError` if the number was reused.

    A number is reused only after its process has ended, so a process that has it now and began before we
    looked is either the peer or began after the peer's end; the latter shows by its user. A later process of
    the same user may still be mistaken for the peer: it has the peer's rights, except for its cgroup.
    """
    observed_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        raise UnknownPeerError(f"process {pid}, which connected, has ended") from error
    try:
        began_s = _began_s(Path(f"/proc/{pid}/stat").read_text())
        owner = owner_of(pid)
        if owner != uid or began_s > observed_s or has_ended(pidfd):
            raise UnknownPeerError(f"process {pid}, which connected, has ended")
    except OSError as error:
        os.close(pidfd)
        raise UnknownPeerError(f"process {pid}, which connected, can't be seen: {error.strerror}") from error
    except UnknownPeerError:
        os.close(pidfd)
        raise
    return pidfd


def owner_of(pid: int) -> int | None:
    """Return the real user of a process; None if there is no such process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    for line in status.splitlines():
        if line.startswith("Uid:"):
            return int(line.split()[1])
    return None


def _began_s(stat: str) -> float:
    """Return when a process began, in seconds since boot, from /proc/PID/stat; its name may have any text."""
    after_name = stat.rpartition(")")[2].split()
    return int(after_name[19]) / os.sysconf("SC_CLK_TCK")


def _overflow_uid() -> int:
    return int(Path("/proc/sys/kernel/overflowuid").read_text())


def _is_initial_user_namespace() -> bool:
    return Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]


# --- Its clock ----------------------------------------------------------------------------------------------
#
# In a time namespace (`unshare --time`, a container that was checkpointed and restored) CLOCK_MONOTONIC has
# an offset. The kernel shows the offset of a visible process. For an invisible one, the time in its hello
# serves: a time in the future is from another clock, and so is one from long ago, unless the agent was
# suspended; then the probe will try again.


CLOCK_MISMATCH = "CLOCK_MISMATCH"

_OLDEST_HELLO_NS = 30 * 10**9


def check_clock(peer: Peer, hello_time_ns: int, now_ns: int) -> Refused | None:
    """Refuse a peer on another clock. `hello_time_ns` is its clock's time in its hello, 0 if absent."""
    ahead_s = _seen_ahead_s(peer)
    if ahead_s is None and hello_time_ns and not 0 <= now_ns - hello_time_ns <= _OLDEST_HELLO_NS:
        ahead_s = (hello_time_ns - now_ns) / 1e9
    if not ahead_s:
        return None
    return Refused(
        CLOCK_MISMATCH,
        f"expected the agent's CLOCK_MONOTONIC, found one that is {abs(ahead_s):g} s "
        f"{'ahead of' if ahead_s > 0 else 'behind'} it: trainer and agent must be in one time namespace",
    )


def _seen_ahead_s(peer: Peer) -> float | None:
    """Return by how much a peer's clock is ahead of ours; None if that is not visible."""
    if peer.pid == 0:
        return None
    try:
        if os.stat(f"/proc/{peer.pid}/ns/time").st_ino == os.stat("/proc/self/ns/time").st_ino:
            ahead_s = 0.0
        else:
            ahead_s = _offset_s(str(peer.pid)) - _offset_s("self")
    except (OSError, ValueError):  # no access, or a kernel without time namespaces
        return None
    return None if peer.has_ended else ahead_s


def _offset_s(pid: str) -> float:
    """Return a process's clock offset, from lines of `CLOCK SECONDS NANOSECONDS`."""
    for line in Path(f"/proc/{pid}/timens_offsets").read_text().splitlines():
        clock, seconds, nanoseconds = line.split()
        if clock == "monotonic":
            return int(seconds) + int(nanoseconds) / 1e9
    raise ValueError("expected a line for the clock monotonic")


# --- Its cgroups --------------------------------------------------------------------------------------------
#
# The controller `devices` of cgroup v1 and programs on cgroups of v2 can deny devices; a node may have both.


_V2 = "cgroup2"
_V1_CONTROLLER = "devices"


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted hierarchy: its part `root` is mounted at `folder`."""

    is_v2: bool
    root: PurePosixPath
    folder: Path


def parse_mounts(mountinfo: str) -> list[Mount]:
    """Return the hierarchies that can deny devices, from /proc/PID/mountinfo."""
    found = []
    for line in mountinfo.splitlines():
        place, _, kind = line.partition(" - ")
        fields, kinds = place.split(), kind.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        is_v2 = kinds[0] == _V2
        if is_v2 or (kinds[0] == "cgroup" and _V1_CONTROLLER in kinds[2].split(",")):
            found.append(Mount(is_v2, PurePosixPath(fields[3]), Path(fields[4])))
    return found


def parse_memberships(cgroup: str) -> dict[bool, PurePosixPath]:
    """Return a process's cgroups in these hierarchies (`is_v2` → path), from /proc/PID/cgroup."""
    found = {}
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found[True] = PurePosixPath(path)
        elif _V1_CONTROLLER in controllers.split(","):
            found[False] = PurePosixPath(path)
    return found


def cgroups_to_enter(
    mounts: list[Mount], own: dict[bool, PurePosixPath], others: dict[bool, PurePosixPath]
) -> list[Path] | None:
    """Return the cgroups that a process must enter to join another's; None if one is out of reach."""
    folders = []
    for is_v2, path in others.items():
        if own.get(is_v2) == path:
            continue
        folder = next(
            (mount.folder / inside for mount in mounts if (inside := _inside(mount, is_v2, path))), None
        )
        if folder is None:
            return None
        folders.append(folder)
    return folders


def _inside(mount: Mount, is_v2: bool, path: PurePosixPath) -> PurePosixPath | None:
    if mount.is_v2 != is_v2 or not path.is_relative_to(mount.root):
        return None
    inside = path.relative_to(mount.root)
    # Paths outside the agent's own cgroup namespace begin with "/..".
    return None if ".." in inside.parts else inside


def cgroups_of(pid: int | str) -> dict[bool, PurePosixPath]:
    """Return the cgroups of a process. Raises OSError if there is no such process."""
    return parse_memberships(Path(f"/proc/{pid}/cgroup").read_text())


def cgroup_mounts() -> list[Mount]:
    """Return the hierarchies that are mounted for the agent."""
    return parse_mounts(Path("/proc/self/mountinfo").read_text())
