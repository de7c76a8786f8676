"""`perseus agent --self-test` on the stub: it reads, reports its findings and sets nothing."""

import asyncio
import json
import threading
from pathlib import Path

import pynvml
import pytest
from typer.testing import CliRunner, Result

from perseus.agent.gpu.nvml import NvmlGpu, connected
from perseus.agent.sidecar import self_test
from perseus.cli.main import app
from perseus.demo.nvml_stub import NO_LOCKS, Locks, instruct
from perseus.emulation.gpu import EmulatedGpu
from tests.nvml.stub_gpus import MODEL, UUIDS


@pytest.fixture(autouse=True)
def _watches_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "_WATCH_S", 1.0)


def run() -> Result:
    return CliRunner().invoke(app, ["agent", "--self-test"], env={"COLUMNS": "200"})


def test_a_table_for_people_and_json_for_programs(stub: Path, gpu_files: list[Path]) -> None:
    for extra in gpu_files[1:]:
        extra.unlink()
    done = run()
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["node"]["driver_version"] == {"value": "emulated"}
    assert list(report["gpus"]) == [UUIDS[0]]
    gpu = {name: finding["value"] for name, finding in report["gpus"][UUIDS[0]].items()}
    assert gpu["model"] == MODEL.name
    assert gpu["compute_capability"] == [8, 0]
    assert gpu["supported_clocks_mhz"] == list(MODEL.clocks_mhz)
    assert gpu["sm_clock_mhz"] == MODEL.highest_clock_mhz
    assert gpu["power_w"] == pytest.approx(MODEL.blocking_power_w(MODEL.highest_clock_mhz), abs=0.002)
    assert gpu["counter_period_s"] == pytest.approx(MODEL.counter_period_s, rel=0.1)
    assert gpu["persistence_mode"] is True
    assert gpu["mig_mode"] is False
    assert gpu["clock_events"] == []
    assert gpu["power_limit_w"] == MODEL.board_power_w
    assert gpu["workload_power_profiles"] == []
    assert "Not Supported" in report["gpus"][UUIDS[0]]["average_power_w"]["problem"]
    for word in (UUIDS[0], MODEL.name, "counter_period_s"):
        assert word in done.stderr
    assert Locks.read(gpu_files[0]) == NO_LOCKS


def test_one_failed_question_does_not_affect_the_others(
    stub: Path, gpu_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "_WATCH_S", 0.2)
    gpu = EmulatedGpu(gpu_files[0])
    gpu.degrade(1.0, clock_event_reasons=0x4 | 0x40 | 0x1)
    gpu.enforce_power_profiles([0, 7, 25, 60])
    gpu.close()
    instruct(
        stub,
        [
            f"error nvmlDeviceGetClockInfo {pynvml.NVML_ERROR_UNKNOWN} 0 0",
            "property second_memory_clock_mhz 405",
        ],
    )
    pynvml.nvmlInit()
    findings = self_test.gpu_findings(UUIDS[0])
    pynvml.nvmlShutdown()
    found = {finding.name: finding for finding in findings.findings}
    assert "nvmlDeviceGetClockInfo" in found["sm_clock_mhz"].problem
    assert found["counter_period_s"].problem == ""
    assert found["workload_power_profiles"].value == ["max_p", "llm_training", "25", "60"]
    assert found["clock_events"].value == ["sw_power_cap", "hw_thermal_slowdown", "0x1"]
    assert found["may_lock_graphics_clock"].value == self_test.may_set_clocks()
    assert found["may_lock_memory_clock"].value == self_test.may_set_clocks()
    assert not findings.is_usable


def test_a_missing_nvml_is_reported(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSEUS_NVML_STUB", str(stub / "nowhere"))
    done = run()
    assert done.exit_code == 1
    assert "nvmlInit: Driver Not Loaded" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_lost_gpu_does_not_hide_its_neighbours(stub: Path) -> None:
    """Two of three: the first call for the first GPU fails, and so does opening the third."""
    instruct(
        stub,
        [
            f"error nvmlDeviceGetHandleByIndex {pynvml.NVML_ERROR_GPU_IS_LOST} 0 1",
            f"error nvmlDeviceGetHandleByUUID {pynvml.NVML_ERROR_GPU_IS_LOST} 0 1",
        ],
    )
    done = run()
    assert done.exit_code == 1, done.stderr
    gpus = json.loads(done.stdout)["gpus"]
    assert list(gpus) == ["GPU 0", *UUIDS[1:]]
    assert "fell off the bus" in gpus["GPU 0"]["usable"]["problem"]
    assert sorted(gpus[uuid]["usable"]["value"] for uuid in UUIDS[1:]) == [False, True]


async def test_gpus_are_tested_one_after_the_other_and_an_unforeseen_error_is_a_finding_of_its_gpu() -> None:
    loop, testing = asyncio.get_running_loop(), list[str]()

    def find(uuid: str) -> self_test.GpuFindings:
        testing.append(uuid)
        others_begun = threading.Event()
        loop.call_soon_threadsafe(others_begun.set)
        assert others_begun.wait(10)
        assert testing == [uuid]
        testing.clear()
        if uuid == UUIDS[1]:
            raise KeyError("nobody has foreseen this")
        return self_test.GpuFindings(uuid, (self_test.Finding("usable", True),))

    first, odd, third = await self_test.all_gpu_findings(UUIDS, find)
    assert (first.is_usable, third.is_usable) == (True, True)
    assert odd.problem == f"GPU {UUIDS[1]}: its test failed: KeyError('nobody has foreseen this')"


@pytest.mark.parametrize(("freeze_at", "is_moving"), [(2, True), (4, True), (None, True), (None, False)])
def test_a_host_that_stalls_has_no_counter_that_stands_still(
    stub: Path, monkeypatch: pytest.MonkeyPatch, freeze_at: int | None, is_moving: bool
) -> None:
    """A counter that moves once a second; the process freezes before a reading for longer than the test."""
    now_s, reading_count = 0.0, 0

    def total_energy_j(_gpu: NvmlGpu) -> float:
        nonlocal now_s, reading_count
        reading_count += 1
        now_s += 100.0 if reading_count == freeze_at else 0.0
        return 5.0 + (now_s // 1.0 if is_moving else 0.0)

    def sleep(duration_s: float) -> None:
        nonlocal now_s
        now_s += duration_s

    monkeypatch.setattr(NvmlGpu, "total_energy_j", total_energy_j)
    with connected("GPUs", pynvml):
        findings = self_test.gpu_findings(UUIDS[0], monotonic=lambda: now_s, sleep=sleep)
    assert findings.is_usable is is_moving
    if not is_moving:
        assert findings.problem == (
            "energy counter: expected it to move within 1 s, found it at 5 J all the time"
        )


async def test_a_hanging_gpu_does_not_block_the_others() -> None:
    hang = threading.Event()

    def find(uuid: str) -> self_test.GpuFindings:
        if uuid == UUIDS[0]:
            hang.wait()
        return self_test.GpuFindings(uuid, (self_test.Finding("usable", True),))

    hung, other = await self_test.all_gpu_findings(UUIDS[:2], find, timeout_s=0.5)
    hang.set()
    assert "expected the driver to answer within 0.5 s" in hung.findings[0].problem
    assert other.is_usable
