"""A module pynvml that is missing, old or foreign."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pynvml
import pytest

from perseus.agent.gpu import GpuDriverError
from perseus.agent.gpu.nvml import PYNVML, NotInModuleError, NvmlGpu, module_description, module_problem, text

MEMORY_CHOICE = [405, 7251]


class OldNvml:
    """PYNVML over a module with one GPU of two memory clocks: texts are bytes, and names are missing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
        self.calls: list[tuple[Any, ...]] = []
        answers = {
            "nvmlDeviceGetHandleByUUID": "handle",
            "nvmlDeviceGetArchitecture": pynvml.NVML_DEVICE_ARCH_AMPERE,
            "nvmlDeviceGetMigMode": [0, 0],
            "nvmlDeviceGetName": b"NVIDIA A40",
            "nvmlDeviceGetSupportedMemoryClocks": MEMORY_CHOICE,
            "nvmlDeviceGetSupportedGraphicsClocks": [1740],
            "nvmlDeviceGetPersistenceMode": 1,
        }
        module = ModuleType("pynvml")
        module.__file__ = "/site/pynvml.py"
        for name in {name for name in dir(pynvml) if "nvml" in name.lower()} - set(missing):
            value = getattr(pynvml, name)
            is_function = name.startswith("nvml") and callable(value)
            setattr(module, name, self._function(name, answers.get(name)) if is_function else value)
        monkeypatch.setitem(sys.modules, "pynvml", module)

    def _function(self, name: str, answer: object) -> Any:
        def call(*arguments: object) -> object:
            if name == "nvmlDeviceGetHandleByUUID" and not isinstance(arguments[0], bytes):
                raise TypeError("bytes or integer address expected")  # as ctypes
            self.calls.append((name, *arguments))
            return answer

        return call


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
