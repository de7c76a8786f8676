"""A real NVIDIA GPU, through NVML (the module `pynvml`, which the distribution nvidia-ml-py provides)."""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import structlog

from perseus.gpu import (
    ClockNotSupportedError,
    GpuDriverError,
    GpuError,
    GpuInUseError,
    GpuLostError,
    GpuNotFoundError,
    GpuPermissionError,
    GpuUnsupportedError,
    GpuUse,
)

_log = structlog.get_logger(__name__)

_INSTALL = "install nvidia-ml-py>=12.570, and uninstall other packages that have a module pynvml"


class NotInModuleError(GpuUnsupportedError):
    """The module pynvml lacks a name; whether driver and GPU have the feature is not known."""


class Pynvml:
    """The module pynvml, loaded when a name of it is first used.

    Distributions of several ages and origins have a module of this name. One that is missing or can't be
    loaded raises `GpuDriverError`, one without a name `NotInModuleError`, and both say what to install.
    """

    def __getattr__(self, name: str) -> Any:
        if not name.lower().startswith(("nvml", "c_nvml")):
            raise AttributeError(name)
        module = _module()
        try:
            return getattr(module, name)
        except AttributeError as error:
            raise NotInModuleError(f"{module_description()} has no {name}: {_INSTALL}") from error

    def __dir__(self) -> list[str]:
        return dir(_module())


PYNVML = Pynvml()


def _module() -> ModuleType:
    try:
        import pynvml
    except Exception as error:  # some other file of that name may raise anything
        raise GpuDriverError(f"the Python module pynvml can't be loaded ({error!r}): {_INSTALL}") from error
    return cast("ModuleType", pynvml)


def module_description() -> str:
    """Name the module pynvml with its distribution, version and file. Raises `GpuDriverError` without one."""
    file = Path(getattr(_module(), "__file__", None) or "no file")  # as for a mere folder of that name
    origin = "of an unknown distribution"
    for name in ("nvidia-ml-py", "pynvml"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            distribution = metadata.distribution(name)
            if any(Path(str(distribution.locate_file(path))) == file for path in distribution.files or ()):
                origin = f"{name} {distribution.version}"
    return f"pynvml ({origin}, {file})"


def module_problem() -> str:
    """Say why the module pynvml can't be loaded, or that it is too old; empty if it is neither."""
    try:
        # The newest of the names that the agent uses.
        PYNVML.c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t  # noqa: B018
    except GpuError as error:
        return str(error)
    return ""


_NOT_OFFERED = "this GPU or this driver does not support it"
_DRIVER_GONE = "the NVIDIA kernel driver is not loaded, or was unloaded: load it and restart training"
_NO_SUCH_GPU = "compare with the UUIDs that nvidia-smi -L lists"
# Every documented error, by the numbers of nvml.h: older modules do not name them all. Others mean that the
# driver has failed.
_ERRORS: dict[int, tuple[type[GpuError], str]] = {
    1: (GpuDriverError, _DRIVER_GONE),  # uninitialized
    3: (GpuUnsupportedError, _NOT_OFFERED),  # not supported
    4: (  # no permission
        GpuPermissionError,
        "setting clocks needs root or CAP_SYS_ADMIN: run the agent as root, grant it that capability, "
        "or run it with --observe to measure only",
    ),
    6: (GpuNotFoundError, _NO_SUCH_GPU),  # not found
    9: (GpuDriverError, _DRIVER_GONE),  # driver not loaded
    12: (  # library not found
        GpuDriverError,
        "libnvidia-ml.so.1 is missing or can't be loaded: install the NVIDIA driver, or pass it into the "
        "container",
    ),
    13: (GpuUnsupportedError, _NOT_OFFERED),  # function not found
    15: (GpuLostError, "the GPU fell off the bus: see the kernel log"),  # GPU is lost
    16: (GpuLostError, "the GPU needs a reset (nvidia-smi --gpu-reset)"),  # reset required
    17: (GpuDriverError, "the operating system or its cgroups block it"),  # operating system
    18: (  # version mismatch of library and driver
        GpuDriverError,
        "the driver was updated while its kernel module stayed loaded: reload it, or reboot",
    ),
    19: (GpuInUseError, "another client of the driver holds the GPU"),  # in use
    26: (GpuUnsupportedError, _NOT_OFFERED),  # deprecated
    28: (GpuNotFoundError, _NO_SUCH_GPU),  # GPU not found
}
_FINDING = ("nvmlInit", "nvmlDeviceGetHandleByUUID")


@contextmanager
def calling(function: str, subject: str, nvml: Any) -> Iterator[None]:
    """Convert an NVML error of `function` to a `GpuError`, whose text begins with `subject`.

    "Not found" from a function that does not look for a GPU means that the GPU lacks what it was asked for.
    """
    try:
        yield
    except nvml.NVMLError as error:
        error_class, advice = _ERRORS.get(error.value, (GpuDriverError, "the driver failed: see its log"))
        if error_class is GpuNotFoundError and function not in _FINDING:
            error_class, advice = GpuUnsupportedError, _NOT_OFFERED
        raise error_class(f"{subject}: {function}: {error}: {advice}") from error


@contextmanager
def connected(subject: str, nvml: Any) -> Iterator[None]:
    """Connect to NVML, which counts connections. Raises `GpuError` if that fails."""
    with calling("nvmlInit", subject, nvml):
        nvml.nvmlInit()
    try:
        yield
    finally:
        with contextlib.suppress(nvml.NVMLError):  # the query has been answered
            nvml.nvmlShutdown()


def handle_of(uuid: str, nvml: Any) -> Any:
    """Return NVML's handle of a GPU. Raises `GpuError`."""
    with calling("nvmlDeviceGetHandleByUUID", f"GPU {uuid}", nvml):
        return nvml.nvmlDeviceGetHandleByUUID(uuid.encode())  # older modules take no str


def text(answer: str | bytes) -> str:
    """Return a text of NVML, which older modules leave as bytes."""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


def inspect(uuid: str, device_folder: str, nvml: Any = PYNVML) -> GpuUse:
    """Return a GPU's place and its compute processes without changing anything. Raises as `NvmlGpu`.

    Compute processes include those of MPS; processes that only draw (a display's) do not count.
    """
    subject = f"GPU {uuid}"
    with connected(subject, nvml):
        handle = handle_of(uuid, nvml)
        with calling("nvmlDeviceGetIndex", subject, nvml):
            index = int(nvml.nvmlDeviceGetIndex(handle))
        try:
            with calling("nvmlDeviceGetMinorNumber", subject, nvml):
                node = f"{device_folder}/nvidia{int(nvml.nvmlDeviceGetMinorNumber(handle))}"
        except GpuUnsupportedError:  # a GPU without its own device node (WSL)
            node = ""
        return GpuUse(index, node, _process_ids(handle, subject, nvml))


def _process_ids(handle: Any, subject: str, nvml: Any) -> tuple[int, ...] | None:
    computing = _processes("nvmlDeviceGetComputeRunningProcesses", handle, subject, nvml)
    if computing is None:
        return None
    # A driver without MPS has no MPS processes.
    shared = _processes("nvmlDeviceGetMPSComputeRunningProcesses", handle, subject, nvml)
    return (*computing, *(shared or ()))


def _processes(function: str, handle: Any, subject: str, nvml: Any) -> tuple[int, ...] | None:
    """Call the newest version of a function that the driver has; None if it has none for this GPU."""
    for version in ("_v3", "_v2"):
        with contextlib.suppress(GpuUnsupportedError), calling(function, subject, nvml):
            return tuple(process.pid for process in getattr(nvml, function + version)(handle))
    return None


class NvmlGpu:
    """One real GPU (implements `Gpu`), chosen by its UUID; Volta or newer, not in MIG mode.

    `nvml` is the module `pynvml` or a substitute.
    """

    def __init__(self, uuid: str, *, nvml: Any = PYNVML) -> None:
        """Connect to the GPU; `close` disconnects. Raises any `GpuError` but `ClockNotSupportedError`."""
        self._nvml = nvml
        self._uuid = uuid
        self._is_memory_locked = False
        with self._call("nvmlInit"):
            nvml.nvmlInit()
        try:
            self._connect()
        except BaseException:
            with contextlib.suppress(nvml.NVMLError):  # the original error is more informative
                nvml.nvmlShutdown()
            raise

    def _connect(self) -> None:
        nvml = self._nvml
        if self._uuid.startswith("MIG-"):
            raise GpuUnsupportedError(
                f"{self._uuid}: expected a whole GPU, found a MIG device: it has no energy counter"
            )
        self._handle = handle_of(self._uuid, nvml)
        with self._call("nvmlDeviceGetArchitecture"):
            architecture = nvml.nvmlDeviceGetArchitecture(self._handle)
        if architecture < nvml.NVML_DEVICE_ARCH_VOLTA:
            raise GpuUnsupportedError(
                f"GPU {self._uuid}: expected architecture {nvml.NVML_DEVICE_ARCH_VOLTA} (Volta) or newer, "
                f"found {architecture}: it has neither locked clocks nor an energy counter"
            )
        if self._in_mig_mode():
            raise GpuUnsupportedError(
                f"GPU {self._uuid}: expected MIG mode off, found it on: MIG devices have no energy counter"
            )
        with self._call("nvmlDeviceGetName"):
            self._name = text(nvml.nvmlDeviceGetName(self._handle))
        memory_clocks_mhz = self._clocks("nvmlDeviceGetSupportedMemoryClocks")
        self._top_memory_clock_mhz, self._lowest_memory_clock_mhz = (
            memory_clocks_mhz[0],
            memory_clocks_mhz[-1],
        )
        # Locking memory needs several clocks, and Ampere (NVML: nvmlDeviceSetMemoryLockedClocks).
        self._locks_memory = len(memory_clocks_mhz) > 1 and architecture >= nvml.NVML_DEVICE_ARCH_AMPERE
        self._supported_clocks_mhz = self._clocks(
            "nvmlDeviceGetSupportedGraphicsClocks", self._top_memory_clock_mhz
        )
        if self._in_persistence_mode() is False:
            _log.info("persistence mode is off: locks end with NVML's last client", gpu=self._uuid)

    def _clocks(self, function: str, *arguments: int) -> tuple[int, ...]:
        """Return the clocks that a function lists, descending."""
        with self._call(function):
            listed = getattr(self._nvml, function)(self._handle, *arguments)
        clocks_mhz = tuple(sorted((clock_mhz for clock_mhz in listed if clock_mhz > 0), reverse=True))
        if not clocks_mhz:
            raise GpuUnsupportedError(
                f"GPU {self._uuid}: {function}: expected at least one clock, found none: vGPUs and "
                "integrated GPUs have none that can be locked"
            )
        return clocks_mhz

    def _in_mig_mode(self) -> bool:
        nvml = self._nvml
        try:
            with self._call("nvmlDeviceGetMigMode"):
                current, _pending = nvml.nvmlDeviceGetMigMode(self._handle)
        except GpuUnsupportedError:  # a GPU without MIG
            return False
        return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)

    def _in_persistence_mode(self) -> bool | None:
        nvml = self._nvml
        try:
            with self._call("nvmlDeviceGetPersistenceMode"):
                return bool(nvml.nvmlDeviceGetPersistenceMode(self._handle) == nvml.NVML_FEATURE_ENABLED)
        except GpuUnsupportedError:
            return None

    @property
    def uuid(self) -> str:
        """The GPU's UUID."""
        return self._uuid

    @property
    def name(self) -> str:
        """NVML's name of the model."""
        return self._name

    @property
    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """The graphics clocks at the highest memory clock, descending."""
        return self._supported_clocks_mhz

    @property
    def locks_memory(self) -> bool:
        """Whether the memory clock is locked too: it has several values, and the GPU is Ampere or newer."""
        return self._locks_memory

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Lock the graphics clock (nvmlDeviceSetGpuLockedClocks).

        The first set also locks the memory clock at its highest value (nvmlDeviceSetMemoryLockedClocks), if
        it has
        several: the supported graphics clocks depend on it. Both are locked, or neither.
        """
        if clock_mhz not in self._supported_clocks_mhz:
            raise ClockNotSupportedError(self._uuid, clock_mhz, self._supported_clocks_mhz)
        had_locked_memory = self._is_memory_locked
        if self._locks_memory and not had_locked_memory:
            self._lock_memory()
        try:
            self._lock_graphics(clock_mhz, clock_mhz)
        except GpuError:
            if not had_locked_memory:
                with contextlib.suppress(GpuError):  # the first error is more informative
                    self._reset_memory()
            raise

    def reset_clock(self) -> None:
        """Unlock graphics and memory (nvmlDeviceResetGpuLockedClocks, nvmlDeviceResetMemoryLockedClocks)."""
        with self._call("nvmlDeviceResetGpuLockedClocks"):
            self._nvml.nvmlDeviceResetGpuLockedClocks(self._handle)
        self._reset_memory()

    def lock_range(self, lowest_mhz: int, highest_mhz: int) -> None:
        """Lock the graphics clock to a range (nvmlDeviceSetGpuLockedClocks); unlock the memory's."""
        self._lock_graphics(lowest_mhz, highest_mhz)
        self._reset_memory()

    def _lock_graphics(self, lowest_mhz: int, highest_mhz: int) -> None:
        with self._call("nvmlDeviceSetGpuLockedClocks"):
            self._nvml.nvmlDeviceSetGpuLockedClocks(self._handle, lowest_mhz, highest_mhz)

    def _lock_memory(self) -> None:
        top_mhz = self._top_memory_clock_mhz
        try:
            with self._call("nvmlDeviceSetMemoryLockedClocks"):
                self._nvml.nvmlDeviceSetMemoryLockedClocks(self._handle, top_mhz, top_mhz)
            self._is_memory_locked = True
        except GpuUnsupportedError as error:
            self._locks_memory = False
            _log.info("memory clock not locked", gpu=self._uuid, reason=str(error))

    def _reset_memory(self) -> None:
        # The process that set the lock may have died: reset it wherever it could have been set.
        if self._locks_memory:
            try:
                with self._call("nvmlDeviceResetMemoryLockedClocks"):
                    self._nvml.nvmlDeviceResetMemoryLockedClocks(self._handle)
            except GpuUnsupportedError as error:
                may_be_locked = self._is_memory_locked or isinstance(error, NotInModuleError)
                if may_be_locked or self._takes_memory_locks():
                    raise GpuDriverError(
                        f"GPU {self._uuid}: its memory clock may still be locked: {error}"
                    ) from error
        self._is_memory_locked = False

    def _takes_memory_locks(self) -> bool:
        """Whether the memory clock can be locked at all; if so, leaves it free over its whole range."""
        try:
            with self._call("nvmlDeviceSetMemoryLockedClocks"):
                self._nvml.nvmlDeviceSetMemoryLockedClocks(
                    self._handle, self._lowest_memory_clock_mhz, self._top_memory_clock_mhz
                )
        except GpuUnsupportedError:
            return False
        return True

    def total_energy_j(self) -> float:
        """The counter (nvmlDeviceGetTotalEnergyConsumption), since the driver was loaded."""
        with self._call("nvmlDeviceGetTotalEnergyConsumption"):
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000

    def sm_clock_mhz(self) -> int:
        """The SM clock in force (nvmlDeviceGetClockInfo)."""
        with self._call("nvmlDeviceGetClockInfo"):
            clock_mhz = int(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))
        return self._reported(clock_mhz, "nvmlDeviceGetClockInfo")

    def power_w(self) -> float:
        """The power now: NVML_FI_DEV_POWER_INSTANT, or nvmlDeviceGetPowerUsage without that field.

        The latter averages over a second since Ampere, and since then GPUs have the field.
        """
        try:
            return self._power_field_w("NVML_FI_DEV_POWER_INSTANT")
        except GpuUnsupportedError:
            with self._call("nvmlDeviceGetPowerUsage"):
                usage_mw = int(self._nvml.nvmlDeviceGetPowerUsage(self._handle))
            return self._reported(usage_mw, "nvmlDeviceGetPowerUsage") / 1000

    def average_power_w(self) -> float:
        """The power averaged over a second (NVML_FI_DEV_POWER_AVERAGE)."""
        return self._power_field_w("NVML_FI_DEV_POWER_AVERAGE")

    def power_limit_w(self) -> float:
        """The lowest limit that applies (nvmlDeviceGetEnforcedPowerLimit); 0 if there is no such call."""
        try:
            with self._call("nvmlDeviceGetEnforcedPowerLimit"):
                return float(self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle)) / 1000
        except GpuUnsupportedError:
            return 0.0

    def power_profiles(self) -> tuple[int, ...]:
        """The enforced workload power profiles; none if there is no such call.

        The driver selects them from the requested ones (nvmlDeviceWorkloadPowerProfileGetCurrentProfiles).
        """
        try:
            profiles = self._nvml.c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t()
            with self._call("nvmlDeviceWorkloadPowerProfileGetCurrentProfiles"):
                self._nvml.nvmlDeviceWorkloadPowerProfileGetCurrentProfiles(self._handle, byref(profiles))
        except GpuUnsupportedError:
            return ()
        mask = profiles.enforcedProfilesMask.mask
        return tuple(bit for bit in range(32 * len(mask)) if mask[bit // 32] >> bit % 32 & 1)

    def _power_field_w(self, name: str) -> float:
        nvml = self._nvml
        function = f"nvmlDeviceGetFieldValues({name})"
        with self._call(function):
            (field,) = nvml.nvmlDeviceGetFieldValues(self._handle, [getattr(nvml, name)])
            if field.nvmlReturn != nvml.NVML_SUCCESS:
                raise nvml.NVMLError(field.nvmlReturn)
        return self._reported(int(field.value.uiVal), function) / 1000

    def _reported(self, value: int, function: str) -> int:
        """Return a value that a running GPU never has at 0."""
        if not value:
            raise GpuUnsupportedError(
                f"GPU {self._uuid}: {function}: expected a value, found 0: {_NOT_OFFERED}"
            )
        return value

    def clock_event_reasons(self) -> int:
        """The bits of nvmlDeviceGetCurrentClocksEventReasons."""
        with self._call("nvmlDeviceGetCurrentClocksEventReasons"):
            return int(self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle))

    def close(self) -> None:
        """Disconnect from NVML, which counts connections: others in this process stay open."""
        with self._call("nvmlShutdown"):
            self._nvml.nvmlShutdown()

    def _call(self, function: str) -> contextlib.AbstractContextManager[None]:
        return calling(function, f"GPU {self._uuid}", self._nvml)
