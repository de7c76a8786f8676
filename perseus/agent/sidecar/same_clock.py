"""Whether a peer's CLOCK_MONOTONIC is the agent's: by it alone marks and clocks can be brought together.

In a time namespace (`unshare --time`, a container that was checkpointed and restored) it runs apart by an
offset. The kernel tells the offset of a process that can be seen. Of one that can't, the time in its hello
tells: one from the future is another clock's, and so is one from long ago, unless the agent stood still, and
then the probe will try again.
"""

import os
from pathlib import Path

from perseus.agent.claims.decision import Refused
from perseus.agent.sidecar.peer import Peer

ANOTHER_CLOCK = "ANOTHER_CLOCK"

_OLDEST_HELLO_NS = 30 * 10**9


def check_clock(peer: Peer, hello_time_ns: int, now_ns: int) -> Refused | None:
    """Refuse a peer on another clock. `hello_time_ns`: what its clock said in its hello, 0 if it did not."""
    ahead_s = _seen_ahead_s(peer)
    if ahead_s is None and hello_time_ns and not 0 <= now_ns - hello_time_ns <= _OLDEST_HELLO_NS:
        ahead_s = (hello_time_ns - now_ns) / 1e9
    if not ahead_s:
        return None
    return Refused(
        ANOTHER_CLOCK,
        f"expected the agent's CLOCK_MONOTONIC, found one that is {abs(ahead_s):g} s "
        f"{'ahead of' if ahead_s > 0 else 'behind'} it: trainer and agent must be in one time namespace",
    )


def _seen_ahead_s(peer: Peer) -> float | None:
    """By how much a peer's clock is ahead of ours; None if that can't be seen."""
    if peer.pid == 0:
        return None
    try:
        if os.stat(f"/proc/{peer.pid}/ns/time").st_ino == os.stat("/proc/self/ns/time").st_ino:
            ahead_s = 0.0
        else:
            ahead_s = _offset_s(str(peer.pid)) - _offset_s("self")
    except (OSError, ValueError):  # not ours to see, or a kernel without time namespaces
        return None
    return None if peer.has_ended else ahead_s


def _offset_s(pid: str) -> float:
    """From lines of `CLOCK SECONDS NANOSECONDS`."""
    for line in Path(f"/proc/{pid}/timens_offsets").read_text().splitlines():
        clock, seconds, nanoseconds = line.split()
        if clock == "monotonic":
            return int(seconds) + int(nanoseconds) / 1e9
    raise ValueError("expected a line for the clock monotonic")
