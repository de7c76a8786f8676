"""The supervisor with a shell script in place of the agent, which gets the agent's arguments."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
from typer.testing import CliRunner

from perseus.agent.restore import supervisor
from perseus.cli.main import app

SUPERVISOR = [sys.executable, "-m", "perseus.agent.restore.supervisor"]

# Records its arguments. With --restore, it fails as often as the file `failures` has lines.
AGENT = """
import os, signal, sys, time
from pathlib import Path
here = Path(sys.argv[1])
with (here / "calls").open("a") as calls:
    print(*sys.argv[2:], file=calls, flush=True)
if sys.argv[-1] == "--restore":
    if (here / "hang").exists():
        time.sleep(60)
    print(4096 * "restoring ", file=sys.stderr, flush=True)
    left = (here / "failures").read_text().splitlines()
    (here / "failures").write_text("".join(line + "\\n" for line in left[1:]))
    sys.exit(1 if left else 0)
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (here / "pid").write_text(str(os.getpid()))
    time.sleep(60)
def stop(*_):
    sys.exit(1 if sys.argv[2] == "serve badly" else 0)
signal.signal(signal.SIGTERM, stop)
(here / "pid").write_text(str(os.getpid()))
if sys.argv[2] == "fail":
    sys.exit(3)
if sys.argv[2] == "finish":
    sys.exit(0)
if sys.argv[2] == "stop":
    os.write(int(os.environ["PERSEUS_LIFELINE"]), b".")
    os.kill(os.getpid(), signal.SIGSTOP)
os.read(int(os.environ["PERSEUS_LIFELINE"]), 1)
(here / "end").write_text("its supervisor is gone")
"""


# The same, with shorter timeouts. Only time ends its attempts, and only a deaf agent is killed for its stop.
HASTY = """
import sys
from perseus.agent.restore import supervisor
supervisor.STOP_S, supervisor._PAUSE_S, supervisor.SILENCE_S = 3.0, 0.1, 1.0
supervisor._AGENT_STOP_S = 0.4 if "deaf" in sys.argv else 60.0
supervisor._ATTEMPTS = 10**6
sys.exit(supervisor.main(sys.argv[1:]))
"""


class Supervised:
    def __init__(
        self,
        folder: Path,
        argument: str,
        failures: int = 0,
        supervisor: Sequence[str] = SUPERVISOR,
        **options: Any,
    ) -> None:
        self.folder = folder
        (folder / "failures").write_text("x\n" * failures)
        agent = [sys.executable, "-S", "-c", AGENT, str(folder), argument]
        self.process = subprocess.Popen([*supervisor, *agent], **options)

    def agent_pid(self) -> int:
        return int(self.until("pid"))

    def until(self, name: str) -> str:
        """Wait for a file of the agent and return its content."""
        deadline_s = time.monotonic() + 60
        while not (path := self.folder / name).exists() or not path.read_text():
            assert time.monotonic() < deadline_s, f"no {name}"
            time.sleep(0.01)
        return path.read_text()

    def end(self) -> tuple[int, list[str]]:
        """Return the exit status and the agent's calls."""
        status = self.process.wait(60)
        return status, (self.folder / "calls").read_text().splitlines()


def test_it_imports_little() -> None:
    names = "[m for m in sys.modules if not m.startswith('_')]"
    code = f"import sys, perseus.agent.restore.supervisor; print({names})"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for heavy in ("'pynvml'", "'numpy'", "'grpc'", "'pydantic'", "'asyncio'", "'typer'", "'structlog'"):
        assert heavy not in modules


KILLED = 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("argument", "sent", "status", "restores"),
    [
        pytest.param("finish", None, 0, 0, id="an agent that ends well has restored"),
        pytest.param("serve", signal.SIGKILL, KILLED, 1, id="a killed agent has not"),
        pytest.param("stop", None, KILLED, 1, id="one whose beats cease is killed"),
        pytest.param("fail", None, 3, 3, id="restoring is retried until it succeeds"),
    ],
)
def test_gpus_are_restored_with_the_agents_own_settings_unless_it_ended_well(
    tmp_path: Path, argument: str, sent: signal.Signals | None, status: int, restores: int
) -> None:
    failures = max(0, restores - 1)
    supervised = Supervised(tmp_path, argument, failures, [sys.executable, "-c", HASTY])
    if sent is not None:
        os.kill(supervised.agent_pid(), sent)
    assert supervised.end() == (status, [argument, *[f"{argument} --restore"] * restores])


def test_nothing_is_restored_after_an_observer(tmp_path: Path) -> None:
    observer = Supervised(tmp_path, "fail", supervisor=[*SUPERVISOR, supervisor.OBSERVES])
    assert observer.end() == (3, ["fail"])


def test_restoring_counts_only_once_the_agent_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then its records are its own, and a command that leaves them alone succeeds."""
    statuses = iter([None, None, -9])
    agent = cast("subprocess.Popen[bytes]", SimpleNamespace(poll=lambda: next(statuses)))
    stop = cast(supervisor._Stop, SimpleNamespace(left_s=lambda _: 60.0))
    monkeypatch.setattr(supervisor, "_PAUSE_S", 0.0)
    assert supervisor._restore(["sleep", "0.1"], agent, stop)
    assert next(statuses, "none left") == "none left"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_termination_signal_is_forwarded(tmp_path: Path, number: signal.Signals) -> None:
    supervised = Supervised(tmp_path, "serve")
    supervised.agent_pid()
    supervised.process.send_signal(number)
    assert supervised.end() == (0, ["serve"])


def test_an_agent_notices_that_its_supervisor_was_killed(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, "serve")
    supervised.agent_pid()
    supervised.process.kill()
    supervised.process.wait()
    assert supervised.until("end") == "its supervisor is gone"


@pytest.mark.parametrize(
    ("argument", "failures", "hangs", "status"),
    [
        ("serve badly", 100, False, 1),
        ("deaf", 0, True, 128 + signal.SIGKILL),
        ("deaf", 0, False, 128 + signal.SIGKILL),
    ],
)
def test_a_stop_ends_in_time_even_if_gpus_are_not_restored(
    tmp_path: Path, argument: str, failures: int, hangs: bool, status: int
) -> None:
    if hangs:
        (tmp_path / "hang").touch()
    supervised = Supervised(tmp_path, argument, failures, [sys.executable, "-c", HASTY])
    supervised.agent_pid()
    supervised.process.send_signal(signal.SIGTERM)
    found, calls = supervised.end()
    assert (found, set(calls)) == (status, {argument, f"{argument} --restore"})


def test_a_stop_ends_restoring_after_an_agents_death(tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    supervised = Supervised(tmp_path, "fail", supervisor=[sys.executable, "-c", HASTY])
    while len((tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []) < 2:
        time.sleep(0.01)
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.end() == (3, ["fail", "fail --restore"])


def test_what_pauses_agent_and_supervisor_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    held, lifeline = socket.socketpair()
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    beats = supervisor._Beats(held)
    with held, lifeline:
        now_s += 3600  # not serving yet
        assert beats.left_s() == float("inf")
        lifeline.send(b".")
        assert beats.left_s() == supervisor.SILENCE_S
        now_s += 3600  # the node was suspended
        assert beats.left_s() >= supervisor.SILENCE_S - 1
        for beat in 10 * [b"."] + 20 * [b""]:
            now_s += 0.5
            lifeline.send(beat)
            left_s = beats.left_s()
        assert left_s == supervisor.SILENCE_S - 10


def test_gpus_are_restored_though_nobody_reads_standard_error(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    supervised = Supervised(tmp_path, "fail", supervisor=[sys.executable, "-c", HASTY], stderr=writing)
    assert supervised.end() == (3, ["fail", "fail --restore"])
    os.close(reading)
    os.close(writing)


def test_systemd_hears_that_the_supervisor_runs(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "30000000"}
        supervised = Supervised(tmp_path, "serve", env={**os.environ, **environment})
        supervised.agent_pid()
        assert [systemd.recv(64) for _ in range(3)] == 3 * [b"WATCHDOG=1"]
        supervised.process.terminate()
        assert supervised.end() == (0, ["serve"])


@pytest.mark.parametrize("flags", [(), ("--observe",)])
def test_every_agent_has_a_supervisor_which_restores_nothing_after_an_observer(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """systemd kills a service that does not say that it runs, and only the supervisor does."""
    executed: list[list[str]] = []

    def execv(_path: str, command: list[str]) -> NoReturn:
        executed.append(command)
        raise SystemExit

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(sys, "argv", ["perseus", "agent", *flags])
    CliRunner().invoke(app, ["agent", *flags])
    ((_, _, module, *arguments),) = executed
    assert module == supervisor.__name__
    assert (arguments[0] == supervisor.OBSERVES) == bool(flags)
