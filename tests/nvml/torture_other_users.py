"""Part of `make torture`: another user attacks a running job; writes benchmarks/results/other-users.md.

python -m tests.nvml.torture_other_users CONNECTIONS PACKETS REPORT
"""

import os
import sys
import time
from pathlib import Path

from perseus.demo import nvml_stub
from tests.agent.other_users import OWNER, passable_folder
from tests.nvml.test_other_users import attack_and_check, other_users_stack
from tests.torture.report import last_run, publish

FLOOD_S = 60.0


def main(connection_count: int, packet_count: int, page: Path) -> None:
    """Run the attack and write the report."""
    if os.geteuid() != 0:
        sys.exit("torture_other_users: expected to run as root, to be other users")
    begun_s = time.monotonic()
    with passable_folder() as folder:
        library = nvml_stub.build(folder)
        with other_users_stack(folder, library, trainer_uid=OWNER) as stack:
            done = attack_and_check(stack, connection_count, packet_count, FLOOD_S)
    hellos, marks = done["hello_count"] / FLOOD_S, done["mark_count"] / FLOOD_S
    rows = [
        *((f"claims {what}", reason) for what, reason in done["claims"].items()),
        ("locks the restore records", done["records"]),
        (
            f"opens {done['connection_count']:,} connections at once and sends nothing",
            f"{done['held_connection_count']} are kept",
        ),
        (f"sends {done['packet_count']:,} malformed packets", f"{done['accepted_count']} are accepted"),
        (f"sends Hello on all its connections, for {FLOOD_S:.0f} s", f"{hellos:.1f} a second are examined"),
        (
            f"sends marks for an idle GPU as fast as it can, for {FLOOD_S:.0f} s",
            f"{marks:,.0f} a second are read",
        ),
    ]
    heading = "# Attacks by another user of the node"
    publish(page, heading, ("attack", "result"), rows, last_run(time.monotonic() - begun_s))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
