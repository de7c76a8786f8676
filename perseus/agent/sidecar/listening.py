"""The local socket as a file: who may connect, decided before anybody can.

The socket is made in a folder that nobody else can enter, gets its permissions and its group there, listens,
and only then is moved into place: at no moment can somebody connect who may not.

OSError
 ├─ SocketInUseError     another agent, or something else, has the path
 └─ NoSuchGroupError     the group that was asked for is none of this node's
"""

import grp
import os
import socket
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

import structlog

_log = structlog.get_logger(__name__)

DEFAULT_GROUP = "perseus"
"""The group that may connect where none is named, if the node has it."""

# Whoever connects without waiting (a probe does) is turned away by the kernel where it is full.
_BACKLOG = 1024
_MAX_PATH_BYTES = 107  # sockaddr_un, less the final zero
_NOBODY_ELSE = 0o600


class SocketInUseError(OSError):
    """The socket's path is taken."""


class NoSuchGroupError(OSError):
    """There is no such group, or the agent may not give files to it."""


@dataclass(frozen=True, slots=True)
class SocketAccess:
    """Who may connect: permissions, and the name of a group (None: `DEFAULT_GROUP`, if the node has it)."""

    mode: int = 0o660
    group: str | None = None


class Listener:
    """A listening socket at a path."""

    def __init__(self, path: Path, access: SocketAccess) -> None:
        """Listen at `path`, whose folder is made where it is missing. OSError, see above."""
        size = len(os.fsencode(path))
        if size > _MAX_PATH_BYTES:
            raise OSError(f"{path}: expected a socket path of at most {_MAX_PATH_BYTES} bytes, found {size}")
        self._path = path
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        _check_free(path)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._identity = self._put_in_place(access)
        except BaseException:
            self.socket.close()
            raise

    def close(self) -> None:
        """Stop listening, and remove the socket, unless another one has its place."""
        self.socket.close()
        try:
            found = self._path.lstat()
        except FileNotFoundError:
            return
        if (found.st_dev, found.st_ino) == self._identity:
            self._path.unlink()

    def _put_in_place(self, access: SocketAccess) -> tuple[int, int]:
        private = Path(tempfile.mkdtemp(prefix=".perseus-", dir=self._path.parent))  # 0700
        folder = os.open(private, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchmod(self.socket.fileno(), _NOBODY_ELSE)  # what bind makes has this, whatever the umask
            self.socket.bind(f"/proc/self/fd/{folder}/socket")
            gid = _group_to_give(private / "socket", access)
            if gid is not None:
                os.chown("socket", -1, gid, dir_fd=folder, follow_symlinks=False)
            os.chmod("socket", access.mode, dir_fd=folder)
            self.socket.listen(_BACKLOG)
            self.socket.setblocking(False)
            found = os.stat("socket", dir_fd=folder, follow_symlinks=False)
            os.rename("socket", self._path, src_dir_fd=folder)
        except BaseException:
            (private / "socket").unlink(missing_ok=True)
            raise
        finally:
            os.close(folder)
            private.rmdir()
        return found.st_dev, found.st_ino


def _group_to_give(path: Path, access: SocketAccess) -> int | None:
    """The group that the socket is to have; None to leave it with the agent's own."""
    name = access.group
    wanted = DEFAULT_GROUP if name is None else name
    try:
        gid = grp.getgrnam(wanted).gr_gid
        os.chown(path, -1, gid)
    except KeyError:
        problem = "this node has no such group (groupadd makes one)"
    except PermissionError:
        problem = "the agent is neither root nor a member of it"
    else:
        return gid
    if name is not None:
        raise NoSuchGroupError(
            f"socket_group: expected a group to give the socket to, found {name!r}: {problem}"
        )
    if os.geteuid() == 0 and not access.mode & stat.S_IWOTH:  # who may write may connect
        _log.warning("only root may connect", group=wanted, reason=problem)
    return None


def _check_free(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SocketInUseError(f"{path}: expected no file, or an agent's socket, found something else")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return  # left by an agent that died
        except OSError as error:
            raise SocketInUseError(f"{path}: expected an agent's socket, found another: {error}") from error
    raise SocketInUseError(f"{path}: expected no agent there, found one that listens")
