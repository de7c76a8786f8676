"""The stub of libnvidia-ml.so.1 against the emulated GPU whose file it shares."""

import json
import math
import struct
import time
from ctypes import CDLL, c_char_p, c_double, create_string_buffer
from dataclasses import asdict, fields
from operator import attrgetter
from pathlib import Path

import pynvml
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from perseus.agent.gpu.nvml import NvmlGpu
from perseus.demo.nvml_stub import NO_LOCKS, Locks, instruct
from perseus.emulation.dynamics import GpuState
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A40, A100_SXM, GpuModel, Work
from perseus.gpu import ClockEventReason
from tests.nvml.stub_gpus import UUIDS

STATE = struct.Struct("<dd q dd q dddddd qqq d q")
state_values = attrgetter(*(field.name for field in fields(GpuState)))

durations_s = st.floats(0.0, 0.4)
works = st.builds(
    Work,
    compute_s=st.floats(0.001, 0.2),
    memory_s=st.floats(0.0, 0.1),
    activity=st.floats(0.05, 1.0),
)
events = st.one_of(
    st.tuples(st.just("begin"), works),
    st.tuples(st.just("set"), st.integers(0, 60)),
    st.tuples(st.just("slow"), st.floats(0.5, 3.0)),
    st.tuples(st.just("cap"), st.integers(0, 60)),
)


@given(model=st.sampled_from([A40, A100_SXM]), steps=st.lists(st.tuples(durations_s, events), max_size=20))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(model=A40, steps=[(0.3, ("set", 0)), (0.05, ("set", 0))])  # reads at the exact time of an update
def test_its_physics_are_those_of_the_emulated_gpu(
    stub_library: Path, model: GpuModel, steps: list[tuple[float, tuple[str, object]]]
) -> None:
    advance = CDLL(str(stub_library)).perseus_stub_advance
    advance.argtypes, advance.restype = [c_char_p, c_char_p, c_double], None
    identity = json.dumps({"uuid": "GPU-0", "model": asdict(model)}).encode()
    ours = theirs = GpuState(at_s=100.0, counter_origin_s=100.0, clock_mhz=model.highest_clock_mhz)
    now_s = 100.0
    for duration_s, (kind, value) in steps:
        now_s += duration_s
        buffer = create_string_buffer(STATE.pack(*state_values(ours)), STATE.size)
        advance(identity, buffer, now_s)
        theirs = GpuState(*STATE.unpack(buffer.raw))
        ours.advance(model, now_s)
        assert state_values(theirs) == pytest.approx(state_values(ours), rel=1e-12, abs=1e-12)
        match kind, value:
            case "begin", Work() if not ours.busy:
                ours.begin(value)
            case "set", int():
                ours.set_clock(model, model.clocks_mhz[value])
            case "slow", float():
                ours.slowdown = value
            case "cap", int():
                ours.cap_mhz = model.clocks_mhz[value]


def test_a_lock_is_in_force_on_the_shared_gpu_after_the_set_latency(
    stub: Path, gpu_files: list[Path]
) -> None:
    gpu = EmulatedGpu(gpu_files[0])
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(UUIDS[0])
    begun_s = time.monotonic()
    pynvml.nvmlDeviceSetGpuLockedClocks(handle, 1200, 1200)
    assert time.monotonic() - begun_s >= A100_SXM.set_latency_s
    assert gpu.sm_clock_mhz() == pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM) == 1200
    assert Locks.read(gpu_files[0]).graphics_mhz == (1200, 1200)
    pynvml.nvmlDeviceSetGpuLockedClocks(handle, 600, 1001)
    assert gpu.sm_clock_mhz() == 990, "the highest within the limits"
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlDeviceSetGpuLockedClocks(handle, 1001, 1002)
    pynvml.nvmlDeviceSetMemoryLockedClocks(handle, 1593, 1593)
    assert Locks.read(gpu_files[0]).memory_mhz == (1593, 1593)
    pynvml.nvmlDeviceResetGpuLockedClocks(handle)
    pynvml.nvmlDeviceResetMemoryLockedClocks(handle)
    assert gpu.sm_clock_mhz() == A100_SXM.highest_clock_mhz
    assert Locks.read(gpu_files[0]) == NO_LOCKS == Locks.read(gpu_files[1])
    gpu.close()


def test_energy_power_and_events_are_those_of_the_shared_gpu(stub: Path, gpu_files: list[Path]) -> None:
    gpu = EmulatedGpu(gpu_files[2])
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(UUIDS[2])
    gpu.degrade(1.0, clock_event_reasons=0x44)
    assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle) == 0x44
    instant, average = pynvml.nvmlDeviceGetFieldValues(
        handle, [pynvml.NVML_FI_DEV_POWER_INSTANT, pynvml.NVML_FI_DEV_POWER_AVERAGE]
    )
    assert instant.value.uiVal == math.floor(gpu.power_w() * 1000)
    assert pynvml.nvmlDeviceGetPowerUsage(handle) == instant.value.uiVal
    assert average.nvmlReturn == pynvml.NVML_ERROR_NOT_SUPPORTED
    # The counter may update between two reads.
    seen_mj = [0, 0, 0]
    while not seen_mj[0] or seen_mj[0] != seen_mj[2]:
        seen_mj = [
            math.floor(gpu.total_energy_j() * 1000),
            pynvml.nvmlDeviceGetTotalEnergyConsumption(handle),
            math.floor(gpu.total_energy_j() * 1000),
        ]
    assert seen_mj[1] == seen_mj[0]
    gpu.close()


def test_limits_profiles_and_caps_are_those_of_the_shared_gpu(stub: Path, gpu_files: list[Path]) -> None:
    gpu, seen = EmulatedGpu(gpu_files[0]), NvmlGpu(UUIDS[0])
    assert seen.power_limit_w() == gpu.power_limit_w() == A100_SXM.board_power_w
    assert seen.power_profiles() == ()
    gpu.limit_power(300.0)
    gpu.enforce_power_profiles([7, 33])
    assert seen.power_limit_w() == 300.0
    assert seen.power_profiles() == gpu.power_profiles() == (7, 33)
    assert seen.sm_clock_mhz() == gpu.sm_clock_mhz() < A100_SXM.highest_clock_mhz
    assert A100_SXM.power_w(1.0, seen.sm_clock_mhz()) <= 300.0
    assert seen.clock_event_reasons() == ClockEventReason.SW_POWER_CAP
    gpu.cap(None)
    assert (seen.sm_clock_mhz(), seen.clock_event_reasons()) == (A100_SXM.highest_clock_mhz, 0)
    instruct(stub, ["property workload_power_profiles 0"])
    assert seen.power_profiles() == (), "of a GPU without any"
    seen.close()
    gpu.close()


def test_errors_delays_and_properties_can_be_injected_at_run_time(stub: Path) -> None:
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    instruct(stub, [f"error nvmlDeviceGetPowerUsage {pynvml.NVML_ERROR_GPU_IS_LOST} 2 1"])
    pynvml.nvmlDeviceGetPowerUsage(handle)
    pynvml.nvmlDeviceGetPowerUsage(handle)
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        pynvml.nvmlDeviceGetPowerUsage(handle)
    pynvml.nvmlDeviceGetPowerUsage(handle)
    instruct(stub, [f"error nvmlInit {pynvml.NVML_ERROR_DRIVER_NOT_LOADED} 0 0", "property mig_mode 1"])
    for _ in range(2):
        with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
            pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetMigMode(handle) == [1, 1]
    instruct(stub, ["delay nvmlDeviceGetName 0.05", "property second_memory_clock_mhz 405"])
    assert pynvml.nvmlDeviceGetMigMode(handle) == [0, 0]
    assert pynvml.nvmlDeviceGetSupportedMemoryClocks(handle) == [1593, 405]
    begun_s = time.monotonic()
    pynvml.nvmlDeviceGetName(handle)
    assert time.monotonic() - begun_s >= 0.05


def test_many_instructions_in_a_row_are_all_followed(stub: Path) -> None:
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    for _ in range(100):
        instruct(stub, ["property mig_mode 1"])
        assert pynvml.nvmlDeviceGetMigMode(handle) == [1, 1]
        instruct(stub, [])
        assert pynvml.nvmlDeviceGetMigMode(handle) == [0, 0]
