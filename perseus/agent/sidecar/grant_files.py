"""The files that say who may claim which GPU; `claims.grants` reads what is in them.

Only what nobody but root and the agent's user can write counts: the folder, and regular files in it. Names
that begin with a dot or end with a tilde are left out. Links are followed: a mounted ConfigMap is made of
them, and its folder is open to all (0777), but on a mount that nobody can write to.
"""

import os
import stat
from pathlib import Path

from perseus.agent.claims.grants import Grant, Grants, MalformedGrantError, parse
from perseus.regular_file import open_regular

_MAX_FILES = 4096
_MAX_BYTES = 64 * 1024
_OTHERS_WRITE = 0o022


def read_grants(folder: Path) -> Grants:
    """The grants in the files of a folder; none if there is no such folder."""
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
            continue  # taken back this moment
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
