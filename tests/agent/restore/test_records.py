import os
import threading
from multiprocessing import get_context
from pathlib import Path

import pytest

from perseus.agent.gpu import (
    ClockNotSupportedError,
    Gpu,
    GpuDriverError,
    GpuError,
    GpuLostError,
    GpuNotFoundError,
    GpuPermissionError,
    GpuUnsupportedError,
    RecordError,
    RecordHeldError,
)
from perseus.agent.restore.guarded import GuardedGpu
from perseus.agent.restore.records import ClockRange, Record, RecordFolder, Restoration, restore_found
from tests.agent.fake_gpu import FakeGpu

UUID = FakeGpu.uuid


@pytest.fixture
def folder(tmp_path: Path) -> RecordFolder:
    return RecordFolder(tmp_path / "var" / "restore")


def leave_behind(folder: RecordFolder, stock: ClockRange | None = None, uuid: str = UUID) -> None:
    """What an agent leaves that dies."""
    folder.write(Record(uuid, stock)).release()


@pytest.mark.parametrize("stock", [None, ClockRange(600, 1200)])
def test_a_record_is_read_as_it_was_written(stock: ClockRange | None) -> None:
    record = Record(UUID, stock)
    assert Record.decode(record.encode()) == record


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"version": 2, "gpu_uuid": "GPU-0", "stock": null}',
        b'{"version": 1, "gpu_uuid": "GPU-0"}',
        b'{"version": 1, "gpu_uuid": "GPU-0", "stock": {"lowest_mhz": 2, "highest_mhz": 1}}',
    ],
)
def test_what_is_no_record_is_not_taken_for_one(folder: RecordFolder, content: bytes) -> None:
    with pytest.raises(ValueError, match=r"expect|Expect|decode"):
        Record.decode(content)
    folder.path.mkdir(parents=True)
    (folder.path / f"{UUID}.json").write_bytes(content)
    with pytest.raises(RecordError, match=f"{UUID}.json: expected a record"):
        folder.find(UUID)
    (restoration,) = restore_found(folder, lambda _: FakeGpu())
    assert isinstance(restoration.error, RecordError)


@pytest.mark.parametrize("text", ["600", "600,", "a,b", "1200,600", "0,600", "-1,600", "600,1200,1"])
def test_a_clock_range_is_two_clocks_in_order(text: str) -> None:
    with pytest.raises(ValueError, match="clock range: expected"):
        ClockRange.parse(text)
    assert ClockRange.parse("600, 1200") == ClockRange(600, 1200)


def test_a_record_is_on_disk_before_the_first_change_and_gone_after_the_reset(folder: RecordFolder) -> None:
    class Witness(FakeGpu):
        def _set(self, target_mhz: int | None) -> None:
            assert folder.gpu_uuids() == [UUID]
            super()._set(target_mhz)

    gpu = Witness()
    guarded: Gpu = GuardedGpu(gpu, folder, None)
    guarded.set_clock_mhz(1200)
    guarded.set_clock_mhz(1000)
    guarded.reset_clock()
    assert gpu.sets == [1200, 1000, None]
    assert list(folder.path.iterdir()) == []
    guarded.set_clock_mhz(1200)
    assert folder.gpu_uuids() == [UUID]


def test_a_gpu_that_was_not_changed_is_not_reset(folder: RecordFolder) -> None:
    gpu = FakeGpu()
    GuardedGpu(gpu, folder, ClockRange(600, 1200)).reset_clock()
    assert gpu.sets == []
    assert not folder.path.exists()


def test_an_operators_lock_is_what_a_gpu_goes_back_to(folder: RecordFolder) -> None:
    gpu = FakeGpu()
    guarded = GuardedGpu(gpu, folder, ClockRange(600, 1200))
    guarded.set_clock_mhz(1000)
    guarded.reset_clock()
    assert gpu.sets == [1000, 1200]


def test_a_record_is_never_overwritten(folder: RecordFolder) -> None:
    leave_behind(folder, ClockRange(600, 1400))
    with pytest.raises(RecordError, match="File exists"):
        folder.write(Record(UUID, None))
    gpu = FakeGpu()
    guarded = GuardedGpu(gpu, folder, None)
    guarded.set_clock_mhz(1000)
    guarded.reset_clock()
    assert gpu.sets == [1000, 1400], "back to what the dead agent found"
    assert folder.gpu_uuids() == []


@pytest.mark.parametrize(
    ("error", "is_unchanged"),
    [
        (GpuPermissionError("no"), True),
        (GpuUnsupportedError("no"), True),
        (ClockNotSupportedError(UUID, 1000, (1400,)), True),
        (GpuDriverError("perhaps"), False),
        (GpuLostError("perhaps"), False),
    ],
)
def test_a_refused_first_set_leaves_no_record_and_a_failed_one_does(
    folder: RecordFolder, error: GpuError, is_unchanged: bool
) -> None:
    gpu = FakeGpu()
    gpu.errors[1000] = error
    guarded = GuardedGpu(gpu, folder, None)
    with pytest.raises(type(error)):
        guarded.set_clock_mhz(1000)
    assert folder.gpu_uuids() == ([] if is_unchanged else [UUID])
    guarded.set_clock_mhz(1200)
    with pytest.raises(type(error)):
        guarded.set_clock_mhz(1000)
    assert folder.gpu_uuids() == [UUID], "the clock before is still locked"


def test_a_reset_that_fails_keeps_the_record_until_one_succeeds(folder: RecordFolder) -> None:
    gpu = FakeGpu()
    guarded = GuardedGpu(gpu, folder, None)
    guarded.set_clock_mhz(1000)
    gpu.errors[None] = GpuDriverError("not now")
    with pytest.raises(GpuDriverError):
        guarded.reset_clock()
    guarded.close()
    assert [type(each.error) for each in restore_found(folder, lambda _: gpu)] == [GpuDriverError]
    assert folder.gpu_uuids() == [UUID]
    del gpu.errors[None]
    assert restore_found(folder, lambda _: gpu) == [Restoration(UUID, None)]
    assert gpu.sets == [1000, None]
    assert folder.gpu_uuids() == []


def test_without_a_record_no_clock_is_set(folder: RecordFolder) -> None:
    (folder.path / f".{UUID}.json.{os.getpid()}").mkdir(parents=True)  # in the way of the draft
    gpu = FakeGpu()
    guarded = GuardedGpu(gpu, folder, None)
    with pytest.raises(RecordError, match=r"GPU-fake.json.*so no clock is set"):
        guarded.set_clock_mhz(1000)
    assert gpu.sets == []


def test_two_agents_do_not_set_one_gpu(folder: RecordFolder) -> None:
    first = GuardedGpu(FakeGpu(), folder, None)
    first.set_clock_mhz(1000)
    gpu = FakeGpu()
    second = GuardedGpu(gpu, folder, None)
    for change in (second.reset_clock, lambda: second.set_clock_mhz(1000)):
        with pytest.raises(RecordHeldError, match="another agent that runs"):
            change()
    assert restore_found(folder, lambda _: gpu) == [], "the first one lives"
    assert gpu.sets == []
    first.close()
    assert restore_found(folder, lambda _: gpu) == [Restoration(UUID, None)]


def test_a_record_that_is_held_for_a_moment_is_waited_for(folder: RecordFolder) -> None:
    leave_behind(folder)
    looking = folder.find(UUID)
    assert looking is not None
    assert restore_found(folder, lambda _: FakeGpu()) == []
    threading.Timer(0.05, looking.release).start()
    assert restore_found(folder, lambda _: FakeGpu(), patience_s=10.0) == [Restoration(UUID, None)]


def _die_with_a_record(path: str) -> None:
    guarded = GuardedGpu(FakeGpu(), RecordFolder(Path(path)), None)
    guarded.set_clock_mhz(1000)
    os.kill(os.getpid(), 9)


def test_the_record_of_a_killed_process_is_free(folder: RecordFolder) -> None:
    process = get_context("fork").Process(target=_die_with_a_record, args=(str(folder.path),))
    process.start()
    process.join()
    assert process.exitcode == -9
    gpu = FakeGpu()
    assert restore_found(folder, lambda _: gpu) == [Restoration(UUID, None)]
    assert gpu.sets == [None]


def test_each_record_is_seen_to_whatever_becomes_of_the_others(folder: RecordFolder) -> None:
    gpu = FakeGpu()

    def open_gpu(uuid: str) -> Gpu:
        if uuid == "GPU-gone":
            raise GpuNotFoundError(uuid)
        return gpu

    for uuid in (UUID, "GPU-gone", "GPU-served"):
        leave_behind(folder, uuid=uuid)
    (folder.path / "README").write_text("not a record")
    done = restore_found(folder, open_gpu, but=frozenset({"GPU-served"}))
    assert [(each.gpu_uuid, type(each.error)) for each in done] == [
        (UUID, type(None)),
        ("GPU-gone", GpuNotFoundError),
    ]
    assert folder.gpu_uuids() == ["GPU-gone", "GPU-served"]


@pytest.mark.parametrize("uuid", ["../GPU-0", "", ".hidden", "a/b"])
def test_a_uuid_names_a_file_in_the_folder_or_nothing(folder: RecordFolder, uuid: str) -> None:
    with pytest.raises(RecordError, match="expected a UUID"):
        folder.write(Record(uuid, None))
