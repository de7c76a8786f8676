"""The GPU behind NVML, on a stand-in for the module pynvml; and such modules that do not fit."""

import re
import sys
from pathlib import Path
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
from perseus.agent.gpu.nvml import PYNVML, NotInModuleError, NvmlGpu, module_description, module_problem, text

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
            return answer(*arguments) if callable(answer) else answer

        return call


def opened(**answers: Any) -> tuple[FakeNvml, NvmlGpu]:
    """Return the GPU, and its NVML without the calls that opened it."""
    nvml = FakeNvml(**answers)
    gpu = NvmlGpu("GPU-a", nvml=nvml)
    nvml.calls.clear()
    return nvml, gpu


def failing(function: str, code: int) -> FakeNvml:
    return FakeNvml(**{function: pynvml.NVMLError(code)})


def power_field(code: int, milliwatts: int = 0) -> list[SimpleNamespace]:
    return [SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(uiVal=milliwatts))]


@pytest.mark.parametrize(
    ("method", "arguments", "answer", "call", "expected"),
    [
        ("set_clock_mhz", (1725,), None, ("nvmlDeviceSetGpuLockedClocks", "handle", 1725, 1725), None),
        ("reset_clock", (), None, ("nvmlDeviceResetGpuLockedClocks", "handle"), None),
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
    nvml, gpu = opened(**{call[0]: answer})
    assert getattr(gpu, method)(*arguments) == expected
    assert nvml.calls == [call]


def test_power_profiles_are_the_enforced_ones() -> None:
    def enforce(_handle: str, profiles: Any) -> None:
        current = profiles._obj
        current.requestedProfilesMask.mask[0] = 0b111
        current.enforcedProfilesMask.mask[0], current.enforcedProfilesMask.mask[7] = 0b101, 1 << 30

    gpu = NvmlGpu("GPU-a", nvml=FakeNvml(**{_PROFILES: enforce}))
    assert gpu.power_profiles() == (0, 2, 254)
    gpu = NvmlGpu("GPU-a", nvml=failing(_PROFILES, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND))
    assert gpu.power_profiles() == ()
    gpu = NvmlGpu("GPU-a", nvml=failing(_PROFILES, pynvml.NVML_ERROR_GPU_IS_LOST))
    with pytest.raises(GpuLostError, match=_PROFILES):
        gpu.power_profiles()


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_SUCCESS])
def test_power_without_the_field_or_at_0_in_it_is_the_power_usage(code: int) -> None:
    gpu = opened(nvmlDeviceGetFieldValues=power_field(code), nvmlDeviceGetPowerUsage=71_000)[1]
    assert gpu.power_w() == 71.0
    with pytest.raises(GpuUnsupportedError, match=r"GPU GPU-a: .*NVML_FI_DEV_POWER_AVERAGE"):
        gpu.average_power_w()


@pytest.mark.parametrize("method", ["sm_clock_mhz", "power_w"])
def test_a_value_that_no_running_gpu_has_is_an_error(method: str) -> None:
    field = power_field(pynvml.NVML_ERROR_NOT_SUPPORTED)
    gpu = opened(nvmlDeviceGetFieldValues=field, nvmlDeviceGetPowerUsage=0, nvmlDeviceGetClockInfo=0)[1]
    with pytest.raises(GpuUnsupportedError, match=r"GPU GPU-a: nvml.*: expected a value, found 0"):
        getattr(gpu, method)()


NOT_SUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
MEMORY_CHOICE = {"nvmlDeviceGetSupportedMemoryClocks": [405, 7251, 6251]}


def test_memory_is_locked_once_at_its_top_clock_if_it_has_several() -> None:
    nvml, gpu = opened(**MEMORY_CHOICE)
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
        {"nvmlDeviceSetMemoryLockedClocks": NOT_SUPPORTED},
    ],
)
def test_memory_that_can_not_be_locked_is_not_touched(answers: dict[str, Any]) -> None:
    nvml, gpu = opened(**MEMORY_CHOICE, **answers, nvmlDeviceResetMemoryLockedClocks=NOT_SUPPORTED)
    gpu.reset_clock()
    gpu.set_clock_mhz(1725)
    nvml.calls.clear()
    gpu.set_clock_mhz(1710)
    gpu.reset_clock()
    assert RESET_MEMORY not in nvml.calls
    assert LOCK_MEMORY not in nvml.calls


@pytest.mark.parametrize("is_own_lock", [True, False])
def test_an_unsupported_reset_is_an_error_if_memory_can_be_locked(is_own_lock: bool) -> None:
    """The lock may be this process's, or left by another that is dead."""
    nvml, gpu = opened(**MEMORY_CHOICE, nvmlDeviceResetMemoryLockedClocks=NOT_SUPPORTED)
    if is_own_lock:
        gpu.set_clock_mhz(1725)
    with pytest.raises(GpuDriverError, match="nvmlDeviceResetMemoryLockedClocks: Not Supported"):
        gpu.reset_clock()
    if not is_own_lock:
        assert nvml.calls[-1] == ("nvmlDeviceSetMemoryLockedClocks", "handle", 405, 7251), "free to move"
    nvml.answers["nvmlDeviceResetMemoryLockedClocks"] = None
    gpu.reset_clock()


def test_graphics_and_memory_are_locked_together_or_not_at_all() -> None:
    refused = pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
    nvml, gpu = opened(**MEMORY_CHOICE, nvmlDeviceSetGpuLockedClocks=refused)
    with pytest.raises(GpuPermissionError, match="--observe"):
        gpu.set_clock_mhz(1725)
    assert nvml.calls == [
        LOCK_MEMORY,
        ("nvmlDeviceSetGpuLockedClocks", "handle", 1725, 1725),
        RESET_MEMORY,
    ]


def test_an_unsupported_clock_never_reaches_nvml() -> None:
    nvml, gpu = opened()
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
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, GpuDriverError, "install the NVIDIA driver"),
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


def test_without_a_driver_there_is_nothing_to_shut_down() -> None:
    nvml = failing("nvmlInit", pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    with pytest.raises(GpuDriverError, match="kernel driver is not loaded"):
        NvmlGpu("GPU-a", nvml=nvml)
    assert nvml.calls == [("nvmlInit",)]


MIG_ENABLED = [pynvml.NVML_DEVICE_MIG_ENABLE, pynvml.NVML_DEVICE_MIG_ENABLE]
NOT_FOUND = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)


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


@pytest.mark.parametrize("function", ["none", "nvmlDeviceGetMigMode", "nvmlDeviceGetPersistenceMode"])
def test_connects_by_uuid_also_to_a_gpu_without_such_a_mode(function: str) -> None:
    nvml = failing(function, pynvml.NVML_ERROR_NOT_SUPPORTED)
    gpu: Gpu = NvmlGpu("GPU-a", nvml=nvml)
    assert nvml.calls == CONNECT
    assert (gpu.uuid, gpu.name, gpu.supported_clocks_mhz) == ("GPU-a", "NVIDIA A40", (1740, 1725, 1710))


# --- A module pynvml that is missing, old or foreign --------------------------------------------------------


class OldNvml(FakeNvml):
    """The module pynvml with one GPU of two memory clocks: texts are bytes, and names are missing."""

    __file__ = "/site/pynvml.py"

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
        def handle(uuid: bytes) -> str:
            if not isinstance(uuid, bytes):
                raise TypeError("bytes or integer address expected")  # as ctypes
            return "handle"

        super().__init__(nvmlDeviceGetHandleByUUID=handle, nvmlDeviceGetName=b"NVIDIA A40", **MEMORY_CHOICE)
        self._missing = missing
        monkeypatch.setitem(sys.modules, "pynvml", self)

    def __getattr__(self, name: str) -> Any:
        if name in self._missing:
            raise AttributeError(name)
        return super().__getattr__(name)


def test_the_installed_module_is_named_and_fit() -> None:
    assert module_problem() == ""
    assert module_description().startswith("pynvml (nvidia-ml-py ")
    assert PYNVML.nvmlInit is pynvml.nvmlInit
    assert "nvmlInit" in dir(PYNVML)
    assert not hasattr(PYNVML, "__wrapped__")
    assert (text(b"NVIDIA A40"), text("NVIDIA A40")) == ("NVIDIA A40", "NVIDIA A40")


def test_the_advice_is_the_dependency_of_the_agent() -> None:
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    (dependency,) = set(re.findall(r'"(nvidia-ml-py>=[\d.]+)', project))
    with pytest.raises(NotInModuleError, match=f"install {dependency}, and uninstall"):
        _ = PYNVML.nvmlOfTheFuture


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("print c_count.value", "can't be loaded .SyntaxError"),
        ("raise RuntimeError('no licence')", "can't be loaded .RuntimeError.'no licence'"),
        ("x = 1", "has no nvmlInit|has no NVMLError"),
    ],
)
def test_some_other_file_of_that_name_is_a_gpu_error(
    content: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pynvml.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml")
    with pytest.raises((GpuDriverError, NotInModuleError), match=f"{expected}.*install nvidia-ml-py>="):
        NvmlGpu("GPU-a")
    assert "install nvidia-ml-py>=" in module_problem()


def test_an_old_module_restores_and_lacks_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    events, profiles = (
        "nvmlDeviceGetCurrentClocksEventReasons",
        "c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t",
    )
    old = OldNvml(monkeypatch, events, profiles, "NVML_ERROR_GPU_NOT_FOUND", "NVML_ERROR_DEPRECATED")
    gpu = NvmlGpu("GPU-a")
    assert gpu.name == "NVIDIA A40"
    gpu.reset_clock()
    assert old.calls[-2:] == [
        ("nvmlDeviceResetGpuLockedClocks", "handle"),
        ("nvmlDeviceResetMemoryLockedClocks", "handle"),
    ]
    assert gpu.power_profiles() == ()
    with pytest.raises(NotInModuleError, match=rf"/site/pynvml.py. has no {events}"):
        gpu.clock_event_reasons()
    assert profiles in module_problem()


def test_a_module_that_can_not_reset_memory_does_not_pass_for_a_gpu_that_can_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = OldNvml(monkeypatch, "nvmlDeviceResetMemoryLockedClocks", "nvmlDeviceSetMemoryLockedClocks")
    with pytest.raises(GpuDriverError, match=r"GPU-a: its memory clock may still be locked: .*install"):
        NvmlGpu("GPU-a").reset_clock()
    assert old.calls[-1] == ("nvmlDeviceResetGpuLockedClocks", "handle"), "done all the same"
