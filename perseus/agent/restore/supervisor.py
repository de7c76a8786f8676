"""The agent's parent: brings the GPUs back when the agent dies without having done so itself.

`python -m perseus.agent.restore.supervisor COMMAND …` runs the agent, hands it every signal that asks to
end, and waits. If the agent ends with an error or by a signal (SIGKILL, the OOM killer, a crash), it runs the
same command with `--restore` until that succeeds or has been tried often enough, and ends as the agent did.

It is small, touches neither GPU nor network and imports the standard library only, so that what kills the
agent is unlikely to hit it: the OOM killer takes bigger processes first, and root's is exempt. What can
still happen, and who brings the GPUs back then:

    dies                            restored by
    ------------------------------- --------------------------------------------------------------------------
    agent                           the supervisor
    supervisor                      the agent: the lifeline's end tells it to stop as on SIGTERM
    agent and supervisor            systemd (ExecStopPost), the next agent to start, or --restore by hand
    agent, and the restoring one    the supervisor, which tries again
    the node                        its boot (a lock ends with the driver); the next agent removes the record
    the GPU, or its driver hangs    nobody; the record stays, every try is cut off and repeated, and the next
                                    agent goes on trying; other GPUs are brought back meanwhile
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
"""Within so long of the first signal all is over, whatever hangs: less than a service manager waits.

The agent has most of it; records stay for what is left, and the next agent, or systemd's ExecStopPost.
"""

_AGENT_STOP_S = 12.0  # an agent's own way out, a GPU that hangs included

_OOM_EXEMPT = "-1000"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_ATTEMPTS = 20
_ATTEMPT_TIMEOUT_S = 15.0  # longer than a GPU that hangs is waited for, so that it is said which does
_PAUSE_S = 0.5
_POLL_INTERVAL_S = 0.05


def main(command: list[str]) -> int:
    """Run the agent, bring back what it leaves behind; the exit status to end with."""
    usual_oom_score = _set_oom_score(_OOM_EXEMPT)
    stop = _Stop()
    lifeline, held = os.pipe()
    # In a session of its own, so that the terminal's Ctrl-C reaches the agent once: from here.
    agent = subprocess.Popen(
        command,
        env={**os.environ, LIFELINE: str(lifeline)},
        pass_fds=[lifeline],
        start_new_session=True,
        preexec_fn=lambda: _set_oom_score(usual_oom_score),
    )
    os.close(lifeline)
    stop.hand_on_to(agent)
    status = _wait(agent, lambda: stop.left_s(_AGENT_STOP_S))
    if status is None:
        agent.kill()
        print(f"perseus: the agent did not end within {_AGENT_STOP_S:g} s, and was killed", file=sys.stderr)
        end_s = time.monotonic() + _PAUSE_S
        status = _wait(agent, lambda: end_s - time.monotonic())  # no signal reaches who hangs in the driver
    if status != 0 and not _restore([*command, "--restore"], stop):
        print("perseus: GPUs not restored: see above, and try perseus agent --restore", file=sys.stderr)
    os.close(held)
    if status is None:
        return 128 + signal.SIGKILL
    return status if status >= 0 else 128 - status


class _Stop:
    """When the end was asked for, and by when it has to be over."""

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

    def hand_on_to(self, agent: "subprocess.Popen[bytes]") -> None:
        """Let an agent know of every signal, of those as well that have come already."""
        self._agent = agent
        if self._asked_s is not None:
            agent.send_signal(signal.SIGTERM)

    def left_s(self, timeout_s: float) -> float:
        """What is left of the time after the first signal; infinite while there was none."""
        return math.inf if self._asked_s is None else self._asked_s + timeout_s - time.monotonic()


def _wait(process: "subprocess.Popen[bytes]", left_s: Callable[[], float]) -> int | None:
    """How a process has ended, or None once no time is left for it, which a signal may change."""
    begun_s = time.monotonic()
    while (status := process.poll()) is None:
        if left_s() <= 0:
            return None
        # A signal's handler runs at once, and the wait goes on; what it changed is seen after this.
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
        restoring.kill()  # and not waited for: no signal reaches who hangs in the driver
        print("perseus: restoring took too long, and was cut off", file=sys.stderr)
    return status == 0


def _set_oom_score(score: str) -> str:
    """Say how gladly the OOM killer may take this process; returns what it was. Only root may lower it."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:
        before = file.read()
        file.write(score)
        return before
    return "0"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
