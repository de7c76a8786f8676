"""The GPUs of trainers' ranks: opened for one rank at a time, counted, and given back.

With a folder for NVIDIA's dcgm-exporter (`--hpc-job-mapping-dir`) there is a file for each GPU that a job
runs on: its name the GPU's number on the node, its content the job's identifier on a line. The exporter
puts it on the GPU's metrics as the label `hpc_job`, and writes it as it reads it: so only what is a job's
identifier is written. Beside each file lies what was written: by that an agent that follows one that died
knows which files are its own to remove, as a batch system may have others in the same folder.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from perseus.agent.gpu import Gpu, GpuError
from perseus.agent.gpu.executor import GpuExecutor
from perseus.agent.rank.messages import GpuDescription, GpuErrorReason, GpuLimits
from perseus.agent.restore.guarded import GuardedGpu
from perseus.agent.restore.records import RecordFolder
from perseus.agent.restore.restorer import Restorer
from perseus.agent.sidecar.backends import Backend
from perseus.agent.sidecar.counter_poller import read_limits
from perseus.agent.sidecar.optional import OptionalParts
from perseus.agent.sidecar.settings import AgentSettings
from perseus.metrics.distribution import Distribution

# How often power and clock are read for the metrics.
_READING_S = 1.0

_SET_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0)

NOT_SERVED = ""
"""Stands for GPUs that were never opened: whoever asks for one may name anything."""


class GpuCounters:
    """Of one GPU, since the agent started.

    Attributes:
        sets: what sets took, from their begin until the clock was in force.
        dropped_mark_count: marks that trainers dropped.
        error_counts: errors that were met.
    """

    def __init__(self) -> None:
        self.sets = Distribution(_SET_BOUNDS_S)
        self.dropped_mark_count = 0
        self.error_counts: Counter[GpuErrorReason] = Counter()


class AgentCounters:
    """Of all GPUs that were opened, by UUID; and of trainers.

    Attributes:
        gpus: the GPUs.
        refusal_counts: trainers that were turned away, or had to go, by the stable reason.
    """

    def __init__(self) -> None:
        self.gpus: dict[str, GpuCounters] = {}
        self.refusal_counts: Counter[str] = Counter()

    def opened(self, gpu_uuid: str) -> GpuCounters:
        """Return what is counted of a GPU that was opened."""
        return self.gpus.setdefault(gpu_uuid, GpuCounters())

    def note_error(self, gpu_uuid: str, reason: GpuErrorReason) -> None:
        """Count an error."""
        known = self.gpus.get(gpu_uuid)
        (known if known is not None else self.opened(NOT_SERVED)).error_counts[reason] += 1

    def note_dropped(self, gpu_uuid: str, mark_count: int) -> None:
        """Count marks that a trainer dropped."""
        if (known := self.gpus.get(gpu_uuid)) is not None:
            known.dropped_mark_count += mark_count


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


@dataclass(frozen=True, slots=True)
class OpenedGpu:
    """A GPU that is open, and what there is to say of it.

    `give_back` is called with what closes it (and may block), `on_part_failed` with an error in what the rank
    can do without. Power and clock are to be read every
    `reading_interval_s`, if at all.
    """

    gpu: Gpu
    description: GpuDescription
    reading_interval_s: float | None
    give_back: Callable[[Callable[[], None]], Awaitable[None]]
    on_part_failed: Callable[[str, Exception], None]

    def close(self) -> None:
        """Let go of it."""
        self.gpu.close()


class RankGpus:
    """Opens GPUs of `gpus` for ranks; `restorer` hands them out, `records` says what is to be restored.

    Attributes:
        observe: whether clocks are only watched.
        vitals: what is counted of them.
    """

    def __init__(
        self,
        settings: AgentSettings,
        gpus: Backend,
        executor: GpuExecutor,
        records: RecordFolder,
        restorer: Restorer,
        optional: OptionalParts,
    ) -> None:
        self.observe = settings.observe
        self.counters = AgentCounters()
        self._optional = optional
        self._settings = settings
        self._gpus = gpus
        self._executor = executor
        self._records = records
        self._restorer = restorer
        self._mapping = JobMapping(settings.job_mapping_folder) if settings.job_mapping_folder else None
        if self._mapping is not None:
            self._mapping.clear()

    async def open(self, uuid: str) -> OpenedGpu:
        """Open a GPU that nobody else has; `GpuError` if it can't be had, and then it is free again."""
        return await self._restorer.take(uuid, self._open)

    def _open(self, uuid: str) -> OpenedGpu:
        """Blocks, as the driver is asked."""
        gpu = self._gpus.open(uuid)
        try:
            if not self.observe:
                gpu = GuardedGpu(gpu, self._records, self._settings.stock)
            try:
                limits = read_limits(gpu)
            except GpuError as error:  # of a GPU that fails: who polls its counter will say so
                _log.warning("power limit not known", gpu=gpu.uuid, reason=str(error))
                limits = GpuLimits()
            return OpenedGpu(
                gpu,
                GpuDescription(gpu.uuid, gpu.name, gpu.supported_clocks_mhz, limits),
                _READING_S if self._settings.metrics_listen is not None else None,
                lambda close: self._restorer.give_back(uuid, close),
                self._optional.failed,
            )
        except BaseException:
            gpu.close()
            raise

    async def map_job(self, uuid: str, job_id: str) -> int | None:
        """Note for dcgm-exporter that a job runs on a GPU; return its index, None if nothing is noted."""
        if self._mapping is not None:
            try:
                index = (await self._executor.run(uuid, lambda: self._gpus.inspect(uuid))).index
                self._mapping.enter(index, job_id)
                return index
            except GpuError:  # whoever serves it meets the same
                pass
            except Exception as error:
                self._optional.failed("job mapping", error)
        return None

    def unmap_job(self, gpu_index: int) -> None:
        """No job runs any more on a GPU that one was noted for."""
        if self._mapping is not None:
            self._mapping.leave(gpu_index)
