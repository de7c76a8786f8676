"""The agent's parent: restores the GPUs when the agent dies, or hangs, before it has done so itself.

`python -m perseus.agent.restore.supervisor COMMAND …` runs the agent, forwards termination signals to it, and
waits. If the agent ends with an error or by a signal (SIGKILL, the OOM killer, a crash), the supervisor runs
the same command with `--restore`, up to a number of times, until that succeeds. Then it ends with the agent's
status. An agent that has begun to send beats and sends none for `SILENCE_S` is killed first.

It is small, touches neither GPU nor network and imports the standard library only, so that a cause that kills
the agent is unlikely to kill it, too: the OOM killer takes bigger processes first, and root's supervisor is
exempt. The remaining cases:

    dies                            restored by
    ------------------------------- --------------------------------------------------------------------------
    agent                           the supervisor
    agent hangs or is stopped       its own thread that sets clocks, if that still runs; then the supervisor
    supervisor                      the agent: it stops at the lifeline's end as on SIGTERM
    supervisor hangs or is stopped  systemd (ExecStopPost), which kills both (WatchdogSec)
    agent and supervisor            systemd (ExecStopPost), the next agent to start, or --restore by hand
    agent, and the --restore run    the supervisor, which retries
    the node                        its boot (a lock ends with the driver); the next agent removes the record
    the GPU, or its driver hangs    nobody; the record stays, every attempt times out and is repeated, also by
                                    the next agent; other GPUs are restored meanwhile
"""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

LIFELINE = "PERSEUS_LIFELINE"
"""Environment variable with the file descriptor whose other end the supervisor holds; it takes beats."""

OBSERVES = "--observes"
"""First argument for an agent that sets no clocks: nothing is restored."""

SILENCE_S = 10.0
"""Time without a beat after which the agent counts as hung; its clock workers let go of clocks sooner."""

STOP_S = 16.0
"""Time limit from the first signal to the end, whatever hangs; service managers wait longer.

The agent has most of it. Records of GPUs not restored stay for the next agent or systemd's ExecStopPost.
"""

_AGENT_STOP_S = 12.0  # for an agent's own shutdown, even if a GPU hangs

_OOM_EXEMPT = "-1000"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_ATTEMPTS = 20
_ATTEMPT_TIMEOUT_S = 15.0  # longer than the timeout for a hanging GPU, so that the output names it
_PAUSE_S = 0.5
_POLL_INTERVAL_S = 0.05


def main(command: list[str], *, restores: bool = True) -> int:
    """Run the agent, restore its GPUs if it fails (an observer has none), and return the exit status."""
    usual_oom_score = _set_oom_score(_OOM_EXEMPT)
    stop = _Stop()
    held, lifeline = socket.socketpair()
    beats = _Beats(held)
    # In a new session, so that the terminal's Ctrl-C reaches the agent only once, from here.
    agent = subprocess.Popen(
        command,
        env={**os.environ, LIFELINE: str(lifeline.fileno())},
        pass_fds=[lifeline.fileno()],
        start_new_session=True,
        preexec_fn=lambda: _set_oom_score(usual_oom_score),
    )
    lifeline.close()
    stop.forward_to(agent)
    status = _wait(agent, lambda: min(stop.left_s(_AGENT_STOP_S), beats.left_s()))
    killed = ""
    if status is None:
        agent.kill()
        did_not_end = f"did not end within {_AGENT_STOP_S:g} s"
        killed = did_not_end if beats.left_s() > 0 else f"has hung for {SILENCE_S:g} s"
        end_s = time.monotonic() + _PAUSE_S
        status = _wait(agent, lambda: end_s - time.monotonic())  # no signal ends a hanging driver call
    is_restored = status == 0 or not restores or _restore([*command, "--restore"], agent, stop)
    if killed:  # said last: whoever reads standard error may be why it hung
        _say(f"perseus: the agent {killed} and was killed\n")
    if not is_restored:
        _say("perseus: GPUs not restored: see above, then try perseus agent --restore\n")
    held.close()
    if status is None:
        return 128 + signal.SIGKILL
    return status if status >= 0 else 128 - status


class _Stop:
    """The time of the first termination signal, and the deadlines that follow."""

    def __init__(self) -> None:
        self._asked_s: float | None = None
        self._agent: subprocess.Popen[bytes] | None = None
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._asked_s is None:
            self._asked_s = time.monotonic()
        if self._agent is not None:
            self._agent.send_signal(signal.SIGTERM)

    def forward_to(self, agent: "subprocess.Popen[bytes]") -> None:
        """Forward every termination signal to an agent, including earlier ones."""
        self._agent = agent
        if self._asked_s is not None:
            agent.send_signal(signal.SIGTERM)

    def left_s(self, timeout_s: float) -> float:
        """Return the remaining time after the first signal; infinite before it."""
        return math.inf if self._asked_s is None else self._asked_s + timeout_s - time.monotonic()


class _Beats:
    """The agent's signs of life, which it sends as long as its event loop runs."""

    def __init__(self, held: socket.socket) -> None:
        held.setblocking(False)
        self._held = held
        self._asked_s = 0.0
        self._silent_s = -math.inf

    def left_s(self) -> float:
        """Return the time until the agent counts as hung; infinite before its first beat."""
        asked_s, self._asked_s = self._asked_s, time.monotonic()
        # What pauses a node or a container pauses both processes, and is no silence of the agent.
        self._silent_s += min(self._asked_s - asked_s, 2 * _PAUSE_S)
        with contextlib.suppress(OSError):
            if self._held.recv(4096):
                self._silent_s = 0.0
        return SILENCE_S - self._silent_s


def _wait(process: "subprocess.Popen[bytes]", left_s: Callable[[], float]) -> int | None:
    """Wait for a process and return its status, or None once no time is left; a signal may shorten it."""
    begun_s = time.monotonic()
    while (status := process.poll()) is None:
        _pet_watchdog()
        if left_s() <= 0:
            return None
        # A signal's handler runs at once, but the wait continues; its change takes effect after this.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_INTERVAL_S if time.monotonic() < begun_s + 1 else _PAUSE_S)
    return status


def _restore(command: list[str], agent: "subprocess.Popen[bytes]", stop: _Stop) -> bool:
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_S)
        if stop.left_s(STOP_S) <= 0:
            break
        has_ended = agent.poll() is not None  # one that a driver's call keeps alive still holds its records
        if _restore_once(command, stop) and has_ended:
            return True
    return False


def _restore_once(command: list[str], stop: _Stop) -> bool:
    end_s = time.monotonic() + _ATTEMPT_TIMEOUT_S
    with open(os.memfd_create("output"), "w+b") as output:
        try:
            restoring = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        except OSError as error:
            _say(f"perseus: restoring: {error}\n")
            return False
        status = _wait(restoring, lambda: min(end_s - time.monotonic(), stop.left_s(STOP_S)))
        output.seek(0)
        _say(output.read().decode(errors="replace"))
    if status is None:
        restoring.kill()  # do not wait: no signal ends a hanging driver call
        _say("perseus: restoring timed out\n")
    return status == 0


def _say(text: str) -> None:
    """Write to standard error as far as somebody reads it: nothing that restores may wait for that."""

    def write() -> None:
        data = text.encode()
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(2, data) :]

    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    writing.join(_PAUSE_S)


def _pet_watchdog() -> None:
    """Tell systemd that this process runs, if its unit has WatchdogSec (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address is not None and "WATCHDOG_USEC" in os.environ:
        kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as notify:
            notify.sendto(b"WATCHDOG=1", "\0" + address[1:] if address.startswith("@") else address)


def _set_oom_score(score: str) -> str:
    """Set this process's OOM score adjustment and return the previous one. Only root may lower it."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:
        before = file.read()
        file.write(score)
        return before
    return "0"


if __name__ == "__main__":
    if sys.argv[1] == OBSERVES:
        sys.exit(main(sys.argv[2:], restores=False))
    sys.exit(main(sys.argv[1:]))
