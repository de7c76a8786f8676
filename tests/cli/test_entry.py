"""The end of every command: streams, signals, exit code. In processes, as those are under test."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.processes import COMMAND, call

SOLVE = ["solve", "profile.csv", "--microbatches", "2", "--points", "3"]

pytestmark = pytest.mark.usefixtures("profile_file")


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_full_output_gives_one_line(tmp_path: Path, full_device: Path, form: str) -> None:
    with full_device.open("wb") as full:
        ended = call(*SOLVE, "--format", form, cwd=tmp_path, stdout=full)
    assert ended.exit_code == 1
    assert ended.error == "error: standard output can't be written: No space left on device"


def closing(file: int) -> list[str]:
    """Return the beginning of a command that closes one of its files and executes the rest.

    No function runs between fork and execution: beside threads of gRPC that may abort the child.
    """
    return ["sh", "-c", f'exec "$@" {file}>&-', "sh"]


def test_a_closed_output_gives_one_line_and_writes_to_no_other_file(tmp_path: Path) -> None:
    flags = [*SOLVE, "--output", "frontier.json"]
    ended = call(*flags, cwd=tmp_path, stdout=None, before=closing(1))
    assert ended.exit_code == 1
    assert ended.error == "error: standard output can't be written: Bad file descriptor"
    assert not (tmp_path / "frontier.json").exists()


def test_a_missing_standard_error_disturbs_nothing(tmp_path: Path) -> None:
    flags = [*SOLVE, "--output", "frontier.json"]
    ended = call(*flags, cwd=tmp_path, before=closing(2))
    assert (ended.exit_code, b"T_min" in ended.stdout) == (0, True)
    assert json.loads((tmp_path / "frontier.json").read_text())["tMinS"] > 0


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_command_ends_silently_without_a_reader(tmp_path: Path, form: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        ended = call(*SOLVE, "--format", form, cwd=tmp_path, stdout=pipe)
    assert (ended.exit_code, ended.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("encoding", ["ascii", "utf-16"])
def test_every_output_encoding_works(tmp_path: Path, encoding: str) -> None:
    for command, shown in ((SOLVE, "T_slow"), (["jobs", "--help"], "rebaseline")):
        ended = call(*command, cwd=tmp_path, environment={"PYTHONIOENCODING": encoding})
        assert (ended.exit_code, ended.stderr) == (0, "")
        assert shown in ended.stdout.decode(encoding)


def test_standard_output_contains_only_the_output_also_if_it_is_a_file(tmp_path: Path) -> None:
    piped = call(*SOLVE, "--output", "/dev/stdout", cwd=tmp_path)
    with (tmp_path / "out").open("wb") as file:
        assert call(*SOLVE, "--output", "/dev/stdout", cwd=tmp_path, stdout=file).exit_code == 0
    for output in (piped.stdout, (tmp_path / "out").read_bytes()):
        assert json.loads(output)["tMinS"] > 0


@pytest.mark.parametrize(
    ("when", "number"),
    [
        *(("importing", number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)),
        *(("solving", number) for number in (signal.SIGINT, signal.SIGTERM)),
    ],
)
def test_a_signal_ends_a_command_silently_at_any_time(
    tmp_path: Path, number: signal.Signals, when: str
) -> None:
    flags = ["--microbatches", "1500", "--limit-s", "90", "--output", "frontier.json"]
    with subprocess.Popen(
        # A run of the tests in the background ignores the signal, and its children inherit that.
        ["env", f"--default-signal={number.name}", *COMMAND, "solve", "profile.csv", *flags],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            maps = Path(f"/proc/{process.pid}/maps")
            # The first import of our own, and the last.
            wanted = {"importing": "_socket", "solving": "igraph/_igraph"}[when]
            deadline_s = time.monotonic() + 60
            while wanted not in maps.read_text():
                assert process.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.002)
            process.send_signal(number)
            stdout, stderr = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode in (128 + number, -number)
    assert (stdout, stderr) == (b"", b"")
    assert [each.name for each in tmp_path.iterdir()] == ["profile.csv"]


DELETED_AT_A_SIGNAL = """
import os, signal, sys, time
from unittest import mock

class Deleted:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)

def command():
    Deleted()
    time.sleep(60)

from perseus.cli import entry
with mock.patch("perseus.cli.main.main", command):
    entry.main()
"""


@pytest.mark.slow("starts a command as a process")
def test_a_signal_ends_a_command_while_an_object_is_being_deleted(tmp_path: Path) -> None:
    script = [sys.executable, "-c", DELETED_AT_A_SIGNAL]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, b"")
