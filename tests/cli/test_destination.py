"""Destinations of outputs: like a shell's `>`, and never half written."""

import os
import socket
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest
import typer

from perseus.cli.destination import Destination

CONTENT = b"content"


def write(path: Path, fill: Callable[[BinaryIO], object] = lambda stream: stream.write(CONTENT)) -> None:
    destination = Destination("--output", path)
    destination.check()
    destination.write(fill)


def test_a_new_file_has_the_umask_and_an_existing_one_keeps_its_mode(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_bytes(b"before")
    old.chmod(0o604)
    before = os.umask(0o027)
    try:
        write(new)
        write(old)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (new, old)] == [0o640, 0o604]
    assert new.read_bytes() == old.read_bytes() == CONTENT


def test_links_are_followed_to_their_end(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "there").write_bytes(b"before")
    (tmp_path / "first").symlink_to("second")
    (tmp_path / "second").symlink_to(tmp_path / "folder" / "there")
    (tmp_path / "dangling").symlink_to("folder/new")
    write(tmp_path / "first")
    write(tmp_path / "dangling")
    assert (tmp_path / "first").is_symlink()
    assert (tmp_path / "folder" / "there").read_bytes() == CONTENT
    assert (tmp_path / "folder" / "new").read_bytes() == CONTENT
    assert sorted(each.name for each in (tmp_path / "folder").iterdir()) == ["new", "there"]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(path.read_bytes)
        write(path)
        assert read.result() == CONTENT
    assert stat.S_ISFIFO(path.stat().st_mode)


@pytest.mark.parametrize("name", ["/dev/fd/{}", "/proc/self/fd/{}"])
def test_output_is_appended_to_an_open_file(tmp_path: Path, name: str) -> None:
    with (tmp_path / "log").open("wb", buffering=0) as log:
        log.write(b"first, ")
        write(Path(name.format(log.fileno())))
        log.write(b", last")
    assert (tmp_path / "log").read_bytes() == b"first, content, last"


def test_a_socket_is_written_to() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        write(Path(f"/dev/fd/{ours.fileno()}"))
        assert theirs.recv(100) == CONTENT


def test_a_full_device_is_named_and_not_replaced(
    full_device: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as end:
        write(full_device)
    assert end.value.exit_code == 1
    assert (
        f"error: --output: {full_device} can't be written: No space left on device" in capsys.readouterr().err
    )
    assert stat.S_ISCHR(full_device.stat().st_mode)


@pytest.mark.parametrize("error", [OSError(28, "full"), KeyboardInterrupt(), SystemExit(143)])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_failed_write_changes_nothing(tmp_path: Path, error: BaseException, is_there: bool) -> None:
    path = tmp_path / "file"
    if is_there:
        path.write_bytes(b"before")

    def fail(stream: BinaryIO) -> None:
        stream.write(CONTENT)
        raise error

    with pytest.raises((typer.Exit, KeyboardInterrupt, SystemExit)):
        write(path, fail)
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"before"] * is_there


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write every file")
def test_a_file_that_may_not_be_written_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch(mode=0o444)
    with pytest.raises(typer.Exit):
        write(path)
    assert path.read_bytes() == b""
