"""Part of `make torture`: a stranger attacks a running job at full strength; figures to docs/strangers.md.

python -m tests.nvml.torture_other_users CONNECTIONS PACKETS REPORT
"""

import os
import platform
import sys
import time
from pathlib import Path

from perseus.demo import nvml_stub
from tests.agent.other_users import OWNER, passable_folder
from tests.nvml.test_other_users import attack_and_check, other_users_stack

FLOOD_S = 60.0


def main(connection_count: int, packet_count: int, path: Path) -> None:
    """Attack, and write down what came of it."""
    if os.geteuid() != 0:
        sys.exit("torture_strangers: expected to run as root, to be other users")
    begun_s = time.monotonic()
    with passable_folder() as folder:
        library = nvml_stub.build(folder)
        with other_users_stack(folder, library, trainer_uid=OWNER) as stack:
            done = attack_and_check(stack, connection_count, packet_count, FLOOD_S)
    claims = "\n".join(f"| claims {what} | {reason} |" for what, reason in done["claims"].items())
    today, took_s = time.strftime("%Y-%m-%d"), time.monotonic() - begun_s
    hellos, marks = done["hello_count"] / FLOOD_S, done["mark_count"] / FLOOD_S
    opened, kept = done["connection_count"], done["held_connection_count"]
    text = f"""# What a stranger gets

`make torture` also runs a job of one user's under an agent of root's, behind the stand-in for NVML, and
attacks it as another user whom the socket lets in. It passes if nothing is had, the agent's process stays
the same, the job's rank never leaves and its trainer hears nothing of it, the log stays short, and the GPU
is at stock when the agent has ended.

| the stranger | is answered |
|---|---|
{claims}
| locks the records | {done["records"]} |
| opens {opened:,} connections at once, silently | {kept} are kept |
| sends {done["packet_count"]:,} malformed packets | {done["accepted_count"]} are accepted |
| says hello on all its connections, for {FLOOD_S:.0f} s | {hellos:.1f} a second are looked into |
| marks on an idle GPU as fast as it can, for {FLOOD_S:.0f} s | {marks:,.0f} a second are read |

Last run: {today}, {took_s:.0f} s, {os.cpu_count()} cores, Python {platform.python_version()}.
"""
    path.write_text(text)
    print(text)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
