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
import os
import signal
import subprocess
import sys
import time
from types import FrameType

LIFELINE = "PERSEUS_LIFELINE"
"""Environment variable with the file descriptor whose other end the supervisor holds."""

_OOM_EXEMPT = "-1000"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_ATTEMPTS = 20
_ATTEMPT_TIMEOUT_S = 15.0  # longer than a GPU that hangs is waited for, so that it is said which does
_PAUSE_S = 0.5


def main(command: list[str]) -> int:
    """Run the agent, bring back what it leaves behind; the exit status to end with."""
    usual_oom_score = _set_oom_score(_OOM_EXEMPT)
    signals: list[int] = []
    agent: subprocess.Popen[bytes] | None = None

    def forward(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        if agent is not None:
            agent.send_signal(signal.SIGTERM)

    for number in _SIGNALS:
        signal.signal(number, forward)
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
    if signals:  # one that came while there was no agent yet
        agent.send_signal(signal.SIGTERM)
    status = agent.wait()
    if status != 0 and not _restore([*command, "--restore"]):
        print("perseus: GPUs not restored: see above, and try perseus agent --restore", file=sys.stderr)
    os.close(held)
    return status if status >= 0 else 128 - status


def _restore(command: list[str]) -> bool:
    for _ in range(_ATTEMPTS):
        try:
            restoring = subprocess.Popen(command, start_new_session=True)
            try:
                if restoring.wait(_ATTEMPT_TIMEOUT_S) == 0:
                    return True
            except subprocess.TimeoutExpired as error:
                restoring.kill()  # and not waited for: no signal reaches who hangs in the driver
                print(f"perseus: restoring: {error}", file=sys.stderr)
        except OSError as error:
            print(f"perseus: restoring: {error}", file=sys.stderr)
        time.sleep(_PAUSE_S)
    return False


def _set_oom_score(score: str) -> str:
    """Say how gladly the OOM killer may take this process; returns what it was. Only root may lower it."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:
        before = file.read()
        file.write(score)
        return before
    return "0"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
