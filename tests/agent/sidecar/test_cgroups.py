from pathlib import Path, PurePosixPath

import pytest

from perseus.agent.sidecar.peer import cgroups_to_enter, parse_memberships, parse_mounts

V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID = """31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
36 31 0:33 / /sys/fs/cgroup/devices rw,relatime shared:15 - cgroup cgroup rw,devices
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
OF_THE_NODE = "31 23 0:28 /../../.. /host/cgroup rw - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("mountinfo", "own", "other", "expected"),
    [
        (V2, "0::/system.slice/perseus.service", "0::/user.slice/u", ["/sys/fs/cgroup/user.slice/u"]),
        (V2, "0::/a", "0::/a", []),
        (V2, "0::/", "0::/../kubepods/pod1", None),
        (OF_THE_NODE, "0::/", "0::/../../../kubepods/pod1", ["/host/cgroup/kubepods/pod1"]),
        (
            HYBRID,
            "5:devices:/\n4:memory:/m\n0::/",
            "5:devices:/j\n4:memory:/n\n0::/",
            ["/sys/fs/cgroup/devices/j"],
        ),
        (
            HYBRID,
            "5:devices:/\n0::/",
            "5:devices:/slurm/job_1\n0::/slurm/job_1",
            ["/sys/fs/cgroup/devices/slurm/job_1", "/sys/fs/cgroup/unified/slurm/job_1"],
        ),
        ("", "0::/", "0::/a", None),
        (V2, "0::/", "0::/odd name:with/colons", ["/sys/fs/cgroup/odd name:with/colons"]),
    ],
)
def test_cgroups_to_enter(mountinfo: str, own: str, other: str, expected: list[str] | None) -> None:
    found = cgroups_to_enter(parse_mounts(mountinfo), parse_memberships(own), parse_memberships(other))
    assert (found if found is None else [*map(str, found)]) == expected


def test_malformed_mounts_are_skipped() -> None:
    assert parse_mounts("nonsense\n1 2 3\n - - -\n") == []
    assert parse_memberships("3:cpu,devices:/x") == {False: PurePosixPath("/x")}
    assert parse_mounts(V2)[0].folder == Path("/sys/fs/cgroup")
