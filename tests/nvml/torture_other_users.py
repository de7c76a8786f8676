"""Part of `make torture`: another user attacks a running job; writes benchmarks/results/other-users.md.

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
    """Run the attack and write the report."""
    if os.geteuid() != 0:
        sys.exit("torture_other_users: expected to run as root, to be other users")
    begun_s = time.monotonic()
    with passable_folder() as folder:
        library = nvml_stub.build(folder)
        with other_users_stack(folder, library, trainer_uid=OWNER) as stack:
            done = attack_and_check(stack, connection_count, packet_count, FLOOD_S)
    claims = "\n".join(f"| claims {what} | {reason} |" for what, reason in done["claims"].items())
    today, took_s = time.strftime("%Y-%m-%d"), time.monotonic() - begun_s
    hellos, marks = done["hello_count"] / FLOOD_S, done["mark_count"] / FLOOD_S
    opened, kept = done["connection_count"], done["held_connection_count"]
    text = f"""# Attacks by another user of the node

`make torture` also runs one user's job under root's agent, behind the stand-in for NVML, and attacks it as
another user who may connect to the socket. It passes if no attack succeeds, the agent does not restart, the
job's rank stays and its trainer gets no message about the attack, the log stays short, and the GPU is at
stock after the agent ends.

| attack | result |
|---|---|
{claims}
| locks the restore records | {done["records"]} |
| opens {opened:,} connections at once and sends nothing | {kept} are kept |
| sends {done["packet_count"]:,} malformed packets | {done["accepted_count"]} are accepted |
| sends Hello on all its connections, for {FLOOD_S:.0f} s | {hellos:.1f} a second are examined |
| sends marks for an idle GPU as fast as it can, for {FLOOD_S:.0f} s | {marks:,.0f} a second are read |

Last run: {today}, {took_s:.0f} s, {os.cpu_count()} cores, Python {platform.python_version()}.
"""
    path.write_text(text)
    print(text)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
