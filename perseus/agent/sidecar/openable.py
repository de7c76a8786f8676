"""Whether the kernel would let a user open a file: a separate program that becomes that user and asks.

`python -I -S openable.py FILE UID GID GROUPS CGROUP …` enters the cgroups, becomes the user and asks the
kernel with access(2), which respects permissions and the cgroup's devices and opens nothing. Exits with 0
(yes), 1 (no) or 2 (unknown, with the reason on standard error).

It is a program rather than a fork, because it becomes a user who might read its memory. Standard library
only.
"""

import os
import sys

OPENABLE, NOT_OPENABLE, CAN_NOT_TELL = range(3)


def main(path: str, uid: str, gid: str, groups: str, *cgroups: str) -> int:
    """Become the user, ask the kernel, and return the exit status."""
    try:
        for cgroup in cgroups:
            with open(os.path.join(cgroup, "cgroup.procs"), "w") as file:
                file.write("0")
        os.setgroups([int(group) for group in groups.split(",") if group])
        os.setresgid(int(gid), int(gid), int(gid))
        os.setresuid(int(uid), int(uid), int(uid))
    except OSError as error:
        print(f"can't become user {uid} in {', '.join(cgroups) or 'this cgroup'}: {error}", file=sys.stderr)
        return CAN_NOT_TELL
    return OPENABLE if os.access(path, os.R_OK | os.W_OK) else NOT_OPENABLE


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
