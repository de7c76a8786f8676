"""Bearer tokens as clients have them: in a file that is read again when it changes, or as they are.

An operator's token lies where the coordinator of the same user writes it, so that commands on the same
machine find it by themselves.
"""

import contextlib
import os
import re
import stat
import tempfile
from pathlib import Path

import structlog

from perseus.regular_file import open_regular

_log = structlog.get_logger(__name__)
_TOKEN = re.compile(r"[!-~]{1,512}")


class TokenFileError(Exception):
    """A token's file can't be used; the text names it."""


def default_token_file() -> Path:
    """Root's is in /var/lib/perseus; others have theirs under $XDG_STATE_HOME (~/.local/state)."""
    if os.geteuid() == 0:
        return Path("/var/lib/perseus/operator.token")
    state_home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state_home) / "perseus" / "operator.token"


def check_token(text: str, where: object) -> str:
    """Return a token without the space around it.

    Raises:
        TokenFileError: it is none.
    """
    token = text.strip()
    if not _TOKEN.fullmatch(token):
        raise TokenFileError(f"{where}: expected a token, found none")
    return token


def read_token(path: Path) -> str:
    """Return the token in a file.

    Raises:
        TokenFileError: there is none.
    """
    try:
        with os.fdopen(open_regular(path), encoding="ascii") as file:
            token = check_token(file.read(), path)
            mode = os.fstat(file.fileno()).st_mode
        if mode & stat.S_IROTH:
            _log.warning(
                "everybody on this machine can read a token", file=str(path), mode=f"{mode & 0o777:o}"
            )
        return token
    except OSError as error:
        raise TokenFileError(f"{path}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TokenFileError(f"{path}: expected a token, found none") from None


def own_token(path: Path, new: str) -> str:
    """Return the token in a file that is this process's user's alone; write a new one if there is no file.

    Raises:
        TokenFileError: the file can't be made, or is not this user's alone.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_unless_there(path, new)
        found = path.stat(follow_symlinks=False)
    except OSError as error:
        raise TokenFileError(f"{path}: can't be written: {error.strerror}") from None
    is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    if not is_own:
        raise TokenFileError(f"{path}: expected a file of this user's with mode 0600, found otherwise")
    return read_token(path)


def _write_unless_there(path: Path, token: str) -> None:
    """Write it whole or not at all; what is there already stays."""
    if os.path.lexists(path):
        return
    descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # of mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"{token}\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another coordinator was quicker
            os.link(beside, path)
    finally:
        os.unlink(beside)


class TokenSource:
    """A client's token: of a file, or given as it is.

    Raises:
        TokenFileError: the file holds none.
    """

    def __init__(self, *, path: Path | None = None, token: str = "") -> None:
        self._path = path
        self._token = token
        self._stamp: tuple[int, int, int] | None = None
        if path is not None:
            self._stamp, self._token = _stamp(path), read_token(path)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What shows it to a coordinator; a file is read again if it has changed, and can be read."""
        if self._path is not None:
            try:
                if (stamp := _stamp(self._path)) != self._stamp:
                    self._token, self._stamp = read_token(self._path), stamp
            except TokenFileError:
                pass  # it is being written, say
        return (("authorization", f"Bearer {self._token}"),)


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise TokenFileError(f"{path}: can't be read: {error.strerror}") from None
    return found.st_mtime_ns, found.st_ino, found.st_size


def find_token(*, path: Path | None, token: str | None, is_local: bool) -> TokenSource | None:
    """The token that a client was given, or else the one of an operator on the same machine, if there is one.

    Raises:
        TokenFileError: what was given is none.
    """
    if token:
        return TokenSource(token=check_token(token, "the token"))
    if path is not None:
        return TokenSource(path=path)
    if is_local and os.access(default_token_file(), os.R_OK):
        return TokenSource(path=default_token_file())
    return None
