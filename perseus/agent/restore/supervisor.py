"""The agent's parent: restores the GPUs when the agent dies before it has done so itself.

`python -m perseus.agent.restore.supervisor COMMAND …` runs the agent, forwards termination signals to it, and
waits. If the agent ends with an error or by a signal (SIGKILL, the OOM killer, a crash), the supervisor runs
the same command with `--restore`, up to a number of times, until that succeeds. Then it ends with the agent's
status.

It is small, touches neither GPU nor network and imports the standard library only, so that a cause that kills
the agent is unlikely to kill it, too: the OOM killer takes bigger processes first, and root's supervisor is
exempt. The remaining cases:

    dies                            restored by
    ------------------------------- --------------------------------------------------------------------------
    agent                           the supervisor
    supervisor                      the agent: it stops at the lifeline's end as on SIGTERM
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
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType

LIFELINE = "PERSEUS_LIFELINE"
"""Environment variable with the file descriptor whose other end the supervisor holds."""

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


def main(command: list[str]) -> int:
    """Run the agent and restore its GPUs if it fails; return the exit status."""
    usual_oom_score = _set_oom_score(_OOM_EXEMPT)
    stop = _Stop()
    lifeline, held = os.pipe()
    # In a new session, so that the terminal's Ctrl-C reaches the agent only once, from here.
    agent = subprocess.Popen(
        command,
        env={**os.environ, LIFELINE: str(lifeline)},
        pass_fds=[lifeline],
        start_new_session=True,
        preexec_fn=lambda: _set_oom_score(usual_oom_score),
    )
    os.close(lifeline)
    stop.forward_to(agent)
    status = _wait(agent, lambda: stop.left_s(_AGENT_STOP_S))
    if status is None:
        agent.kill()
        print(f"perseus: the agent did not end within {_AGENT_STOP_S:g} s and was killed", file=sys.stderr)
        end_s = time.monotonic() + _PAUSE_S
        status = _wait(agent, lambda: end_s - time.monotonic())  # no signal ends a hanging driver call
    if status != 0 and not _restore([*command, "--restore"], stop):
        print("perseus: GPUs not restored: see above, then try perseus agent --restore", file=sys.stderr)
    os.close(held)
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


def _wait(process: "subprocess.Popen[bytes]", left_s: Callable[[], float]) -> int | None:
    """Wait for a process and return its status, or None once no time is left; a signal may shorten it."""
    begun_s = time.monotonic()
    while (status := process.poll()) is None:
        if left_s() <= 0:
            return None
        # A signal's handler runs at once, but the wait continues; its change takes effect after this.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_INTERVAL_S if time.monotonic() < begun_s + 1 else _PAUSE_S)
    return status


def _restore(command: list[str], stop: _Stop) -> bool:
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_S)
        if stop.left_s(STOP_S) <= 0:
            break
        if _restore_once(command, stop):
            return True
    return False


def _restore_once(command: list[str], stop: _Stop) -> bool:
    end_s = time.monotonic() + _ATTEMPT_TIMEOUT_S
    try:
        restoring = subprocess.Popen(command, start_new_session=True)
    except OSError as error:
        print(f"perseus: restoring: {error}", file=sys.stderr)
        return False
    status = _wait(restoring, lambda: min(end_s - time.monotonic(), stop.left_s(STOP_S)))
    if status is None:
        restoring.kill()  # do not wait: no signal ends a hanging driver call
        print("perseus: restoring timed out", file=sys.stderr)
    return status == 0


def _set_oom_score(score: str) -> str:
    """Set this process's OOM score adjustment and return the previous one. Only root may lower it."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:
        before = file.read()
        file.write(score)
        return before
    return "0"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
