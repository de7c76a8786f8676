"""Clients' bearer tokens: from a file that is reread when it changes, or given directly.

The coordinator writes an operator's token to a default file of its user, where commands on the same machine
find it.
"""

import contextlib
import os
import re
import stat
import tempfile
from pathlib import Path

import structlog

from perseus.regular_file import MAX_SMALL_FILE_BYTES, open_regular, read_bounded

_log = structlog.get_logger(__name__)
_TOKEN = re.compile(r"[!-~]{1,512}")


class TokenFileError(Exception):
    """A token's file can't be used; the text names it."""


def default_token_file() -> Path:
    """Return root's file in /var/lib/perseus, or a file under $XDG_STATE_HOME (~/.local/state)."""
    if os.geteuid() == 0:
        return Path("/var/lib/perseus/operator.token")
    state_home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state_home) / "perseus" / "operator.token"


def check_token(text: str, where: object) -> str:
    """Return a token without surrounding whitespace.

    Raises:
        TokenFileError: it is not a token.
    """
    token = text.strip()
    if not _TOKEN.fullmatch(token):
        raise TokenFileError(f"{where}: expected a token, found none")
    return token


def read_token(path: Path) -> str:
    """Return the token in a file.

    Raises:
        TokenFileError: the file can't be read or has no token.
    """
    try:
        file = open_regular(path)
        mode = os.fstat(file).st_mode
        token = check_token(read_bounded(file, MAX_SMALL_FILE_BYTES).decode("ascii"), path)
        if mode & stat.S_IROTH:
            _log.warning(
                "every user of this machine can read a token", file=str(path), mode=f"{mode & 0o777:o}"
            )
        return token
    except OSError as error:
        raise TokenFileError(f"{path}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TokenFileError(f"{path}: expected a token, found none") from None


def own_token(path: Path, new: str) -> str:
    """Return the token in a file that belongs to this process's user alone; create it with `new` if missing.

    Raises:
        TokenFileError: the file can't be created, or does not belong to this user alone.
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
    """Write a token atomically, unless the file exists."""
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
    """A client's token, from a file or given directly.

    Attributes:
        origin: the file or the variable that the token is from, for error messages.

    Raises:
        TokenFileError: the file has no token.
    """

    def __init__(self, *, path: Path | None = None, token: str = "", variable: str = "") -> None:
        self.origin = str(path) if path is not None else variable
        self._path = path
        self._token = token
        self._stamp: tuple[int, int, int] | None = None
        if path is not None:
            self._stamp, self._token = _stamp(path), read_token(path)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata that carries the token; rereads the file if it has changed and is readable."""
        if self._path is not None:
            try:
                if (stamp := _stamp(self._path)) != self._stamp:
                    self._token, self._stamp = read_token(self._path), stamp
            except TokenFileError:
                pass  # it may be in the middle of a write
        return (("authorization", f"Bearer {self._token}"),)


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise TokenFileError(f"{path}: can't be read: {error.strerror}") from None
    return found.st_mtime_ns, found.st_ino, found.st_size


def find_token(
    *, path: Path | None, token: str | None, is_local: bool, variable: str = "PERSEUS_TOKEN"
) -> TokenSource | None:
    """Return the token that a client was given, or else an operator's on the same machine, if any.

    `variable`: where `token` is from, for error messages.

    Raises:
        TokenFileError: the given token or file is not valid.
    """
    if token:
        return TokenSource(token=check_token(token, variable), variable=variable)
    if path is not None:
        return TokenSource(path=path)
    if is_local and os.access(default_token_file(), os.R_OK):
        return TokenSource(path=default_token_file())
    return None
