"""NVML's answers replaced one by one by what vGPUs, Jetson, MIG devices and failing drivers answer.

A GPU ends as not usable, with a reason, or as usable with a problem that is named; never as a traceback.
"""

import asyncio
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml
import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from perseus import configuration
from perseus.agent.gpu import GpuError
from perseus.agent.gpu.executor import GpuExecutor
from perseus.agent.sidecar import self_test
from perseus.agent.sidecar.backends import Inventory, NvmlBackend
from perseus.agent.sidecar.self_test import GpuFindings, all_gpu_findings, gpu_findings
from perseus.agent.sidecar.settings import AgentSettings
from perseus.cli.main import app
from perseus.demo.nvml_stub import instruct
from perseus.doctor.checks import Check, Verdict
from perseus.doctor.node import node_checks
from perseus.emulation.gpu import EmulatedGpu
from tests.nvml.stub_gpus import MODEL, UUIDS

UUID = UUIDS[0]
ERRORS = {
    "not supported": pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED),
    "unknown": pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN),
}
NO_POWER = [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=0))]
# Without any of these a GPU can't be used: what is missing beside errors, and what the reason says.
NEEDED: dict[str, tuple[list[object], str]] = {
    "nvmlDeviceGetHandleByUUID": ([], "nvmlDeviceGetHandleByUUID"),
    "nvmlDeviceGetName": ([], "nvmlDeviceGetName"),
    "nvmlDeviceGetArchitecture": ([0], "rchitecture"),
    "nvmlDeviceGetSupportedMemoryClocks": ([[], [0]], "nvmlDeviceGetSupportedMemoryClocks"),
    "nvmlDeviceGetSupportedGraphicsClocks": ([[], [0]], "nvmlDeviceGetSupportedGraphicsClocks"),
    "nvmlDeviceGetCurrentClocksEventReasons": ([], "nvmlDeviceGetCurrentClocksEventReasons"),
    "nvmlDeviceGetTotalEnergyConsumption": ([0, 1234], "nergy"),
    "nvmlDeviceGetClockInfo": ([0], "nvmlDeviceGetClockInfo"),
}
# Without any of these it can: the finding that has the problem.
NAMED: dict[str, tuple[list[object], str]] = {
    "nvmlDeviceGetCudaComputeCapability": ([], "compute_capability"),
    "nvmlDeviceGetPowerUsage": ([0], "power_usage_w"),
    "nvmlDeviceGetEnforcedPowerLimit": ([0], "power_limit_w"),
    "nvmlDeviceGetFieldValues": ([NO_POWER], "average_power_w"),
}


def cases(functions: dict[str, tuple[list[object], str]]) -> list[object]:
    return [
        pytest.param(function, answer, expected, id=f"{function}-{name}")
        for function, (missing, expected) in functions.items()
        for name, answer in [*ERRORS.items(), *((repr(answer), answer) for answer in missing)]
    ]


Answer = Callable[[str, object], None]


@pytest.fixture
def gpu_files(tmp_path: Path) -> list[Path]:
    """One GPU with a fast counter."""
    (tmp_path / "gpus").mkdir()
    EmulatedGpu.create(tmp_path / "gpus" / "0", replace(MODEL, counter_period_s=0.002), UUID).close()
    return [tmp_path / "gpus" / "0"]


@pytest.fixture
def answer(stub: Path, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """A function that replaces the answer of one of NVML's functions."""
    monkeypatch.setattr(self_test, "_WATCH_S", 0.1)

    def replace_answer(function: str, replacement: object) -> None:
        def call(*_arguments: object) -> object:
            if isinstance(replacement, pynvml.NVMLError):
                raise replacement
            return replacement

        monkeypatch.setattr(pynvml, function, call)

    return replace_answer


@pytest.fixture
def settings(stub: Path, tmp_path: Path) -> AgentSettings:
    given = {
        "coordinator": "127.0.0.1:1",
        "socket": tmp_path / "agent.sock",
        "restore_folder": tmp_path / "restore",
    }
    return configuration.load(AgentSettings, None, given)


def findings() -> GpuFindings:
    (gpu,) = asyncio.run(all_gpu_findings([UUID], gpu_findings))
    return gpu


def gpus_check(settings: AgentSettings) -> Check:
    return next(iter(node_checks(settings)))


def start_log() -> list[tuple[str, str]]:
    """Return what an agent logs of its GPUs when it starts: events and reasons."""
    return [(line["event"], line["reason"]) for line in warnings_at_start()]


def warnings_at_start() -> list[MutableMapping[str, Any]]:
    with capture_logs() as lines:
        asyncio.run(Inventory(NvmlBackend(), GpuExecutor(), find=gpu_findings).report())
    return [line for line in lines if line["log_level"] in ("warning", "error")]


def test_a_whole_gpu_is_usable(answer: Answer, settings: AgentSettings) -> None:
    gpu = findings()
    assert (gpu.is_usable, gpu.problem, gpu.limitations) == (True, "", [])
    assert gpus_check(settings).verdict is Verdict.GOOD
    assert start_log() == []


@pytest.mark.parametrize(("function", "replacement", "expected"), cases(NEEDED))
def test_a_gpu_without_a_needed_answer_is_not_usable(
    function: str, replacement: object, expected: str, answer: Answer, settings: AgentSettings
) -> None:
    answer(function, replacement)
    gpu = findings()
    assert not gpu.is_usable
    assert expected in gpu.problem
    assert "\n" not in gpu.problem
    check = gpus_check(settings)
    assert (check.verdict, check.found) == (Verdict.BAD, f"{UUID} can't be used: {gpu.problem}")
    assert start_log() == [("GPU can't be used", gpu.problem)]


@pytest.mark.parametrize(("function", "replacement", "expected"), cases(NAMED))
def test_what_a_usable_gpu_lacks_is_named(
    function: str, replacement: object, expected: str, answer: Answer, settings: AgentSettings
) -> None:
    answer(function, replacement)
    gpu = findings()
    assert gpu.is_usable
    assert {each.name: each.problem for each in gpu.findings}[expected]
    verdict = Verdict.WARNING if gpu.limitations else Verdict.GOOD
    assert gpus_check(settings).verdict is verdict
    assert start_log() == [("GPU is used with a limitation", each) for each in gpu.limitations]
    if function == "nvmlDeviceGetEnforcedPowerLimit":
        assert gpu.limitations


def test_a_node_without_gpus_says_so(answer: Answer, settings: AgentSettings) -> None:
    answer("nvmlDeviceGetCount", 0)
    done = CliRunner().invoke(app, ["agent", "--self-test"])
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (
        1,
        "error: GPUs: expected at least one, found none",
    )
    assert gpus_check(settings).verdict is Verdict.BAD
    assert [event for event, _reason in start_log()] == ["no GPU can be served"]


def test_a_gpu_without_a_uuid_is_named_by_its_index(answer: Answer, settings: AgentSettings) -> None:
    answer("nvmlDeviceGetUUID", "")
    check = gpus_check(settings)
    assert (check.verdict, check.found) == (
        Verdict.BAD,
        "GPU 0: nvmlDeviceGetUUID: expected a UUID, found none",
    )


def test_a_gpu_that_is_listed_and_not_found_is_one_of_this_node(answer: Answer) -> None:
    answer("nvmlDeviceGetHandleByUUID", pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND))
    with pytest.raises(GpuError) as caught:
        NvmlBackend().open(UUID)
    assert "expected one of this node's" not in str(caught.value), "it is one of them"


def test_a_foreign_module_is_named(settings: AgentSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", ModuleType("pynvml"))
    check = gpus_check(settings)
    assert (check.verdict, check.advice) == (Verdict.BAD, "do so in the agent's Python environment")
    assert "has no NVMLError: install nvidia-ml-py>=" in check.found
    assert start_log() == [("no GPU can be served", check.found)]


def test_an_unusable_gpu_among_usable_ones_is_a_warning(
    answer: Answer, settings: AgentSettings, gpu_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one for displays, or in MIG mode."""
    EmulatedGpu.create(gpu_files[0].with_name("1"), replace(MODEL, counter_period_s=0.002), UUIDS[1]).close()
    in_mig_mode = {UUIDS[1]}
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetMigMode", lambda handle: [pynvml.nvmlDeviceGetUUID(handle) in in_mig_mode] * 2
    )
    check = gpus_check(settings)
    assert check.verdict is Verdict.WARNING
    assert f"{UUIDS[1]} can't be used: GPU {UUIDS[1]}: expected MIG mode off" in check.found
    assert [line["log_level"] for line in warnings_at_start()] == ["warning"]
    in_mig_mode.add(UUID)
    assert {each.name: each.value for each in findings().findings}["mig_mode"] is True
    assert gpus_check(settings).verdict is Verdict.BAD
    assert [line["log_level"] for line in warnings_at_start()] == ["error", "error"]


def test_a_counter_of_the_whole_module_is_named(
    stub: Path, settings: AgentSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "_WATCH_S", 0.5)
    monkeypatch.setattr(self_test, "_POWER_INTERVALS_S", (0.001, 0.005))
    instruct(stub, ["property module_power_w 200"])
    check = gpus_check(settings)
    assert check.verdict is Verdict.WARNING
    assert "it counts more than the GPU" in check.found
