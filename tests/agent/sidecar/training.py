"""A trainer on an emulated GPU for a running agent, and messages of coordinators to it."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import ClassVar

from perseus.agent import Kind, NamedSchedule, Probe
from perseus.agent.sidecar.settings import AgentSettings
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM, Work
from perseus.v1 import agent_service_pb2 as wire
from perseus.v1 import computation_pb2, rank_pb2
from tests.agent.coordinator_stub import CoordinatorStub, Inbox

UUID = "GPU-0"
STOCK_MHZ = A100_SXM.clocks_mhz[0]
HELD_MHZ = A100_SXM.clocks_mhz[3]
ORDER = [
    computation_pb2.Computation(kind=computation_pb2.COMPUTATION_KIND_FORWARD),
    computation_pb2.Computation(kind=computation_pb2.COMPUTATION_KIND_BACKWARD),
]
RANK = rank_pb2.RankCoordinates()


Start = Callable[..., Awaitable[CoordinatorStub]]


class Trainer:
    """A training loop on a thread: one forward and one backward per iteration, until stopped.

    `stop_all` stops the loops that a failed test has left.
    """

    _running: ClassVar[list["Trainer"]] = []

    def __init__(
        self, socket: Path, gpu: EmulatedGpu, *, registers: bool = True, job_id: str = "job"
    ) -> None:
        self._socket = socket
        self._job_id = job_id
        self._gpu = gpu
        self._registers = registers
        self._stop = threading.Event()
        self.finishes = True
        self.is_registered: bool | None = None
        self.iteration_count = 0
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()
        self._running.append(self)

    async def stop(self) -> None:
        self._stop.set()
        await asyncio.to_thread(self._thread.join)
        self._running.remove(self)

    @classmethod
    def stop_all(cls) -> None:
        """Stop all loops before their GPU is removed."""
        while cls._running:
            trainer = cls._running.pop()
            trainer._stop.set()
            trainer._thread.join()

    def _train(self) -> None:
        probe = connected_probe(self._socket, stop=self._stop, job_id=self._job_id, gpu_uuid=self._gpu.uuid)
        if self._registers:
            self.is_registered = probe.register(
                pipeline_count=1, stage_count=1, schedule=NamedSchedule("1f1b", 1)
            )
        while not self._stop.is_set():
            with probe.iteration():
                with probe.computation(Kind.FORWARD, 0):
                    self._gpu.execute(Work(0.01, 0.005, 1.0))
                with probe.computation(Kind.BACKWARD, 0):
                    self._gpu.execute(Work(0.02, 0.01, 1.0))
                time.sleep(0.005)
            self.iteration_count += 1
        if self.finishes:
            probe.finish()
        probe.close()


def connected_probe(
    socket: Path,
    *,
    is_registered: bool = False,
    stop: threading.Event | None = None,
    job_id: str = "job",
    gpu_uuid: str = UUID,
) -> Probe:
    """Return a trainer's probe once the agent has ended the previous one; unconnected if stopped earlier."""
    while True:
        probe = Probe.connect(
            socket, job_id=job_id, pipeline=0, stage=0, gpu_uuid=gpu_uuid, is_registered=is_registered
        )
        if probe.is_connected or (stop is not None and stop.is_set()):
            return probe
        time.sleep(0.02)


def settings(tmp_path: Path, port: int, **more: object) -> AgentSettings:
    return AgentSettings(
        coordinator=f"127.0.0.1:{port}",
        socket=tmp_path / "run" / "agent.sock",
        gpu_backend="emulated",
        emulated_gpus=tmp_path / "gpus",
        restore_folder=tmp_path / "restore",
        **more,  # type: ignore[arg-type]
    )


def hold(version: int, start_iteration: int) -> wire.ConnectResponse:
    return wire.ConnectResponse(
        plan_offer=wire.PlanOffer(
            job_id="job",
            rank=RANK,
            epoch="e",
            version=version,
            start_iteration=start_iteration,
            lease_s=3.0,
            hold=wire.HoldClock(clock_mhz=HELD_MHZ),
        )
    )


def in_force(version: int) -> Callable[[Inbox], bool]:
    return lambda inbox: any(
        request.plan_in_force.version == version for request in inbox.all("plan_in_force")
    )


def measured_under(version: int) -> Callable[[Inbox], bool]:
    return lambda inbox: any(
        version in request.telemetry.iterations.plan_version for request in inbox.all("telemetry")
    )
