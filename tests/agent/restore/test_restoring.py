"""Records of changed GPUs, and their restoring by any agent."""

import asyncio
import fcntl
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from perseus.agent.gpu import (
    ClockNotSupportedError,
    Gpu,
    GpuDriverError,
    GpuError,
    GpuInUseError,
    GpuLostError,
    GpuNotFoundError,
    GpuPermissionError,
    GpuUnsupportedError,
    RecordError,
    RecordHeldError,
)
from perseus.agent.gpu.executor import GpuExecutor
from perseus.agent.restore import guarded as guarding
from perseus.agent.restore.guarded import GuardedGpu
from perseus.agent.restore.records import ClockRange, Record, RecordFolder
from perseus.agent.restore.restorer import Restoration, Restorer
from tests.agent.coordinator_stub import until
from tests.agent.fake_gpu import FakeGpu
from tests.agent.other_users import NOBODY, needs_root, passable_folder, start_as

UUID = FakeGpu.uuid


@pytest.fixture
def folder(tmp_path: Path) -> RecordFolder:
    return RecordFolder(tmp_path / "var" / "restore")


def leave_behind(folder: RecordFolder, stock: ClockRange | None = None, uuid: str = UUID) -> None:
    """Leave a record like an agent that dies."""
    folder.write(Record(uuid, stock)).release()


def restore_found(
    folder: RecordFolder, open_gpu: Callable[[str], Gpu], *, timeout_s: float = 0.0
) -> list[Restoration]:
    return asyncio.run(Restorer(folder, open_gpu, GpuExecutor(), timeout_s=timeout_s).restore_once())


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
    guarded: Gpu = GuardedGpu(gpu, folder, ClockRange(600, 1400))
    guarded.set_clock_mhz(1200)
    guarded.set_clock_mhz(1000)
    guarded.reset_clock()
    assert gpu.sets == [1200, 1000, 1400], "back to an operator's lock"
    assert list(folder.path.iterdir()) == []
    guarded.set_clock_mhz(1200)
    assert folder.gpu_uuids() == [UUID]
    guarded.close()


def test_a_gpu_that_was_not_changed_is_not_reset(folder: RecordFolder) -> None:
    gpu = FakeGpu()
    GuardedGpu(gpu, folder, ClockRange(600, 1200)).reset_clock()
    assert gpu.sets == []
    assert not folder.path.exists()


def test_a_record_is_never_overwritten(folder: RecordFolder) -> None:
    leave_behind(folder, ClockRange(600, 1400))
    with pytest.raises(RecordError, match="File exists"):
        folder.write(Record(UUID, None))
    gpu = FakeGpu()
    guarded = GuardedGpu(gpu, folder, None)
    guarded.set_clock_mhz(1000)
    guarded.reset_clock()
    assert gpu.sets == [1000, 1400], "back to the clocks that the dead agent found"
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
def test_a_refused_first_set_leaves_no_record_and_a_failed_set_or_reset_does(
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
    assert folder.gpu_uuids() == [UUID], "the previous clock is still locked"
    gpu.errors[None] = error
    with pytest.raises(type(error)):
        guarded.reset_clock()
    assert folder.gpu_uuids() == [UUID]
    guarded.close()


def test_without_a_record_no_clock_is_set(folder: RecordFolder) -> None:
    (folder.path / f".{UUID}.json.{os.getpid()}").mkdir(parents=True)  # blocks the draft
    gpu = FakeGpu()
    guarded = GuardedGpu(gpu, folder, None)
    with pytest.raises(RecordError, match=r"GPU-fake.json.*so no clock is set"):
        guarded.set_clock_mhz(1000)
    assert gpu.sets == []


def test_two_agents_do_not_set_one_gpu(folder: RecordFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarding, "TIMEOUT_S", 0.05)
    first = GuardedGpu(FakeGpu(), folder, None)
    first.set_clock_mhz(1000)
    gpu = FakeGpu()
    second = GuardedGpu(gpu, folder, None)
    for change in (second.reset_clock, lambda: second.set_clock_mhz(1000)):
        with pytest.raises(RecordHeldError, match="another running agent"):
            change()
    assert restore_found(folder, lambda _: gpu) == [], "the first one is alive"
    assert gpu.sets == []
    first.close()
    assert restore_found(folder, lambda _: gpu) == [Restoration(UUID, None)]


def test_a_briefly_held_record_is_waited_for(folder: RecordFolder) -> None:
    leave_behind(folder, ClockRange(600, 1400))
    looking = folder.find(UUID)
    assert looking is not None
    assert looking.record == Record(UUID, ClockRange(600, 1400))
    assert restore_found(folder, lambda _: FakeGpu()) == []
    threading.Timer(0.05, looking.release).start()
    assert restore_found(folder, lambda _: FakeGpu(), timeout_s=10.0) == [Restoration(UUID, None)]


@pytest.mark.parametrize("uuid", ["../GPU-0", "", ".hidden", "a/b"])
def test_a_uuid_names_a_file_in_the_folder_or_nothing(folder: RecordFolder, uuid: str) -> None:
    with pytest.raises(RecordError, match="expected a UUID"):
        folder.write(Record(uuid, None))


# --- Other users --------------------------------------------------------------------------------------------


def test_records_belong_to_their_user_alone_despite_the_umask(folder: RecordFolder) -> None:
    before = os.umask(0)
    try:
        leave_behind(folder)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert [stat.S_IMODE(each.stat().st_mode) for each in folder.path.iterdir()] == [0o600]
    folder.path.chmod(0o777)  # as left by an operator
    assert folder.gpu_uuids() == [UUID]
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def put_link(path: Path) -> None:
    target = path.with_name("elsewhere")
    target.write_bytes(Record(UUID, None).encode())
    path.symlink_to(target)


def holding(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


INVALID = [
    b"",
    b"[]",
    b"\xff",
    b'{"version": 2, "gpu_uuid": "GPU-fake", "stock": null}',
    b'{"version": 1, "gpu_uuid": "GPU-fake"}',
    b'{"version": 1, "gpu_uuid": "GPU-fake", "stock": {"lowest_mhz": 2, "highest_mhz": 1}}',
    b'{"version": 1, "gpu_uuid": "GPU-fake", "stock": {"lowest_mhz": true, "highest_mhz": true}}',
]
FOREIGN: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "folder": Path.mkdir,
    "link": put_link,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "nested": holding(b"[" * 4000),
    "huge": holding(Record(UUID, None).encode() + b" " * 10_000_000),
    "another": holding(Record("GPU-other", ClockRange(600, 700)).encode()),
    **{str(content): holding(content) for content in INVALID},
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("put", FOREIGN.values(), ids=FOREIGN)
def test_foreign_files_in_a_records_place_neither_count_nor_block(
    folder: RecordFolder, put: Callable[[Path], object]
) -> None:
    leave_behind(folder, uuid="GPU-good")
    (folder.path / "README").write_text("not a record")
    put(folder.path / f"{UUID}.json")
    opened: list[str] = []

    def open_gpu(uuid: str) -> Gpu:
        opened.append(uuid)
        return FakeGpu()

    done = {each.gpu_uuid: each.error for each in restore_found(folder, open_gpu)}
    assert done.keys() == {UUID, "GPU-good"}
    assert isinstance(done[UUID], RecordError)
    assert f"{UUID}.json" in str(done[UUID])
    assert str(done[UUID]).isprintable()
    assert (done["GPU-good"], opened) == (None, ["GPU-good"])
    gpu = FakeGpu()
    with pytest.raises(RecordError):
        GuardedGpu(gpu, folder, None).set_clock_mhz(1000)
    assert gpu.sets == []


def test_a_folder_behind_a_link_or_of_another_user_is_refused(tmp_path: Path) -> None:
    real = RecordFolder(tmp_path / "real")
    leave_behind(real)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(RecordError, match="link: can't be read"):
        RecordFolder(tmp_path / "link").gpu_uuids()
    if os.geteuid() == 0:
        os.chown(real.path, NOBODY, NOBODY)
        with pytest.raises(RecordError, match="expected a folder of user 0, the agent's, found user"):
            real.gpu_uuids()


def hold(path: str) -> None:
    """Run in a separate process, as another user."""
    try:
        file = os.open(path, os.O_RDONLY)
    except PermissionError:
        print("refused", flush=True)
    else:
        fcntl.flock(file, fcntl.LOCK_EX)
        print("held", flush=True)
        sys.stdin.read()


@needs_root
def test_another_users_lock_does_not_block_restoring() -> None:
    with passable_folder() as passable:
        folder = RecordFolder(passable / "restore")
        leave_behind(folder)
        path = folder.path / f"{UUID}.json"

        def other_user() -> subprocess.Popen[str]:
            return start_as(NOBODY, "tests.agent.restore.test_restoring", "hold", [str(path)])

        with other_user() as refused:
            assert refused.stdout is not None
            assert refused.stdout.readline() == "refused\n"
        # As left by an earlier version.
        folder.path.chmod(0o755)
        path.chmod(0o644)
        with other_user() as holder:
            assert holder.stdout is not None
            assert holder.stdin is not None
            assert holder.stdout.readline() == "held\n"
            gpu = FakeGpu()
            assert restore_found(folder, lambda _: gpu) == [Restoration(UUID, None)]
            assert gpu.sets == [None]
            holder.stdin.close()
        assert folder.gpu_uuids() == []


# --- A running agent restores the GPUs of dead ones ---------------------------------------------------------


@pytest.fixture
def leftover(folder: RecordFolder) -> RecordFolder:
    """With a dead agent's record."""
    leave_behind(folder)
    return folder


def restorer(records: RecordFolder, *answers: FakeGpu | Exception) -> Restorer:
    """Return a restorer whose GPU opens with the answers in order, and then repeats the last."""
    left = list(answers)

    def open_gpu(uuid: str) -> Gpu:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return Restorer(records, open_gpu, GpuExecutor(), retry_s=0.0)


async def test_restoring_is_retried_until_it_succeeds_after_bugs_too(leftover: RecordFolder) -> None:
    gpu, failing = FakeGpu(), FakeGpu()
    failing.errors[None] = GpuDriverError("not yet")
    restoring = restorer(leftover, GpuDriverError("not yet"), RuntimeError("a mistake"), failing, gpu)
    await restoring.restore_all()
    assert gpu.sets == [None]
    assert leftover.gpu_uuids() == []
    assert restoring.restore_counts == {UUID: 1}
    assert restoring.not_restored == set()


async def test_a_missing_gpu_is_logged_once_and_keeps_its_record(leftover: RecordFolder) -> None:
    restoring = restorer(leftover, GpuDriverError("not yet"), GpuLostError("fell off the bus"))
    with capture_logs() as logs, pytest.raises(RecordError, match="fell off the bus"):
        await restoring.restore_all()
    assert restoring.not_restored == {UUID}
    assert restoring.restore_counts == {}
    assert [(line["event"], line["reason"]) for line in logs] == [
        ("GPU not restored", "not yet"),
        ("GPU not restored", "fell off the bus"),
    ]
    assert leftover.gpu_uuids() == [UUID]


async def test_a_gpu_that_somebody_else_brings_back_is_no_longer_missed(leftover: RecordFolder) -> None:
    restoring = restorer(leftover, GpuLostError("fell off the bus"))
    with pytest.raises(RecordError, match="fell off the bus"):
        await restoring.restore_all()
    (leftover.path / f"{UUID}.json").unlink()
    await restoring.restore_all()
    assert restoring.not_restored == set()


async def test_another_agents_gpu_is_not_waited_for(leftover: RecordFolder) -> None:
    await restorer(leftover, GpuNotFoundError("no such GPU")).restore_all()
    assert leftover.gpu_uuids() == [UUID]


async def test_a_folder_that_can_not_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match="can't be read"):
        await restorer(RecordFolder(tmp_path / "file"), FakeGpu()).restore_all()


async def test_a_served_gpu_is_skipped_until_it_is_given_back(leftover: RecordFolder) -> None:
    gpu = FakeGpu()
    restoring = restorer(leftover, gpu)
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
async def test_a_gpu_that_can_not_be_opened_is_not_taken(leftover: RecordFolder, error: Exception) -> None:
    def fail(uuid: str) -> Gpu:
        raise error

    restoring = restorer(leftover, FakeGpu())
    with pytest.raises(type(error)):
        await restoring.take(UUID, fail)
    assert not restoring.is_taken(UUID)


async def test_a_gpu_that_can_not_be_closed_is_given_back(leftover: RecordFolder) -> None:
    def fail() -> None:
        raise GpuLostError("gone")

    restoring = restorer(leftover, gpu := FakeGpu())
    await restoring.take(UUID, lambda _: gpu)
    with pytest.raises(GpuLostError):
        await restoring.give_back(UUID, fail)
    assert not restoring.is_taken(UUID)


async def test_gpus_are_restored_time_and_again_while_another_hangs(leftover: RecordFolder) -> None:
    leftover.write(Record("GPU-hung", None)).release()
    hang, hung, gpu = threading.Event(), FakeGpu(), FakeGpu()

    def open_gpu(uuid: str) -> Gpu:
        if uuid == "GPU-hung":
            hang.wait()
            return hung
        return gpu

    restoring = Restorer(leftover, open_gpu, GpuExecutor(timeout_s=0.5), retry_s=0.01)
    keeping = asyncio.create_task(restoring.keep_restoring())
    await until(lambda: gpu.sets == [None], "the other's restoring")
    assert await restoring.take(UUID, lambda _: gpu) is gpu, "and from being served"
    await restoring.give_back(UUID, gpu.close)
    leftover.write(Record(UUID, None)).release()
    await until(lambda: gpu.sets == [None, None], "the other's restoring again")
    with pytest.raises(RecordError, match=r"GPU GPU-hung: expected the driver to answer within 0\.5 s"):
        await restoring.restore_all()
    hang.set()
    await until(lambda: hung.sets == [None], "the restoring of the GPU that hung")
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_a_gpu_is_opened_only_when_nothing_is_being_restored(leftover: RecordFolder) -> None:
    gpu = FakeGpu()
    gpu.permit.clear()
    restoring = restorer(leftover, gpu)
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
