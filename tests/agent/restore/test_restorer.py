"""A running agent restores the GPUs of dead ones."""

import asyncio
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from perseus.agent.gpu import (
    Gpu,
    GpuDriverError,
    GpuHungError,
    GpuInUseError,
    GpuLostError,
    GpuNotFoundError,
    RecordError,
)
from perseus.agent.gpu.executor import GpuExecutor
from perseus.agent.restore.records import Record, RecordFolder
from perseus.agent.restore.restorer import Restorer
from tests.agent.coordinator_stub import until
from tests.agent.fake_gpu import FakeGpu

UUID = FakeGpu.uuid


@pytest.fixture
def folder(tmp_path: Path) -> RecordFolder:
    folder = RecordFolder(tmp_path)
    folder.write(Record(UUID, None)).release()
    return folder


def restorer(folder: RecordFolder, *answers: FakeGpu | Exception, timeout_s: float = 60.0) -> Restorer:
    """Return a restorer whose GPU opens with the answers in order, and then repeats the last."""
    left = list(answers)

    def open_gpu(uuid: str) -> Gpu:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return Restorer(folder, open_gpu, GpuExecutor(timeout_s=timeout_s), retry_s=0.0)


async def test_restoring_is_retried_until_it_succeeds_after_bugs_too(folder: RecordFolder) -> None:
    gpu = FakeGpu()
    restoring = restorer(folder, GpuDriverError("not yet"), RuntimeError("a mistake"), gpu)
    await restoring.restore_all()
    assert gpu.sets == [None]
    assert folder.gpu_uuids() == []
    assert restoring.restore_counts == {UUID: 1}
    assert restoring.not_restored == set()


async def test_a_missing_gpu_is_logged_once_and_keeps_its_record(folder: RecordFolder) -> None:
    restoring = restorer(folder, GpuDriverError("not yet"), GpuLostError("fell off the bus"))
    with capture_logs() as logs, pytest.raises(RecordError, match="fell off the bus"):
        await restoring.restore_all()
    assert restoring.not_restored == {UUID}
    assert restoring.restore_counts == {}
    assert [(line["event"], line["reason"]) for line in logs] == [
        ("GPU not restored", "not yet"),
        ("GPU not restored", "fell off the bus"),
    ]
    assert folder.gpu_uuids() == [UUID]


async def test_a_gpu_that_somebody_else_brings_back_is_no_longer_missed(folder: RecordFolder) -> None:
    restoring = restorer(folder, GpuLostError("fell off the bus"))
    with pytest.raises(RecordError, match="fell off the bus"):
        await restoring.restore_all()
    (folder.path / f"{UUID}.json").unlink()
    await restoring.restore_all()
    assert restoring.not_restored == set()


async def test_another_agents_gpu_is_not_waited_for(folder: RecordFolder) -> None:
    await restorer(folder, GpuNotFoundError("no such GPU")).restore_all()
    assert folder.gpu_uuids() == [UUID]


async def test_a_folder_that_can_not_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match="can't be read"):
        await restorer(RecordFolder(tmp_path / "file"), FakeGpu()).restore_all()


async def test_a_served_gpu_is_skipped_until_it_is_given_back(folder: RecordFolder) -> None:
    gpu = FakeGpu()
    restoring = restorer(folder, gpu)
    assert await restoring.take(UUID, lambda _: gpu) is gpu
    assert restoring.is_taken(UUID)
    with pytest.raises(GpuInUseError, match="still being served"):
        await restoring.take(UUID, lambda _: gpu)
    with pytest.raises(RecordError, match="not closed yet"):
        await restoring.restore_all()
    assert gpu.sets == []
    await restoring.give_back(UUID, gpu.close)
    assert not restoring.is_taken(UUID)
    await restoring.restore_all()
    assert gpu.sets == [None]


@pytest.mark.parametrize("error", [GpuLostError("gone"), RuntimeError("a mistake of ours")])
async def test_a_gpu_that_can_not_be_opened_is_not_taken(folder: RecordFolder, error: Exception) -> None:
    def fail(uuid: str) -> Gpu:
        raise error

    restoring = restorer(folder, FakeGpu())
    with pytest.raises(type(error)):
        await restoring.take(UUID, fail)
    assert not restoring.is_taken(UUID)


async def test_a_gpu_that_can_not_be_closed_is_given_back(folder: RecordFolder) -> None:
    def fail() -> None:
        raise GpuLostError("gone")

    restoring = restorer(folder, gpu := FakeGpu())
    await restoring.take(UUID, lambda _: gpu)
    with pytest.raises(GpuLostError):
        await restoring.give_back(UUID, fail)
    assert not restoring.is_taken(UUID)


async def test_a_gpu_stays_taken_while_its_driver_hangs(folder: RecordFolder) -> None:
    hang = threading.Event()

    def close() -> None:
        hang.wait()

    restoring = restorer(folder, gpu := FakeGpu(), timeout_s=0.3)
    await restoring.take(UUID, lambda _: gpu)
    with pytest.raises(GpuHungError):
        await restoring.give_back(UUID, close)
    with pytest.raises(GpuInUseError):
        await restoring.take(UUID, lambda _: gpu)
    with pytest.raises(RecordError, match="not closed yet"):
        await restoring.restore_all()
    hang.set()
    await until(lambda: not restoring.is_taken(UUID), "released")
    await restoring.restore_all()
    assert gpu.sets == [None]


async def test_gpus_are_restored_time_and_again_while_another_hangs(folder: RecordFolder) -> None:
    folder.write(Record("GPU-hung", None)).release()
    hang, hung, gpu = threading.Event(), FakeGpu(), FakeGpu()

    def open_gpu(uuid: str) -> Gpu:
        if uuid == "GPU-hung":
            hang.wait()
            return hung
        return gpu

    restoring = Restorer(folder, open_gpu, GpuExecutor(timeout_s=0.5), retry_s=0.01)
    keeping = asyncio.create_task(restoring.keep_restoring())
    await until(lambda: gpu.sets == [None], "the other's restoring")
    assert await restoring.take(UUID, lambda _: gpu) is gpu, "and from being served"
    await restoring.give_back(UUID, gpu.close)
    folder.write(Record(UUID, None)).release()
    await until(lambda: gpu.sets == [None, None], "the other's restoring again")
    with pytest.raises(RecordError, match=r"GPU GPU-hung: expected the driver to answer within 0\.5 s"):
        await restoring.restore_all()
    hang.set()
    await until(lambda: hung.sets == [None], "the restoring of the GPU that hung")
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_a_gpu_is_opened_only_when_nothing_is_being_restored(folder: RecordFolder) -> None:
    gpu = FakeGpu()
    gpu.permit.clear()
    restoring = restorer(folder, gpu)
    restored = asyncio.create_task(restoring.restore_all())
    assert await asyncio.to_thread(gpu.begun.acquire, timeout=10)

    def open_gpu(uuid: str) -> Gpu:
        assert gpu.sets == [None]
        return gpu

    taken = asyncio.create_task(restoring.take(UUID, open_gpu))
    await asyncio.sleep(0)
    assert restoring.is_taken(UUID), "from the request on"
    gpu.permit.set()
    assert await taken is gpu
    await restored
