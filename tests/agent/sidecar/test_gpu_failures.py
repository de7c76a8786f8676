"""Failing GPUs, and bugs of ours: no GPU stays at a foreign clock, and the others are served.

What a rank does about an error is in the tests of its session and of the threads around it.
"""

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from perseus.agent.gpu import Gpu, GpuDriverError, GpuLostError, GpuPermissionError, RecordError
from perseus.agent.gpu.executor import GpuExecutor
from perseus.agent.link.packets import IterationMark
from perseus.agent.rank.commands import Command
from perseus.agent.rank.events import Event
from perseus.agent.rank.session import Session
from perseus.agent.restore.restorer import Restorer
from perseus.agent.sidecar import ranks, served, shell
from perseus.agent.sidecar.backends import EmulatedBackend
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM
from perseus.v1 import rank_pb2
from tests.agent.coordinator_stub import until
from tests.agent.sidecar.training import STOCK_MHZ, UUID, Node, Trainer

OTHER_UUID, OTHER_MHZ = "GPU-1", A100_SXM.clocks_mhz[5]

Fault = Exception | list[Exception] | threading.Event


class FaultyGpu:
    """The methods of a GPU that have faults meet them first."""

    def __init__(self, gpu: Gpu, meet: Callable[[str], None]) -> None:
        self._gpu = gpu
        self._meet = meet

    def __getattr__(self, name: str) -> object:
        self._meet(name)
        return getattr(self._gpu, name)


class FaultyBackend(EmulatedBackend):
    """Emulated GPUs, of which the first has faults: an error to raise, some, or an event to wait for.

    Attributes:
        faults: by method, also of the backend's own.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.faults: dict[str, Fault] = {}

    @contextmanager
    def during(self, **faults: Fault) -> Iterator[None]:
        """Let these methods fail or hang within the block."""
        self.faults.update(faults)
        try:
            yield
        finally:
            for name in faults:
                self.faults.pop(name, None)

    def open(self, uuid: str) -> Gpu:
        if uuid != UUID:
            return super().open(uuid)
        self._meet("open")
        return FaultyGpu(super().open(uuid), self._meet)  # type: ignore[return-value] # by __getattr__

    def _meet(self, method: str) -> None:
        match self.faults.get(method):
            case threading.Event() as event:
                event.wait()
            case Exception() as error:
                raise error
            case list() as errors if errors:
                raise errors.pop(0)


@pytest.fixture
def other(tmp_path: Path, gpu: EmulatedGpu) -> Iterator[EmulatedGpu]:
    """The node's second GPU."""
    other = EmulatedGpu.create(tmp_path / "gpus" / "1", A100_SXM, OTHER_UUID)
    yield other
    other.close()


@pytest.fixture
def faulty(tmp_path: Path, gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> FaultyBackend:
    """The agent's GPUs; what failed is tried again soon."""
    backend = FaultyBackend(tmp_path / "gpus")
    monkeypatch.setattr(shell, "backend", lambda _: backend)
    monkeypatch.setattr(shell, "Restorer", partial(Restorer, retry_s=0.05))
    monkeypatch.setattr(ranks, "_FIRST_DELAY_S", 0.05)
    return backend


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> GpuExecutor:
    """Opens and closes the agent's GPUs."""
    executor = GpuExecutor()
    monkeypatch.setattr(shell, "GpuExecutor", lambda: executor)
    return executor


async def trainer_under_plan(node: Node) -> Trainer:
    trainer = await node.train()
    await node.hold(trainer)
    return trainer


async def has_failed(node: Node) -> None:
    left = await node.hears("rank_left")
    assert left.reason == rank_pb2.RANK_LEFT_REASON_GPU_FAILED


async def test_neither_transient_errors_nor_sets_that_are_forbidden_end_a_rank(
    node: Node, faulty: FaultyBackend
) -> None:
    async with node.serving():
        trainer = await trainer_under_plan(node)
        errors: list[Exception] = [GpuDriverError("unknown error")] * 2
        with faulty.during(set_clock_mhz=[*errors], total_energy_j=[*errors]):
            await node.hold(trainer, 2, OTHER_MHZ)
        (reported,) = node.inbox.all("gpu_error")
        assert reported.gpu_error.message == "unknown error"
        forbidden = GpuPermissionError("no")
        with faulty.during(set_clock_mhz=forbidden, reset_clock=forbidden):
            left_mhz = node.gpu.sm_clock_mhz()
            node.offer_hold(trainer, 3)
            await node.hears("gpu_error", 2)
            assert node.gpu.sm_clock_mhz() == left_mhz
        await node.is_at(STOCK_MHZ)
        assert not node.inbox.all("rank_left")
        await trainer.stop()


async def test_a_hanging_driver_affects_only_its_own_gpu(
    node: Node,
    other: EmulatedGpu,
    faulty: FaultyBackend,
    executor: GpuExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hang, lost = threading.Event(), list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(repr(context)))
    async with node.serving():
        trainer = await trainer_under_plan(node)
        with faulty.during(set_clock_mhz=hang, total_energy_j=hang, reset_clock=hang, open=hang):
            left_mhz = node.gpu.sm_clock_mhz()
            with monkeypatch.context() as patch:
                patch.setattr(served, "TIMEOUT_S", 0.0)
                patch.setattr(executor, "timeout_s", 0.0)
                await has_failed(node)
            assert "hangs" in node.inbox.all("gpu_error")[0].gpu_error.message
            await trainer.stop()
            probe = await node.connect(job_id="other", gpu_uuid=other.uuid, is_registered=True)
            assert probe.is_connected
            assert (await node.hears("rank_joined", 2)).gpu.uuid == other.uuid
            probe.close()
            assert node.gpu.sm_clock_mhz() == left_mhz
            hang.set()
        await node.is_at(STOCK_MHZ)
        await until(lambda: not node.records, "restored")
    gc.collect()
    assert lost == []


async def test_an_agent_ends_despite_a_hanging_driver_and_reports_the_gpu(
    node: Node, faulty: FaultyBackend, executor: GpuExecutor
) -> None:
    agent, hang = node.serving(), threading.Event()
    await agent.__aenter__()
    trainer = await trainer_under_plan(node)
    executor.timeout_s = 0.0
    with faulty.during(reset_clock=hang), pytest.raises(RecordError, match="not closed yet"):
        await agent.__aexit__(None, None, None)
    assert node.records, "for the next agent"
    hang.set()
    await until(lambda: not node.records, "the reset")
    await trainer.stop()


async def test_an_unexpected_error_on_opening_leaves_the_gpu_free(node: Node, faulty: FaultyBackend) -> None:
    async with node.serving():
        with faulty.during(open=RuntimeError("a mistake of ours")):
            assert not (await node.connect()).is_connected
        trainer = await node.train()
        await trainer.stop()


async def test_an_unexpected_error_in_a_session_restores_its_gpu_and_once_it_opens_the_rank(
    node: Node, faulty: FaultyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = Session.handle

    def fail(session: Session, event: Event, now_s: float) -> list[Command]:
        if isinstance(event, IterationMark):
            raise RuntimeError("a mistake of ours")
        return handle(session, event, now_s)

    async with node.serving():
        trainer = await trainer_under_plan(node)
        with monkeypatch.context() as patch, faulty.during(open=GpuLostError("gone")):
            patch.setattr(Session, "handle", fail)
            await has_failed(node)
            assert (await node.hears("gpu_error")).message == "gone"
        assert node.gpu.sm_clock_mhz() == STOCK_MHZ
        measured = len(node.inbox.all("telemetry"))
        await node.coordinator.until(
            lambda inbox: (  # it may have failed again meanwhile
                len(inbox.all("rank_joined")) > len(inbox.all("rank_left"))
                and len(inbox.all("telemetry")) > measured + 2
            ),
            "the rank's coming back",
        )
        await node.hold(trainer, 2)
        await trainer.stop()
