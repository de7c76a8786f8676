"""A node for a running agent: an emulated GPU, its trainers, and the coordinator."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

from perseus.agent import Kind, NamedSchedule, Probe
from perseus.agent.sidecar.settings import AgentSettings
from perseus.agent.sidecar.shell import serving
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM, Work
from perseus.v1 import agent_service_pb2 as wire
from perseus.v1 import computation_pb2, rank_pb2
from tests.agent.coordinator_stub import CoordinatorStub, Inbox, until

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

    It waits after an iteration while `goes_on` is not set.
    `stop_all` stops the loops that a failed test has left.
    """

    _running: ClassVar[list["Trainer"]] = []

    def __init__(self, socket: Path, gpu: EmulatedGpu, *, job_id: str = "job") -> None:
        self._socket = socket
        self._job_id = job_id
        self._gpu = gpu
        self._stop = threading.Event()
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.finishes = True
        self.is_registered: bool | None = None
        self.iteration_count = 0
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()
        self._running.append(self)

    async def stop(self) -> None:
        self._end()
        await asyncio.to_thread(self._thread.join)
        self._running.remove(self)

    @classmethod
    def stop_all(cls) -> None:
        """Stop all loops before their GPU is removed."""
        while cls._running:
            trainer = cls._running.pop()
            trainer._end()
            trainer._thread.join()

    def _end(self) -> None:
        self._stop.set()
        self.goes_on.set()

    def _train(self) -> None:
        probe = connected_probe(self._socket, stop=self._stop, job_id=self._job_id, gpu_uuid=self._gpu.uuid)
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
            self.goes_on.wait()
        if self.finishes:
            probe.finish()
        probe.close()


class Node:
    """An emulated GPU, its trainers, and the agent's coordinator.

    Attributes:
        folder: has the agent's files.
        socket: the agent's.
        coordinator: the latest that was started.
    """

    def __init__(self, folder: Path, gpu: EmulatedGpu, coordinator: CoordinatorStub, start: Start) -> None:
        self.folder = folder
        self.socket = folder / "run" / "agent.sock"
        self.gpu = gpu
        self.coordinator = coordinator
        self._start = start

    @property
    def inbox(self) -> Inbox:
        return self.coordinator.inbox

    @property
    def records(self) -> list[Path]:
        """The agent's restore records."""
        return list((self.folder / "restore").glob("*.json"))

    def settings(self, **more: object) -> AgentSettings:
        return settings(self.folder, self.coordinator.port, **more)

    @asynccontextmanager
    async def serving(self, **more: object) -> AsyncIterator[asyncio.Task[None]]:
        """Run an agent with these settings."""
        async with serving(self.settings(**more)) as failure:
            yield failure

    async def restart_coordinator(self, inbox: Inbox | None = None) -> None:
        """Start one at the same address, which knows the jobs, and what was acknowledged."""
        before = self.inbox
        remembered = Inbox(jobs=before.jobs, acknowledged_sequence=before.acknowledged_sequence)
        await self.coordinator.stop()
        self.coordinator = await self._start(inbox or remembered, self.coordinator.port)

    async def train(self, **options: Any) -> Trainer:
        """Start a trainer, and wait for its rank's telemetry at stock."""
        trainer = Trainer(self.socket, self.gpu, **options)
        await self.hears("telemetry")
        return trainer

    async def hears(self, name: str, count: int = 1) -> Any:
        """Wait for so many messages of this name and return the latest one's content."""
        await self.coordinator.until(lambda inbox: len(inbox.all(name)) >= count, f"{count} times {name}")
        return self.latest(name)

    def latest(self, name: str) -> Any:
        return getattr(self.inbox.all(name)[-1], name)

    async def hold(self, trainer: Trainer, version: int = 1, clock_mhz: int = HELD_MHZ) -> None:
        """Offer a clock to hold, and wait until it is in force and set."""
        self.offer_hold(trainer, version, clock_mhz)
        await self.coordinator.until(
            lambda inbox: any(each.plan_in_force.version == version for each in inbox.all("plan_in_force")),
            f"plan {version} in force",
        )
        # On a busy host a gap may be long, and the GPU is at stock in gaps.
        await self.is_at(clock_mhz)

    def offer_hold(self, trainer: Trainer, version: int = 1, clock_mhz: int = HELD_MHZ) -> None:
        offer = wire.PlanOffer(
            job_id="job",
            rank=RANK,
            epoch="e",
            version=version,
            start_iteration=trainer.iteration_count + 5,
            lease_s=3.0,
            hold=wire.HoldClock(clock_mhz=clock_mhz),
        )
        self.coordinator.send(wire.ConnectResponse(plan_offer=offer))

    async def is_at(self, clock_mhz: int) -> None:
        """Wait until the GPU is at a clock."""
        await until(lambda: self.gpu.sm_clock_mhz() == clock_mhz, f"{clock_mhz} MHz")

    async def connect(self, **options: Any) -> Probe:
        """Return a probe's answer to one hello, by default of the job's first rank."""
        hello = {"job_id": "job", "pipeline": 0, "stage": 0, "gpu_uuid": UUID, **options}
        return await asyncio.to_thread(Probe.connect, self.socket, **hello)


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
