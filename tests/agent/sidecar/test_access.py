"""The access checker with real users, processes, files and cgroups."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from perseus.agent.claims.decision import (
    GRANTS_NOT_UNDERSTOOD,
    NOT_GRANTED,
    NOT_KNOWN,
    NOT_OPENABLE,
    OF_ANOTHER_USER,
    Allowed,
    Refused,
)
from perseus.agent.gpu import Gpu, GpuError, GpuHungError, GpuUse
from perseus.agent.gpu.executor import GpuExecutor
from perseus.agent.sidecar.access import AccessChecker, read_grants
from perseus.agent.sidecar.peer import Peer, user_of
from tests.agent.other_users import NOBODY, OWNER, needs_root, passable_folder, start_as

UUID = "GPU-0"


class Node:
    """A backend with one GPU with given properties."""

    def __init__(
        self,
        node: Path,
        process_ids: tuple[int, ...] | None = (),
        later: tuple[int, ...] | None = None,
    ) -> None:
        """`later` are the processes at a second inspection, if they differ."""
        self.use = GpuUse(0, str(node), process_ids)
        self._later = later

    def open(self, uuid: str) -> Gpu:
        raise NotImplementedError

    def inspect(self, uuid: str) -> GpuUse:
        use = self.use
        if self._later is not None:
            self.use = replace(use, process_ids=self._later)
        return use

    def listed(self) -> list[str | GpuError]:
        return [UUID]


def ours() -> Peer:
    return Peer(os.geteuid(), os.getegid(), (), os.getpid(), None)


def process_of(uid: int) -> Iterator[tuple[Peer, int]]:
    with start_as(uid, "tests.agent.sidecar.test_access", "wait_for_end") as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "here\n"
        pidfd = os.pidfd_open(process.pid)
        yield Peer(uid, uid, (), process.pid, pidfd), process.pid
        os.close(pidfd)
        process.stdin.close()


def wait_for_end() -> None:
    """Run in a separate process."""
    print("here", flush=True)
    input_left = os.read(0, 1)
    assert not input_left


@pytest.fixture
def nobody() -> Iterator[tuple[Peer, int]]:
    yield from process_of(NOBODY)


@pytest.fixture
def owner() -> Iterator[tuple[Peer, int]]:
    yield from process_of(OWNER)


@pytest.fixture
def node() -> Iterator[Path]:
    with passable_folder() as folder:
        path = folder / "nvidia0"
        path.touch()
        path.chmod(0o666)
        yield path


async def judged(gpus: Node, peer: Peer, grants: Path, before: Allowed | None = None) -> Allowed | str:
    checker = AccessChecker(gpus, grants, GpuExecutor())
    verdict = await checker.judge(peer, user_of(peer.uid), UUID, before)
    checker.close()
    return verdict.reason if isinstance(verdict, Refused) else verdict


async def test_the_agents_own_user_needs_nothing(node: Path, tmp_path: Path) -> None:
    assert await judged(Node(node), ours(), tmp_path / "none") == Allowed()
    assert await judged(Node(tmp_path / "missing"), ours(), tmp_path / "none") == Allowed()
    assert await judged(Node(node, (os.getpid(),)), ours(), tmp_path / "none") == Allowed(is_running=True)
    assert await judged(Node(node, None), ours(), tmp_path / "none") == Allowed()


@needs_root
async def test_another_user_must_be_able_to_open_the_device(
    node: Path, tmp_path: Path, nobody: tuple[Peer, int]
) -> None:
    peer, _ = nobody
    assert await judged(Node(node), peer, tmp_path / "none") == Allowed()
    for mode in (0o600, 0o660, 0o444, 0o222):
        os.chmod(node, mode)
        assert await judged(Node(node), peer, tmp_path / "none") == NOT_OPENABLE, oct(mode)
    os.chmod(node, 0o660)
    os.chown(node, -1, 4242)
    in_group = Peer(peer.uid, peer.gid, (4242,), peer.pid, peer.pidfd)
    assert await judged(Node(node), in_group, tmp_path / "none") == Allowed()
    assert await judged(Node(tmp_path / "missing"), peer, tmp_path / "none") == NOT_OPENABLE


@needs_root
async def test_processes_of_other_users_are_seen(
    node: Path, tmp_path: Path, nobody: tuple[Peer, int], owner: tuple[Peer, int]
) -> None:
    peer, pid = nobody
    none = tmp_path / "none"
    assert await judged(Node(node, (pid,)), peer, none) == Allowed(is_running=True)
    assert await judged(Node(node, (owner[1],)), peer, none) == OF_ANOTHER_USER
    assert await judged(Node(node, (pid, owner[1])), peer, none) == OF_ANOTHER_USER
    assert await judged(Node(node, (pid, owner[1])), peer, none, Allowed(is_running=True)) == Allowed(
        is_running=True
    )
    assert await judged(Node(node, (2**22 + 1,), ()), peer, none) == Allowed(), "a process that has ended"
    assert await judged(Node(node, (2**22 + 1,)), peer, none) == NOT_KNOWN, "one that can't be seen"


@needs_root
async def test_a_device_that_the_cgroup_denies_is_not_openable(
    tmp_path: Path, nobody: tuple[Peer, int]
) -> None:
    devices = Path("/sys/fs/cgroup/devices")
    if not os.access(devices / "cgroup.procs", os.W_OK) or not (devices / "devices.deny").exists():
        pytest.skip("no writable hierarchy of the controller devices (cgroup v1) here")
    null = Path("/dev/null")  # a device node that everybody may open
    peer, pid = nobody
    cgroup = devices / f"perseus-test-{os.getpid()}"
    cgroup.mkdir()
    try:
        (cgroup / "cgroup.procs").write_text(str(pid))
        assert await judged(Node(null), peer, tmp_path / "none") == Allowed()
        (cgroup / "devices.deny").write_text("c 1:3 rwm")
        assert await judged(Node(null), peer, tmp_path / "none") == NOT_OPENABLE
        (cgroup / "devices.allow").write_text("c 1:3 r")
        assert await judged(Node(null), peer, tmp_path / "none") == NOT_OPENABLE, "to read is not enough"
    finally:
        (devices / "cgroup.procs").write_text(str(pid))
        cgroup.rmdir()


@needs_root
async def test_a_process_that_has_ended_opens_nothing(node: Path, tmp_path: Path) -> None:
    with start_as(NOBODY, "sys", "exit") as process:
        pidfd = os.pidfd_open(process.pid)
        process.wait()
        gone = Peer(NOBODY, NOBODY, (), process.pid, pidfd)
        assert await judged(Node(node), gone, tmp_path / "none") == NOT_OPENABLE
        os.close(pidfd)


async def test_across_pid_namespaces_only_the_user_is_known_which_is_logged_once(
    node: Path, tmp_path: Path
) -> None:
    checker = AccessChecker(Node(node), tmp_path / "none", GpuExecutor())
    peer = Peer(os.geteuid(), os.getegid(), (), 0, None)
    with capture_logs() as logs:
        for _ in range(3):
            assert await checker.judge(peer, user_of(peer.uid), UUID, None) == Allowed()
    assert [line["event"] for line in logs] == [
        "processes of others can't be seen: trainers are known by user and connection only"
    ]
    checker.close()


async def test_a_hanging_gpu_does_not_delay_claims_to_others(node: Path, tmp_path: Path) -> None:
    hang = threading.Event()

    class HungNode(Node):
        def inspect(self, uuid: str) -> GpuUse:
            if uuid == "GPU-hung":
                hang.wait()
            return self.use

    checker, peer = AccessChecker(HungNode(node), tmp_path / "none", GpuExecutor(timeout_s=0.5)), ours()
    user = user_of(peer.uid)
    hung = [asyncio.create_task(checker.judge(peer, user, "GPU-hung", None)) for _ in range(4)]
    await asyncio.sleep(0)
    assert await checker.judge(peer, user, UUID, None) == Allowed()
    for each in hung:
        with pytest.raises(GpuHungError):
            await each
    hang.set()
    checker.close()


# --- Grants -------------------------------------------------------------------------------------------------


def grant(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o644)
    return folder


async def test_grants_come_first_and_are_reread(node: Path, tmp_path: Path) -> None:
    me = user_of(os.geteuid()).name
    checker = AccessChecker(Node(node, None), tmp_path / "grants", GpuExecutor())
    peer = ours()

    async def verdict() -> Allowed | str:
        found = await checker.judge(peer, user_of(peer.uid), UUID, None)
        return found.reason if isinstance(found, Refused) else found

    assert await verdict() == Allowed()
    grant(tmp_path / "grants", "job-1", "somebody-else: 0\n")
    assert await verdict() == NOT_GRANTED
    grant(tmp_path / "grants", "job-2", f"{me}: 0")
    assert await verdict() == Allowed(is_granted=True)
    (tmp_path / "grants" / "job-2").unlink()
    (tmp_path / "grants" / "job-1").write_text("nonsense")
    with capture_logs() as logs:
        assert await verdict() == GRANTS_NOT_UNDERSTOOD
        assert await verdict() == GRANTS_NOT_UNDERSTOOD
    assert [line["event"] for line in logs] == ["grants not understood"]
    checker.close()


def test_a_folder_writable_by_all_counts_on_a_read_only_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "grant").write_text(f"{OWNER}: {UUID}\n")
    tmp_path.chmod(0o777)
    assert read_grants(tmp_path).problems
    as_mounted = os.statvfs(tmp_path)
    read_only = SimpleNamespace(f_flag=as_mounted.f_flag | os.ST_RDONLY)
    monkeypatch.setattr(os, "statvfs", lambda path: read_only)
    found = read_grants(tmp_path)
    assert (len(found.grants), found.problems) == (1, ())
    (tmp_path / "grant").chmod(0o666)
    assert read_grants(tmp_path).problems, "files count by their mode"


@pytest.mark.timeout(20)
def test_only_files_that_nobody_else_can_write_count(tmp_path: Path) -> None:
    folder = grant(tmp_path / "grants", "good", "alice: 0")
    grant(folder, ".hidden", "mallory: 0")
    grant(folder, "backup~", "mallory: 0")
    assert [each.user for each in read_grants(folder).grants] == ["alice"]
    assert read_grants(folder).problems == ()
    assert read_grants(tmp_path / "none").grants == ()
    bad = folder / "bad"

    def put_writable() -> None:
        bad.touch()
        bad.chmod(0o666)

    puts: dict[str, Callable[[], object]] = {
        "regular file": lambda: os.mkfifo(bad),
        "expected a regular": lambda: bad.mkdir(),
        "at most": lambda: bad.write_bytes(b"#" * 100_000),
        "writable by root or": put_writable,
        "decode": lambda: bad.write_bytes(b"\xff\xfe"),
        "line 1": lambda: bad.write_text("alice"),
        "regular": lambda: bad.symlink_to("/dev/zero"),
    }
    for expected, put in puts.items():
        put()
        (problem,) = read_grants(folder).problems
        assert expected in problem
        assert "bad" in problem
        assert [each.user for each in read_grants(folder).grants] == ["alice"]
        bad.rmdir() if bad.is_dir() else bad.unlink()
    folder.chmod(0o777)
    assert "writable by root or the agent's user only" in read_grants(folder).problems[0]
