"""Failing GPUs, and bugs of ours: no GPU stays at a foreign clock, and the others are served."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest

from perseus.agent.gpu import GpuDriverError, GpuLostError, GpuPermissionError, RecordError
from perseus.agent.gpu.executor import GpuExecutor
from perseus.agent.link.packets import IterationMark
from perseus.agent.probe.client import Probe
from perseus.agent.rank.commands import Command
from perseus.agent.rank.events import Event
from perseus.agent.rank.session import Session
from perseus.agent.restore.restorer import Restorer
from perseus.agent.sidecar import ranks, served, shell
from perseus.agent.sidecar.shell import serving
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM
from perseus.v1 import rank_pb2
from tests.agent.coordinator_stub import CoordinatorStub, Inbox, until
from tests.agent.sidecar.failing_gpu import FailingBackend, Faults
from tests.agent.sidecar.training import (
    HELD_MHZ,
    ORDER,
    STOCK_MHZ,
    UUID,
    Trainer,
    hold,
    in_force,
    settings,
)

OTHER_UUID = "GPU-1"
LOST = GpuLostError("gone")


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[list[EmulatedGpu]]:
    (tmp_path / "gpus").mkdir()
    gpus = [EmulatedGpu.create(tmp_path / "gpus" / uuid, A100_SXM, uuid) for uuid in (UUID, OTHER_UUID)]
    yield gpus
    Trainer.stop_all()
    for gpu in gpus:
        gpu.close()


@pytest.fixture
def gpu(gpus: list[EmulatedGpu]) -> EmulatedGpu:
    return gpus[0]


@pytest.fixture
def faults(tmp_path: Path, gpus: list[EmulatedGpu], monkeypatch: pytest.MonkeyPatch) -> Faults:
    """The faults of the first GPU."""
    backend = FailingBackend(tmp_path / "gpus")
    monkeypatch.setattr(shell, "backend", lambda _: backend)
    return backend.faults_of(UUID)


@pytest.fixture
async def coordinator() -> AsyncIterator[CoordinatorStub]:
    coordinator = CoordinatorStub(Inbox(), ORDER)  # type: ignore[abstract] # it serves RegisterJob only
    await coordinator.start(0)
    yield coordinator
    await coordinator.stop()


@pytest.fixture(autouse=True)
def _tries_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "Restorer", partial(Restorer, retry_s=0.05))
    monkeypatch.setattr(ranks, "_FIRST_DELAY_S", 0.05)


@pytest.fixture
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> float:
    """Shorten the time after which calls count as hung."""
    timeout_s = 0.5
    monkeypatch.setattr(shell, "GpuExecutor", lambda: GpuExecutor(timeout_s))
    monkeypatch.setattr(served, "TIMEOUT_S", timeout_s)
    return timeout_s


async def trainer_under_plan(tmp_path: Path, coordinator: CoordinatorStub, gpu: EmulatedGpu) -> Trainer:
    trainer = Trainer(tmp_path / "run" / "agent.sock", gpu)
    await coordinator.until(lambda inbox: len(inbox.all("telemetry")) > 0, "telemetry at stock")
    await bring_under_plan(coordinator, trainer, gpu, 1)
    return trainer


async def bring_under_plan(
    coordinator: CoordinatorStub, trainer: Trainer, gpu: EmulatedGpu, version: int
) -> None:
    coordinator.send(hold(version, start_iteration=trainer.iteration_count + 5))
    await coordinator.until(in_force(version), f"plan {version} in force")
    await until(lambda: gpu.sm_clock_mhz() == HELD_MHZ, "the plan's clock")


def joined_count(inbox: Inbox) -> int:
    return len(inbox.all("rank_joined"))


def records(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "restore").glob("*.json"))


async def test_a_failing_reset_is_retried_while_the_trainer_stays_and_its_rank_recovers(
    tmp_path: Path, gpu: EmulatedGpu, faults: Faults, coordinator: CoordinatorStub
) -> None:
    async with serving(settings(tmp_path, coordinator.port)):
        trainer = await trainer_under_plan(tmp_path, coordinator, gpu)
        with faults.during(total_energy_j=LOST, open=LOST):
            with faults.during(reset_clock=LOST):
                left_mhz = gpu.sm_clock_mhz()  # the plan's clock, unless a busy host caused a gap just before
                await coordinator.until(lambda inbox: len(inbox.all("rank_left")) == 1, "rank left")
                (left,) = coordinator.inbox.all("rank_left")
                assert left.rank_left.reason == rank_pb2.RANK_LEFT_REASON_GPU_FAILED
                assert gpu.sm_clock_mhz() == left_mhz
                assert records(tmp_path)
            del faults.by_method["open"]
            await until(lambda: gpu.sm_clock_mhz() == STOCK_MHZ, "stock")
            await until(lambda: not records(tmp_path), "restored")
        # It may have recovered meanwhile and failed again; it stays once it measures.
        measured = len(coordinator.inbox.all("telemetry"))
        await coordinator.until(
            lambda inbox: (
                joined_count(inbox) > len(inbox.all("rank_left"))
                and len(inbox.all("telemetry")) > measured + 2
            ),
            "the rank's coming back",
        )
        await bring_under_plan(coordinator, trainer, gpu, 2)
        await trainer.stop()
    assert gpu.sm_clock_mhz() == STOCK_MHZ


async def test_a_gpu_that_can_only_be_observed_is_reset_once_possible(
    tmp_path: Path, gpu: EmulatedGpu, faults: Faults, coordinator: CoordinatorStub
) -> None:
    async with serving(settings(tmp_path, coordinator.port)):
        trainer = await trainer_under_plan(tmp_path, coordinator, gpu)
        forbidden = GpuPermissionError("no")
        with faults.during(set_clock_mhz=forbidden, reset_clock=forbidden):
            left_mhz = gpu.sm_clock_mhz()
            coordinator.send(hold(2, start_iteration=trainer.iteration_count + 2))
            offer = hold(3, start_iteration=trainer.iteration_count + 4)
            offer.plan_offer.hold.clock_mhz = A100_SXM.clocks_mhz[5]
            coordinator.send(offer)
            await coordinator.until(lambda inbox: len(inbox.all("gpu_error")) > 0, "the error's report")
            assert gpu.sm_clock_mhz() == left_mhz
        await until(lambda: gpu.sm_clock_mhz() == STOCK_MHZ, "stock")
        assert not coordinator.inbox.all("rank_left")
        await trainer.stop()


async def test_transient_errors_do_not_end_a_rank(
    tmp_path: Path, gpu: EmulatedGpu, faults: Faults, coordinator: CoordinatorStub
) -> None:
    async with serving(settings(tmp_path, coordinator.port)):
        trainer = await trainer_under_plan(tmp_path, coordinator, gpu)
        unknown = GpuDriverError("unknown error")
        with faults.during(set_clock_mhz=unknown, total_energy_j=unknown, reset_clock=unknown):
            offer = hold(2, start_iteration=trainer.iteration_count + 3)
            offer.plan_offer.hold.clock_mhz = A100_SXM.clocks_mhz[5]
            coordinator.send(offer)
            await coordinator.until(in_force(2), "plan 2 in force")
            await asyncio.sleep(0.3)
        await until(lambda: gpu.sm_clock_mhz() == A100_SXM.clocks_mhz[5], "the clock, in the end")
        assert not coordinator.inbox.all("rank_left")
        (reported,) = coordinator.inbox.all("gpu_error")
        assert reported.gpu_error.message == "unknown error"
        await trainer.stop()


async def test_a_hanging_driver_affects_only_its_own_gpu(
    tmp_path: Path,
    gpus: list[EmulatedGpu],
    faults: Faults,
    coordinator: CoordinatorStub,
    short_timeout: float,
) -> None:
    hang = threading.Event()
    lost: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(repr(context)))
    async with serving(settings(tmp_path, coordinator.port)):
        trainer = await trainer_under_plan(tmp_path, coordinator, gpus[0])
        with faults.during(set_clock_mhz=hang, total_energy_j=hang, reset_clock=hang, open=hang, look=hang):
            left_mhz = gpus[0].sm_clock_mhz()
            await coordinator.until(lambda inbox: len(inbox.all("rank_left")) == 1, "rank left")
            assert "hangs" in coordinator.inbox.all("gpu_error")[0].gpu_error.message
            await trainer.stop()
            other = await asyncio.to_thread(
                Probe.connect,
                tmp_path / "run" / "agent.sock",
                job_id="other",
                pipeline=0,
                stage=0,
                gpu_uuid=OTHER_UUID,
                is_registered=True,
            )
            assert other.is_connected
            await coordinator.until(
                lambda inbox: OTHER_UUID in [each.rank_joined.gpu.uuid for each in inbox.all("rank_joined")],
                "the other's rank",
            )
            other.close()
            assert gpus[0].sm_clock_mhz() == left_mhz
            hang.set()
        await until(lambda: gpus[0].sm_clock_mhz() == STOCK_MHZ, "stock, at last")
        await until(lambda: not records(tmp_path), "restored")
    gc.collect()
    assert lost == []


async def test_an_agent_ends_despite_a_hanging_driver_and_reports_the_gpu(
    tmp_path: Path, gpu: EmulatedGpu, faults: Faults, coordinator: CoordinatorStub, short_timeout: float
) -> None:
    hang = threading.Event()
    agent = serving(settings(tmp_path, coordinator.port))
    await agent.__aenter__()
    trainer = await trainer_under_plan(tmp_path, coordinator, gpu)
    with faults.during(reset_clock=hang), pytest.raises(RecordError, match="not closed yet"):
        await agent.__aexit__(None, None, None)
    assert records(tmp_path), "for the next agent"
    hang.set()
    await until(lambda: not records(tmp_path), "the reset")
    await trainer.stop()


async def test_an_unexpected_error_on_opening_leaves_the_gpu_free(
    tmp_path: Path, gpu: EmulatedGpu, faults: Faults, coordinator: CoordinatorStub
) -> None:
    async with serving(settings(tmp_path, coordinator.port)):
        with faults.during(open=RuntimeError("a mistake of ours")):
            refused = await asyncio.to_thread(
                Probe.connect,
                tmp_path / "run" / "agent.sock",
                job_id="job",
                pipeline=0,
                stage=0,
                gpu_uuid=UUID,
            )
            assert not refused.is_connected
        trainer = await trainer_under_plan(tmp_path, coordinator, gpu)
        await trainer.stop()


async def test_an_unexpected_error_in_a_session_restores_its_gpu_and_then_the_rank(
    tmp_path: Path,
    gpu: EmulatedGpu,
    faults: Faults,
    coordinator: CoordinatorStub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_broken = False
    handle = Session.handle

    def handle_or_not(self: Session, event: Event, now_s: float) -> list[Command]:
        if is_broken and isinstance(event, IterationMark):
            raise RuntimeError("a mistake of ours")
        return handle(self, event, now_s)

    monkeypatch.setattr(Session, "handle", handle_or_not)
    async with serving(settings(tmp_path, coordinator.port)):
        trainer = await trainer_under_plan(tmp_path, coordinator, gpu)
        is_broken = True
        await coordinator.until(lambda inbox: len(inbox.all("rank_left")) == 1, "rank left")
        is_broken = False
        assert gpu.sm_clock_mhz() == STOCK_MHZ
        await coordinator.until(
            lambda inbox: joined_count(inbox) > len(inbox.all("rank_left")), "the rank's coming back"
        )
        await bring_under_plan(coordinator, trainer, gpu, 2)
        await trainer.stop()
