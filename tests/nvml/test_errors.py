"""After any error of NVML training continues, the agent lives, and the job's events name the error."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pynvml
import pytest

from perseus.agent.gpu import GpuError
from perseus.agent.gpu.nvml import NvmlGpu
from perseus.agent.sidecar import counter_poller
from perseus.agent.sidecar.settings import AgentSettings
from perseus.agent.sidecar.shell import serving
from perseus.configuration import load
from perseus.demo.nvml_stub import NO_LOCKS, Locks, instruct
from perseus.emulation.gpu import EmulatedGpu
from perseus.service.server import running
from perseus.v1 import event_pb2, job_service_pb2, rank_pb2
from tests.agent.sidecar.training import Trainer
from tests.nvml.stub_gpus import MODEL, UUIDS
from tests.service.grpc_fakes import Client, connected_to, make_settings
from tests.small_jobs import until

UUID = UUIDS[0]
MEMORY_CHOICE = "property second_memory_clock_mhz 405"
ALL_CODES = sorted(
    code for name, code in vars(pynvml).items() if name.startswith("NVML_ERROR_") and isinstance(code, int)
)
# Functions called when a GPU is opened, while training runs, and when the GPU is closed.
FUNCTIONS = [
    "nvmlInit",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetArchitecture",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetName",
    "nvmlDeviceGetSupportedMemoryClocks",
    "nvmlDeviceGetSupportedGraphicsClocks",
    "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceSetGpuLockedClocks",
    "nvmlDeviceSetMemoryLockedClocks",
    "nvmlDeviceResetGpuLockedClocks",
    "nvmlDeviceResetMemoryLockedClocks",
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetFieldValues",
    "nvmlShutdown",
]
# Functions of optional features: "not supported" is a normal answer.
OPTIONAL = {
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceSetMemoryLockedClocks",
    "nvmlDeviceResetMemoryLockedClocks",
}


@pytest.fixture
def gpu_files(tmp_path: Path) -> list[Path]:
    """One GPU with few clocks and a fast counter."""
    folder = tmp_path / "gpus"
    folder.mkdir()
    model = replace(MODEL.with_clocks(3), counter_period_s=0.02, set_latency_s=0.002)
    EmulatedGpu.create(folder / "gpu-0", model, UUID).close()
    return [folder / "gpu-0"]


async def seen(client: Client, job_id: str = "job") -> tuple[bool, list[str]]:
    """Return whether the job has had a plan, and the reasons of its GPU errors so far."""
    request = job_service_pb2.ListJobEventsRequest(job_id=job_id, page_size=1000)
    events: list[event_pb2.JobEvent] = []
    with suppress(grpc.aio.AioRpcError):  # not registered yet
        events += (await client.jobs.ListJobEvents(request, timeout=60)).events
    reasons = [
        rank_pb2.GpuErrorReason.Name(each.gpu_error.reason) for each in events if each.HasField("gpu_error")
    ]
    planned = any(each.type == event_pb2.JOB_EVENT_TYPE_PLAN_IN_FORCE for each in events)
    return planned, [reason.removeprefix("GPU_ERROR_REASON_") for reason in reasons]


@pytest.mark.parametrize(
    ("instruction", "reason"),
    [
        ("error nvmlInit {NVML_ERROR_DRIVER_NOT_LOADED} 0 0", "DRIVER_FAILED"),
        ("error nvmlDeviceGetHandleByUUID {NVML_ERROR_NOT_FOUND} 0 0", "NOT_FOUND"),
        ("error nvmlDeviceGetSupportedGraphicsClocks {NVML_ERROR_NOT_SUPPORTED} 0 0", "NOT_SUPPORTED"),
        ("error nvmlDeviceSetGpuLockedClocks {NVML_ERROR_NO_PERMISSION} 0 0", "NO_PERMISSION"),
        ("error nvmlDeviceSetMemoryLockedClocks {NVML_ERROR_IN_USE} 0 1", "IN_USE"),
        ("error nvmlDeviceGetTotalEnergyConsumption {NVML_ERROR_GPU_IS_LOST} 0 0", "LOST"),
        ("property frozen_counter 1", "NOT_SUPPORTED"),
        # Polls are repeated anyway.
        ("error nvmlDeviceGetCurrentClocksEventReasons {NVML_ERROR_UNKNOWN} 0 1", None),
        ("error nvmlDeviceResetGpuLockedClocks {NVML_ERROR_GPU_IS_LOST} 0 0", "LOST"),
        ("error nvmlShutdown {NVML_ERROR_GPU_IS_LOST} 0 0", "LOST"),
    ],
)
async def test_training_continues_after_an_error_that_the_job_s_events_name(
    tmp_path: Path,
    stub: Path,
    monkeypatch: pytest.MonkeyPatch,
    instruction: str,
    reason: str | None,
) -> None:
    monkeypatch.setattr(counter_poller, "STANDSTILL_S", 0.5)
    instruct(stub, [MEMORY_CHOICE, instruction.format_map(vars(pynvml))])
    is_at_end = "nvmlShutdown" in instruction or "Reset" in instruction
    settings = make_settings(tmp_path, baseline_iterations=1, profile_iterations=1, shutdown_grace_s=0.2)
    socket, restore_folder = tmp_path / "agent.sock", tmp_path / "restore"
    gpu = EmulatedGpu(stub / "gpu-0")
    async with running(settings) as (address, _), connected_to(address) as client:
        given = {"coordinator": address, "socket": socket, "restore_folder": restore_folder}
        async with serving(load(AgentSettings, None, given)) as agent:
            trainer = Trainer(socket, gpu)

            async def is_named() -> bool:
                return reason in (await seen(client))[1]

            async def is_named_or_planned() -> bool:
                return (await seen(client))[0] or await is_named()

            try:
                if reason is None or is_at_end:
                    await until(is_named_or_planned, "a plan in force")
                if is_at_end:
                    await trainer.stop()
                if reason is None:
                    assert (await seen(client))[1] == []
                else:
                    await until(is_named, f"a GPU error {reason}")
                if not is_at_end:
                    trained = trainer.iteration_count

                    async def trains() -> bool:
                        return trainer.iteration_count > trained + 2

                    await until(trains, "training")
            finally:
                instruct(stub, [MEMORY_CHOICE])
                await asyncio.to_thread(Trainer.stop_all)

            async def is_at_stock() -> bool:
                return Locks.read(stub / "gpu-0") == NO_LOCKS and not any(restore_folder.glob("*.json"))

            await until(is_at_stock, "stock")
            if "nvmlInit" in instruction:
                following = Trainer(socket, gpu, job_id="next")

                async def is_planned() -> bool:
                    return (await seen(client, "next"))[0]

                try:
                    await until(is_planned, "a plan of the next trainer")
                finally:
                    await following.stop()
            assert not agent.done()
    gpu.close()


# Errors for a missing feature of a GPU or driver.
ABSENT = {
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_DEPRECATED,
    # From a function that does not look for a GPU.
    pynvml.NVML_ERROR_NOT_FOUND,
    pynvml.NVML_ERROR_GPU_NOT_FOUND,
}


def failures() -> list[GpuError]:
    """Return the GpuErrors of a GPU from its opening to its closing; other errors fail the test."""
    failed: list[GpuError] = []
    try:
        gpu = NvmlGpu(UUID)
    except GpuError as error:
        return [error]
    for call in (
        gpu.sm_clock_mhz,
        gpu.power_w,
        gpu.total_energy_j,
        gpu.clock_event_reasons,
        lambda: gpu.set_clock_mhz(gpu.supported_clocks_mhz[1]),
        gpu.reset_clock,
        gpu.close,
    ):
        try:
            call()
        except GpuError as error:
            failed.append(error)
    return failed


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_error_of_every_call_is_a_gpu_error(stub: Path, function: str) -> None:
    # Power can be read in another way; a lock that was set must be resettable.
    answers = {*OPTIONAL, "nvmlDeviceGetFieldValues"} - {"nvmlDeviceResetMemoryLockedClocks"}
    for code in ALL_CODES:
        instruct(stub, [MEMORY_CHOICE, f"error {function} {code} 0 0"])
        found = failures()
        if code in ABSENT and function in answers:
            assert found == [], f"error {code}"
        else:
            assert found, f"error {code}"
            assert all(UUID in str(error) and function in str(error) for error in found)
