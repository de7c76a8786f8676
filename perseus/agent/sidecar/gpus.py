"""The GPUs of trainers' ranks: opened for one rank at a time, with counters, and given back.

With a folder for NVIDIA's dcgm-exporter (`--hpc-job-mapping-dir`), the agent writes a file for each GPU that
a job runs on: its name is the GPU's number on the node, its content a line with the job's identifier. The
exporter adds the content unescaped to the GPU's metrics as the label `hpc_job`, so the agent writes only
valid identifiers. It keeps a copy beside each file: from it the next agent, after a crash, recognises the
files to remove, since a batch system may have others in the same folder.
"""

import contextlib
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
from perseus.job_id import is_job_id
from perseus.metrics.distribution import Distribution

# How often power and clock are read for the metrics.
_READING_S = 1.0

_SET_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0)

NOT_SERVED = ""
"""The key for GPUs that were never opened: a trainer may ask for any name."""


class GpuCounters:
    """Counters of one GPU, since the agent started.

    Attributes:
        sets: durations of sets, from their begin until the clock was in force.
        dropped_mark_count: marks that trainers dropped.
        error_counts: errors by reason.
    """

    def __init__(self) -> None:
        self.sets = Distribution(_SET_BOUNDS_S)
        self.dropped_mark_count = 0
        self.error_counts: Counter[GpuErrorReason] = Counter()


class AgentCounters:
    """Counters of all GPUs that were opened, and of trainers.

    Attributes:
        gpus: the GPUs' counters, by UUID.
        refusal_counts: trainers that were refused or evicted, by stable reason.
    """

    def __init__(self) -> None:
        self.gpus: dict[str, GpuCounters] = {}
        self.refusal_counts: Counter[str] = Counter()

    def opened(self, gpu_uuid: str) -> GpuCounters:
        """Return the counters of a GPU that was opened."""
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

_OWN = ".perseus"


class JobMapping:
    """The mapping files of a node. A failure to write one is only logged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def clear(self) -> None:
        """Remove the files of an agent that died."""
        try:
            if not self._folder.is_dir():
                self._folder.mkdir(parents=True)
                self._folder.chmod(0o755)  # despite the umask: the exporter may run as another user
            found = [int(path.name[1 : -len(_OWN)]) for path in self._folder.glob(f".[0-9]*{_OWN}")]
        except (OSError, ValueError) as error:
            _log.warning("job mapping not cleared", folder=str(self._folder), reason=str(error))
            return
        for gpu_index in found:
            self.leave(gpu_index)

    def enter(self, gpu_index: int, job_id: str) -> None:
        """Write the file of a GPU that a job runs on. A file from another program stays."""
        if not is_job_id(job_id):
            _log.warning("job not mapped: invalid job identifier", gpu_index=gpu_index)
            return
        file, own = self._paths(gpu_index)
        try:
            self.leave(gpu_index)
            if file.exists():
                _log.warning("job not mapped: the file belongs to another program", file=str(file))
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
        """Remove the file of a GPU that no job of this agent runs on."""
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
    """An open GPU and its description.

    `give_back` takes a function that closes the GPU and may block, `on_part_failed` an error in an optional
    part. Power and clock are read every `reading_interval_s`; never if it is None.
    """

    gpu: Gpu
    description: GpuDescription
    reading_interval_s: float | None
    give_back: Callable[[Callable[[], None]], Awaitable[None]]
    on_part_failed: Callable[[str, Exception], None]

    def close(self) -> None:
        """Close the GPU."""
        self.gpu.close()


class RankGpus:
    """Opens GPUs of `gpus` for ranks; `restorer` hands them out, `records` keeps their restore records.

    Attributes:
        observe: whether the agent only measures and never sets clocks.
        counters: the counters of GPUs and trainers.
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
        """Open a GPU for one rank. Raises `GpuError` if that fails, and leaves the GPU free."""
        return await self._restorer.take(uuid, self._open)

    def _open(self, uuid: str) -> OpenedGpu:
        """Open a GPU; blocks on the driver."""
        gpu = self._gpus.open(uuid)
        try:
            if not self.observe:
                gpu = GuardedGpu(gpu, self._records, self._settings.stock)
            try:
                limits = read_limits(gpu)
            except GpuError as error:  # if the GPU has failed, polling its counter will report it
                _log.warning("power limit not known", gpu=gpu.uuid, reason=str(error))
                limits = GpuLimits()
            return OpenedGpu(
                gpu,
                GpuDescription(
                    gpu.uuid,
                    gpu.name,
                    gpu.supported_clocks_mhz,
                    limits,
                    stock.highest_mhz if (stock := self._settings.stock) is not None else None,
                ),
                _READING_S if self._settings.metrics_listen is not None else None,
                lambda close: self._restorer.give_back(uuid, close),
                self._optional.failed,
            )
        except BaseException:
            gpu.close()
            raise

    async def map_job(self, uuid: str, job_id: str) -> int | None:
        """Map a job to a GPU for dcgm-exporter; return the GPU's index, None if nothing was mapped."""
        if self._mapping is not None:
            try:
                index = (await self._executor.run(uuid, lambda: self._gpus.inspect(uuid))).index
                self._mapping.enter(index, job_id)
                return index
            except GpuError:  # serving the GPU meets the same error
                pass
            except Exception as error:
                self._optional.failed("job mapping", error)
        return None

    def unmap_job(self, gpu_index: int) -> None:
        """End the mapping of a job to a GPU."""
        if self._mapping is not None:
            self._mapping.leave(gpu_index)
