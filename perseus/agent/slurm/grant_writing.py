"""The grants of a node's Slurm jobs: one file for each, from its prolog to its epilog.

Slurm gives a GPU to one job at a time. So another job's grant for the same GPU belongs to a job that is over,
whose epilog never ran (slurmd may have died); it is removed.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from perseus.agent.claims.grants import MalformedGrantError, parse
from perseus.agent.slurm.job import SlurmJob
from perseus.regular_file import MAX_SMALL_FILE_BYTES, open_regular, read_bounded

_FOLDER_MODE = 0o755
_FILE_MODE = 0o644
_OURS = "slurm-*"


def write_grant(folder: Path, job: SlurmJob, gpu_uuids: Sequence[str]) -> None:
    """Grant a job's GPUs to its user, and to nobody else. Raises OSError."""
    folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    for path in folder.glob(_OURS):
        if path.name != job.file_name and not granted(path).isdisjoint(gpu_uuids):
            path.unlink(missing_ok=True)
    draft = folder / f".{job.file_name}"
    draft.unlink(missing_ok=True)
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
    with open(file, "w") as writing:
        os.fchmod(file, _FILE_MODE)  # despite the umask
        writing.write(job.grant(gpu_uuids))
    draft.rename(folder / job.file_name)


def take_back(folder: Path, job: SlurmJob) -> frozenset[str]:
    """Revoke a job's grant; return its GPUs' UUIDs, none if it had no grant. Raises OSError."""
    path = folder / job.file_name
    had = granted(path)
    path.unlink(missing_ok=True)
    return had


def granted(path: Path) -> frozenset[str]:
    """Return the GPUs that a file grants; none if it is missing or malformed."""
    try:
        content = read_bounded(open_regular(path), MAX_SMALL_FILE_BYTES).decode()
        return frozenset(gpu for grant in parse(content) for gpu in grant.gpus)
    except (OSError, MalformedGrantError, UnicodeDecodeError):
        return frozenset()
