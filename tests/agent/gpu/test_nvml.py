from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from perseus.agent.gpu import (
    ClockNotSupportedError,
    Gpu,
    GpuDriverError,
    GpuError,
    GpuInUseError,
    GpuLostError,
    GpuNotFoundError,
    GpuPermissionError,
    GpuUnsupportedError,
)
from perseus.agent.gpu.nvml import NvmlGpu

CONNECT = [
    ("nvmlInit",),
    ("nvmlDeviceGetHandleByUUID", b"GPU-a"),
    ("nvmlDeviceGetArchitecture", "handle"),
    ("nvmlDeviceGetMigMode", "handle"),
    ("nvmlDeviceGetName", "handle"),
    ("nvmlDeviceGetSupportedMemoryClocks", "handle"),
    ("nvmlDeviceGetSupportedGraphicsClocks", "handle", 7251),
    ("nvmlDeviceGetPersistenceMode", "handle"),
]
LOCK_MEMORY = ("nvmlDeviceSetMemoryLockedClocks", "handle", 7251, 7251)
_PROFILES = "nvmlDeviceWorkloadPowerProfileGetCurrentProfiles"
RESET_MEMORY = ("nvmlDeviceResetMemoryLockedClocks", "handle")


class FakeNvml:
    """The module pynvml with one GPU: real constants, recorded calls, prepared answers."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {
            "nvmlDeviceGetHandleByUUID": "handle",
            "nvmlDeviceGetArchitecture": pynvml.NVML_DEVICE_ARCH_AMPERE,
            "nvmlDeviceGetMigMode": [pynvml.NVML_DEVICE_MIG_DISABLE, pynvml.NVML_DEVICE_MIG_DISABLE],
            "nvmlDeviceGetName": "NVIDIA A40",
            "nvmlDeviceGetSupportedMemoryClocks": [7251],
            "nvmlDeviceGetPersistenceMode": pynvml.NVML_FEATURE_ENABLED,
            "nvmlDeviceGetSupportedGraphicsClocks": [1740, 1725, 1710],
            **answers,
        }

    def __getattr__(self, name: str) -> Any:
        if not (name.startswith("nvml") and callable(getattr(pynvml, name))):
            return getattr(pynvml, name)

        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            answer = self.answers.get(name)
            if isinstance(answer, pynvml.NVMLError):
                raise answer
            return answer

        return call


def failing(function: str, code: int) -> FakeNvml:
    return FakeNvml(**{function: pynvml.NVMLError(code)})


def power_field(code: int, milliwatts: int = 0) -> list[SimpleNamespace]:
    return [SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(uiVal=milliwatts))]


def test_connects_by_uuid() -> None:
    nvml = FakeNvml()
    gpu: Gpu = NvmlGpu("GPU-a", nvml=nvml)
    assert nvml.calls == CONNECT
    assert (gpu.uuid, gpu.name, gpu.supported_clocks_mhz) == ("GPU-a", "NVIDIA A40", (1740, 1725, 1710))


@pytest.mark.parametrize(
    ("method", "arguments", "answer", "call", "expected"),
    [
        ("set_clock_mhz", (1725,), None, ("nvmlDeviceSetGpuLockedClocks", "handle", 1725, 1725), None),
        ("reset_clock", (), None, ("nvmlDeviceResetGpuLockedClocks", "handle"), None),
        ("lock_range", (600, 1200), None, ("nvmlDeviceSetGpuLockedClocks", "handle", 600, 1200), None),
        ("total_energy_j", (), 1234567, ("nvmlDeviceGetTotalEnergyConsumption", "handle"), 1234.567),
        ("sm_clock_mhz", (), 1410, ("nvmlDeviceGetClockInfo", "handle", pynvml.NVML_CLOCK_SM), 1410),
        (
            "power_w",
            (),
            power_field(pynvml.NVML_SUCCESS, 70_380),
            ("nvmlDeviceGetFieldValues", "handle", [pynvml.NVML_FI_DEV_POWER_INSTANT]),
            70.38,
        ),
        (
            "average_power_w",
            (),
            power_field(pynvml.NVML_SUCCESS, 250_000),
            ("nvmlDeviceGetFieldValues", "handle", [pynvml.NVML_FI_DEV_POWER_AVERAGE]),
            250.0,
        ),
        ("clock_event_reasons", (), 0x44, ("nvmlDeviceGetCurrentClocksEventReasons", "handle"), 0x44),
        ("close", (), None, ("nvmlShutdown",), None),
    ],
)
def test_each_method_is_one_call(
    method: str, arguments: tuple[int, ...], answer: Any, call: tuple[Any, ...], expected: float | None
) -> None:
    nvml = FakeNvml(**{call[0]: answer})
    gpu = NvmlGpu("GPU-a", nvml=nvml)
    nvml.calls.clear()
    assert getattr(gpu, method)(*arguments) == expected
    assert nvml.calls == [call]


def test_power_profiles_are_the_enforced_ones() -> None:
    def enforce(_handle: str, profiles: Any) -> None:
        current = profiles._obj
        current.requestedProfilesMask.mask[0] = 0b111
        current.enforcedProfilesMask.mask[0], current.enforcedProfilesMask.mask[7] = 0b101, 1 << 30

    gpu = NvmlGpu("GPU-a", nvml=FakeNvml())
    gpu._nvml.nvmlDeviceWorkloadPowerProfileGetCurrentProfiles = enforce
    assert gpu.power_profiles() == (0, 2, 254)
    gpu = NvmlGpu("GPU-a", nvml=failing(_PROFILES, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND))
    assert gpu.power_profiles() == ()
    gpu = NvmlGpu("GPU-a", nvml=failing(_PROFILES, pynvml.NVML_ERROR_GPU_IS_LOST))
    with pytest.raises(GpuLostError, match=_PROFILES):
        gpu.power_profiles()


def test_power_without_the_field_is_the_power_usage() -> None:
    nvml = FakeNvml(
        nvmlDeviceGetFieldValues=power_field(pynvml.NVML_ERROR_NOT_SUPPORTED), nvmlDeviceGetPowerUsage=71_000
    )
    gpu = NvmlGpu("GPU-a", nvml=nvml)
    assert gpu.power_w() == 71.0
    with pytest.raises(GpuUnsupportedError, match="NVML_FI_DEV_POWER_AVERAGE"):
        gpu.average_power_w()


MEMORY_CHOICE = {"nvmlDeviceGetSupportedMemoryClocks": [405, 7251, 6251]}


def test_memory_is_locked_once_at_its_top_clock_if_it_has_several() -> None:
    nvml = FakeNvml(**MEMORY_CHOICE)
    gpu = NvmlGpu("GPU-a", nvml=nvml)
    nvml.calls.clear()
    gpu.set_clock_mhz(1725)
    gpu.set_clock_mhz(1710)
    gpu.reset_clock()
    gpu.set_clock_mhz(1740)
    gpu.lock_range(600, 1200)
    assert nvml.calls == [
        LOCK_MEMORY,
        ("nvmlDeviceSetGpuLockedClocks", "handle", 1725, 1725),
        ("nvmlDeviceSetGpuLockedClocks", "handle", 1710, 1710),
        ("nvmlDeviceResetGpuLockedClocks", "handle"),
        RESET_MEMORY,
        LOCK_MEMORY,
        ("nvmlDeviceSetGpuLockedClocks", "handle", 1740, 1740),
        ("nvmlDeviceSetGpuLockedClocks", "handle", 600, 1200),
        RESET_MEMORY,
    ]


@pytest.mark.parametrize(
    "answers",
    [
        {"nvmlDeviceGetArchitecture": pynvml.NVML_DEVICE_ARCH_TURING},
        {"nvmlDeviceSetMemoryLockedClocks": pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)},
    ],
)
def test_memory_that_can_not_be_locked_is_not_touched(answers: dict[str, Any]) -> None:
    nvml = FakeNvml(**MEMORY_CHOICE, **answers)
    gpu = NvmlGpu("GPU-a", nvml=nvml)
    gpu.set_clock_mhz(1725)
    nvml.calls.clear()
    gpu.set_clock_mhz(1710)
    gpu.reset_clock()
    assert RESET_MEMORY not in nvml.calls
    assert LOCK_MEMORY not in nvml.calls


@pytest.mark.parametrize("is_own_lock", [True, False])
def test_an_unsupported_reset_is_an_error_if_memory_can_be_locked(is_own_lock: bool) -> None:
    """The lock may be this process's, or left by another that is dead."""
    nvml = FakeNvml(
        **MEMORY_CHOICE,
        nvmlDeviceResetMemoryLockedClocks=pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED),
    )
    gpu = NvmlGpu("GPU-a", nvml=nvml)
    if is_own_lock:
        gpu.set_clock_mhz(1725)
    with pytest.raises(GpuDriverError, match="nvmlDeviceResetMemoryLockedClocks: Not Supported"):
        gpu.reset_clock()
    if not is_own_lock:
        assert nvml.calls[-1] == ("nvmlDeviceSetMemoryLockedClocks", "handle", 405, 7251), "free to move"
    nvml.answers["nvmlDeviceResetMemoryLockedClocks"] = None
    gpu.reset_clock()


def test_an_unsupported_reset_is_fine_if_memory_can_not_be_locked() -> None:
    refused = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    nvml = FakeNvml(
        **MEMORY_CHOICE, nvmlDeviceResetMemoryLockedClocks=refused, nvmlDeviceSetMemoryLockedClocks=refused
    )
    NvmlGpu("GPU-a", nvml=nvml).reset_clock()


def test_graphics_and_memory_are_locked_together_or_not_at_all() -> None:
    refused = pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
    nvml = FakeNvml(**MEMORY_CHOICE, nvmlDeviceSetGpuLockedClocks=refused)
    gpu = NvmlGpu("GPU-a", nvml=nvml)
    nvml.calls.clear()
    with pytest.raises(GpuPermissionError, match="--observe"):
        gpu.set_clock_mhz(1725)
    assert nvml.calls == [
        LOCK_MEMORY,
        ("nvmlDeviceSetGpuLockedClocks", "handle", 1725, 1725),
        RESET_MEMORY,
    ]


def test_an_unsupported_clock_never_reaches_nvml() -> None:
    nvml = FakeNvml()
    gpu = NvmlGpu("GPU-a", nvml=nvml)
    nvml.calls.clear()
    with pytest.raises(ClockNotSupportedError, match="found 1700 MHz"):
        gpu.set_clock_mhz(1700)
    assert nvml.calls == []


@pytest.mark.parametrize(
    ("code", "error_class", "advice"),
    [
        (pynvml.NVML_ERROR_NO_PERMISSION, GpuPermissionError, "needs root or CAP_SYS_ADMIN"),
        (pynvml.NVML_ERROR_GPU_IS_LOST, GpuLostError, "see the kernel log"),
        (pynvml.NVML_ERROR_RESET_REQUIRED, GpuLostError, "needs a reset"),
        (pynvml.NVML_ERROR_NOT_SUPPORTED, GpuUnsupportedError, "does not support it"),
        (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, GpuUnsupportedError, "does not support it"),
        (pynvml.NVML_ERROR_IN_USE, GpuInUseError, "another client of the driver"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, GpuDriverError, "was unloaded"),
        (pynvml.NVML_ERROR_UNINITIALIZED, GpuDriverError, "was unloaded"),
        (pynvml.NVML_ERROR_UNKNOWN, GpuDriverError, "Unknown Error"),
    ],
)
def test_errors_are_mapped_and_name_the_gpu_and_the_call(
    code: int, error_class: type[GpuError], advice: str
) -> None:
    """That every call maps them is in the tests of NVML's errors."""
    gpu = NvmlGpu("GPU-a", nvml=failing("nvmlDeviceSetGpuLockedClocks", code))
    with pytest.raises(error_class, match=rf"GPU GPU-a: nvmlDeviceSetGpuLockedClocks: .*{advice}"):
        gpu.set_clock_mhz(1725)


@pytest.mark.parametrize("method", ["sm_clock_mhz", "power_w", "average_power_w"])
def test_a_value_that_no_running_gpu_has_is_an_error(method: str) -> None:
    zero_w = power_field(pynvml.NVML_SUCCESS)
    nvml = FakeNvml(nvmlDeviceGetFieldValues=zero_w, nvmlDeviceGetPowerUsage=0, nvmlDeviceGetClockInfo=0)
    gpu = NvmlGpu("GPU-a", nvml=nvml)
    with pytest.raises(GpuUnsupportedError, match=r"GPU GPU-a: nvml.*: expected a value, found 0"):
        getattr(gpu, method)()


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "install the NVIDIA driver"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "kernel driver is not loaded"),
    ],
)
def test_without_a_driver_there_is_nothing_to_shut_down(code: int, advice: str) -> None:
    nvml = failing("nvmlInit", code)
    with pytest.raises(GpuDriverError, match=advice):
        NvmlGpu("GPU-a", nvml=nvml)
    assert nvml.calls == [("nvmlInit",)]


MIG_ENABLED = [pynvml.NVML_DEVICE_MIG_ENABLE, pynvml.NVML_DEVICE_MIG_ENABLE]
NOT_FOUND, NOT_SUPPORTED = (
    pynvml.NVMLError(code) for code in (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_NOT_SUPPORTED)
)


@pytest.mark.parametrize(
    ("name", "answer", "message"),
    [
        ("HandleByUUID", NOT_FOUND, "GPU-a.*nvidia-smi -L"),
        ("Architecture", pynvml.NVML_DEVICE_ARCH_PASCAL, "expected architecture 5 .Volta. or newer, found 4"),
        ("MigMode", MIG_ENABLED, "expected MIG mode off, found it on"),
        ("SupportedMemoryClocks", NOT_SUPPORTED, "nvmlDeviceGetSupportedMemoryClocks"),
        ("SupportedMemoryClocks", [], "MemoryClocks: expected at least one clock, found none"),
        ("SupportedGraphicsClocks", [0], "GraphicsClocks: expected at least one clock, found none"),
        (
            "SupportedGraphicsClocks",
            NOT_FOUND,
            "GraphicsClocks: Not Found: this GPU or this driver does not support it",
        ),
    ],
)
def test_an_unfit_gpu_is_refused_and_closed(name: str, answer: Any, message: str) -> None:
    nvml = FakeNvml(**{f"nvmlDeviceGet{name}": answer})
    with pytest.raises(GpuNotFoundError if name == "HandleByUUID" else GpuUnsupportedError, match=message):
        NvmlGpu("GPU-a", nvml=nvml)
    assert nvml.calls[-1] == ("nvmlShutdown",)


def test_a_part_of_a_gpu_is_refused_and_closed() -> None:
    nvml = FakeNvml()
    with pytest.raises(GpuUnsupportedError, match="expected a whole GPU, found a MIG device"):
        NvmlGpu("MIG-a", nvml=nvml)
    assert nvml.calls[-1] == ("nvmlShutdown",)


@pytest.mark.parametrize("function", ["nvmlDeviceGetMigMode", "nvmlDeviceGetPersistenceMode"])
def test_a_gpu_without_such_a_mode_is_fit(function: str) -> None:
    nvml = failing(function, pynvml.NVML_ERROR_NOT_SUPPORTED)
    NvmlGpu("GPU-a", nvml=nvml)
    assert nvml.calls == CONNECT
