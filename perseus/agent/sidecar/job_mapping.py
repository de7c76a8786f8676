"""Which job runs on which GPU, as files for NVIDIA's dcgm-exporter (`--hpc-job-mapping-dir`).

A folder with a file for each GPU that a job runs on: its name the GPU's number on the node, its content the
job's identifier on a line. The exporter puts it on the GPU's metrics as the label `hpc_job`, and writes it as
it reads it: so only what is a job's identifier is written. Beside each file lies what was written: by that an
agent that follows one that died knows which files are its own to remove, as a batch system may have others in
the same folder.
"""

import contextlib
import re
from pathlib import Path

import structlog

_log = structlog.get_logger(__name__)

# What the coordinator takes for one.
_JOB_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")

_OWN = ".perseus"


class JobMapping:
    """The files of a node. Failing to write one is told in the log, and stands in nobody's way."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def clear(self) -> None:
        """Remove what an agent that died has left."""
        try:
            if not self._folder.is_dir():
                self._folder.mkdir(parents=True)
                self._folder.chmod(0o755)  # whatever the umask: the exporter may be another user's
            found = [int(path.name[1 : -len(_OWN)]) for path in self._folder.glob(f".[0-9]*{_OWN}")]
        except (OSError, ValueError) as error:
            _log.warning("job mapping not cleared", folder=str(self._folder), reason=str(error))
            return
        for gpu_index in found:
            self.leave(gpu_index)

    def enter(self, gpu_index: int, job_id: str) -> None:
        """A job runs on a GPU. What somebody else has written of it stays."""
        if not _JOB_ID.fullmatch(job_id):
            _log.warning("job not mapped: its name is no job's identifier", gpu_index=gpu_index)
            return
        file, own = self._paths(gpu_index)
        try:
            self.leave(gpu_index)
            if file.exists():
                _log.warning("job not mapped: the file is another's", file=str(file))
                return
            own.write_text(f"{job_id}\n")
            own.chmod(0o644)
            beside = own.with_suffix(".new")
            beside.write_text(f"{job_id}\n")
            beside.chmod(0o644)
            beside.replace(file)
        except OSError as error:
            _log.warning("job not mapped", file=str(file), reason=error.strerror)

    def leave(self, gpu_index: int) -> None:
        """No job runs on a GPU, as far as this agent knows."""
        file, own = self._paths(gpu_index)
        with contextlib.suppress(FileNotFoundError):
            try:
                written = own.read_bytes()
                if file.read_bytes() == written:
                    file.unlink()
            except OSError as error:
                if not isinstance(error, FileNotFoundError):
                    _log.warning("job mapping not removed", file=str(file), reason=error.strerror)
                    return
            own.unlink()

    def _paths(self, gpu_index: int) -> tuple[Path, Path]:
        return self._folder / str(gpu_index), self._folder / f".{gpu_index}{_OWN}"
