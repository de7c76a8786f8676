"""After any error of NVML training continues, the agent lives, and the job's events name the error."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
import pynvml
import pytest

from perseus.agent import Kind, NamedSchedule, Probe
from perseus.agent.gpu import GpuError
from perseus.agent.gpu.nvml import NvmlGpu
from perseus.agent.link.packets import Registration
from perseus.agent.probe.job_spec import job_spec
from perseus.agent.sidecar import counter_poller
from perseus.agent.sidecar.settings import AgentSettings
from perseus.agent.sidecar.shell import serving
from perseus.agent.stream.translate import register_job_request
from perseus.configuration import load
from perseus.demo.nvml_stub import NO_LOCKS, Locks, instruct
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import Work
from perseus.service.server import running
from perseus.service.settings import CoordinatorSettings
from perseus.v1 import event_pb2, job_service_pb2, rank_pb2
from perseus.v1.job_service_pb2_grpc import JobServiceStub
from tests.nvml.stub_gpus import MODEL, UUIDS

if TYPE_CHECKING:
    from perseus.v1.job_service_pb2_grpc import JobServiceAsyncStub

UUID = UUIDS[0]
MEMORY_CHOICE = "property second_memory_clock_mhz 405"
SCHEDULE = NamedSchedule("1f1b", 1)
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


class Trainer:
    """Trains on a thread, one forward and one backward per iteration, until stopped."""

    def __init__(self, socket: Path, gpu_file: Path, job_id: str) -> None:
        self.iteration_count = 0
        self._stop = threading.Event()
        self._arguments = (socket, gpu_file, job_id)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._train(*self._arguments)
        except Exception as error:  # raised in `stop`
            self._error = error

    def _train(self, socket: Path, gpu_file: Path, job_id: str) -> None:
        gpu = EmulatedGpu(gpu_file)

        def connect() -> Probe:
            return Probe.connect(socket, job_id=job_id, pipeline=0, stage=0, gpu_uuid=UUID)

        while not (probe := connect()).is_connected:  # the agent may still be ending the previous rank
            time.sleep(0.01)
        with probe:
            assert probe.register(pipeline_count=1, stage_count=1, schedule=SCHEDULE)
            while not self._stop.is_set():
                with probe.iteration():
                    for kind, work in (
                        (Kind.FORWARD, Work(0.006, 0.002)),
                        (Kind.BACKWARD, Work(0.012, 0.004)),
                    ):
                        with probe.computation(kind, 0):
                            gpu.execute(work)
                    time.sleep(0.002)
                self.iteration_count += 1
        gpu.close()


@dataclass
class Site:
    """A coordinator and an agent on one GPU behind the stub."""

    folder: Path
    stub: Path
    jobs: "JobServiceAsyncStub"
    agent: asyncio.Task[None]
    job_count: int = 0

    @property
    def gpu_file(self) -> Path:
        return self.stub / "gpu-0"

    async def train_under(self, instruction: str, reason: str | None) -> None:
        """Train one job with NVML errors until an event has the `reason`; for None, until it has a plan."""
        self.job_count += 1
        job_id = f"job-{self.job_count}"
        if self.job_count > 1:  # the first error is reported before the coordinator knows the job
            spec = job_spec(
                job_id,
                pipeline_count=1,
                stage_count=1,
                tensor_count=1,
                schedule=SCHEDULE,
                max_slowdown_percent=0.0,
            )
            request = register_job_request(Registration(spec, job_id, ""))
            await self.jobs.RegisterJob(request, timeout=10)
        instruct(self.stub, [MEMORY_CHOICE, instruction])
        trainer = Trainer(self.folder / "agent.sock", self.gpu_file, job_id)
        is_at_end = "nvmlShutdown" in instruction or "Reset" in instruction
        seen: list[event_pb2.JobEvent] = []
        watching = asyncio.create_task(self._watch(job_id, seen))

        def named() -> bool:
            return any(
                event.HasField("gpu_error")
                and rank_pb2.GpuErrorReason.Name(event.gpu_error.reason) == f"GPU_ERROR_REASON_{reason}"
                for event in seen
            )

        def planned() -> bool:
            return any(event.type == event_pb2.JOB_EVENT_TYPE_PLAN_IN_FORCE for event in seen)

        try:
            if reason is None or is_at_end:
                await until(lambda: planned() or named(), f"{instruction}: a plan in force")
            if is_at_end:
                await asyncio.to_thread(trainer.stop)
            if reason is not None:
                await until(named, f"{instruction}: a GPU error {reason} among {seen}")
            else:
                assert not any(event.type == event_pb2.JOB_EVENT_TYPE_GPU_ERROR for event in seen)
            if not is_at_end:
                trained = trainer.iteration_count
                await until(lambda: trainer.iteration_count > trained + 2, f"{instruction}: training")
        finally:
            instruct(self.stub, [MEMORY_CHOICE])
            await asyncio.to_thread(trainer.stop)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await until(self.is_at_stock, f"{instruction}: stock")
        assert not self.agent.done()

    def is_at_stock(self) -> bool:
        records = list((self.folder / "restore").glob("*.json"))
        return Locks.read(self.gpu_file) == NO_LOCKS and not records

    async def _watch(self, job_id: str, seen: list[event_pb2.JobEvent]) -> None:
        request = job_service_pb2.WatchJobRequest(job_id=job_id)
        while True:
            try:
                async for update in self.jobs.WatchJob(request):
                    if update.HasField("event"):
                        seen.append(update.event)  # noqa: PERF401 (as they come)
                return
            except grpc.aio.AioRpcError:  # not registered yet
                await asyncio.sleep(0.02)


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not in time"
        await asyncio.sleep(0.01)


@pytest.fixture
def gpu_files(tmp_path: Path) -> list[Path]:
    """One GPU with few clocks and a fast counter."""
    folder = tmp_path / "gpus"
    folder.mkdir()
    model = replace(MODEL.with_clocks(3), counter_period_s=0.02, set_latency_s=0.002)
    EmulatedGpu.create(folder / "gpu-0", model, UUID).close()
    return [folder / "gpu-0"]


@asynccontextmanager
async def site(folder: Path, stub: Path) -> AsyncIterator[Site]:
    coordinator = CoordinatorSettings(
        listen="127.0.0.1:0",
        database=folder / "perseus.db",
        baseline_iterations=1,
        profile_iterations=1,
        shutdown_grace_s=0.2,
        insecure=True,
    )
    async with running(coordinator) as (address, _), grpc.aio.insecure_channel(address) as channel:
        flags = {
            "coordinator": address,
            "socket": folder / "agent.sock",
            "restore_folder": folder / "restore",
        }
        async with serving(load(AgentSettings, None, flags)) as working:
            yield Site(folder, stub, JobServiceStub(channel), working)


async def test_an_error_when_a_gpu_is_opened(tmp_path: Path, stub: Path) -> None:
    async with site(tmp_path, stub) as one:
        for function, code, reason in (
            ("nvmlInit", pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "DRIVER_FAILED"),
            ("nvmlDeviceGetHandleByUUID", pynvml.NVML_ERROR_NOT_FOUND, "NOT_FOUND"),
            ("nvmlDeviceGetSupportedGraphicsClocks", pynvml.NVML_ERROR_NOT_SUPPORTED, "NOT_SUPPORTED"),
        ):
            await one.train_under(f"error {function} {code} 0 0", reason)


@pytest.mark.parametrize(
    ("function", "code", "times", "reason"),
    [
        ("nvmlDeviceSetGpuLockedClocks", pynvml.NVML_ERROR_NO_PERMISSION, 0, "NO_PERMISSION"),
        ("nvmlDeviceSetMemoryLockedClocks", pynvml.NVML_ERROR_IN_USE, 1, "IN_USE"),
        ("nvmlDeviceGetTotalEnergyConsumption", pynvml.NVML_ERROR_GPU_IS_LOST, 0, "LOST"),
        # Polls are repeated anyway.
        ("nvmlDeviceGetCurrentClocksEventReasons", pynvml.NVML_ERROR_UNKNOWN, 1, None),
    ],
)
async def test_an_error_while_training_runs(
    tmp_path: Path, stub: Path, function: str, code: int, times: int, reason: str | None
) -> None:
    async with site(tmp_path, stub) as one:
        await one.train_under(f"error {function} {code} 0 {times}", reason)


async def test_a_counter_that_stands_still_while_training_runs(
    tmp_path: Path, stub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counter_poller, "STANDSTILL_S", 0.5)
    async with site(tmp_path, stub) as one:
        await one.train_under("property frozen_counter 1", "NOT_SUPPORTED")


@pytest.mark.parametrize("function", ["nvmlDeviceResetGpuLockedClocks", "nvmlShutdown"])
async def test_an_error_when_a_gpu_is_closed(tmp_path: Path, stub: Path, function: str) -> None:
    async with site(tmp_path, stub) as one:
        await one.train_under(f"error {function} {pynvml.NVML_ERROR_GPU_IS_LOST} 0 0", "LOST")


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
