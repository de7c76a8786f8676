"""Who has connected, as the kernel says; a trainer with another monotonic clock is refused at its hello."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath

import pytest

from perseus.agent.sidecar.peer import (
    CLOCK_MISMATCH,
    Peer,
    UnknownPeerError,
    _opened_by_number,
    cgroups_to_enter,
    check_clock,
    identify,
    parse_memberships,
    parse_mounts,
    user_of,
)
from perseus.agent.sidecar.shell import serving
from tests.agent.sidecar.training import UUID, settings

SECOND_NS = 10**9
UNSEEN = Peer(0, 0, (), 0, None)
TRAINER = """
import logging, sys
from perseus.agent import Probe
logging.basicConfig(stream=sys.stdout, format="%(message)s")
probe = Probe.connect(sys.argv[1], job_id="job", pipeline=0, stage=0, gpu_uuid=sys.argv[2])
print("connected" if probe.is_connected else "refused", flush=True)
"""


def test_the_kernel_identifies_the_peer() -> None:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer = identify(a)
    assert (peer.uid, peer.gid, peer.pid) == (os.getuid(), os.getgid(), os.getpid())
    assert set(peer.groups) == set(os.getgroups())
    assert peer.pidfd is not None
    assert not peer.has_ended
    for each in (a, b, peer):
        each.close()


def test_a_process_known_by_number_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    os.close(_opened_by_number(os.getpid(), os.getuid()))
    with pytest.raises(UnknownPeerError, match="has ended"):
        _opened_by_number(os.getpid(), os.getuid() + 1)
    with pytest.raises(UnknownPeerError, match="has ended"):
        _opened_by_number(2**22 + 1, os.getuid())
    monkeypatch.setattr("time.clock_gettime", lambda _: 0.0)
    with pytest.raises(UnknownPeerError, match="has ended"):
        _opened_by_number(os.getpid(), os.getuid())  # it began after we looked, so it is another process


def test_a_user_without_a_name_is_known_by_number() -> None:
    assert user_of(4_000_001).name == "4000001"
    assert user_of(0).name == "root"


# --- Its clock ----------------------------------------------------------------------------------------------


def in_time_namespace(offset_s: int, command: list[str]) -> list[str]:
    return ["unshare", "--time", "--monotonic", str(offset_s), "--fork", *command]


@pytest.fixture
def needs_time_namespaces() -> None:
    try:
        subprocess.run(in_time_namespace(1, ["true"]), check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no time namespaces here: {error}")


async def trainer_output(tmp_path: Path, prefix: list[str]) -> str:
    trainer = await asyncio.create_subprocess_exec(
        *[*prefix, sys.executable, "-c", TRAINER, str(tmp_path / "run" / "agent.sock"), UUID],
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await trainer.communicate()
    return output.decode()


@pytest.mark.usefixtures("needs_time_namespaces", "gpu")
async def test_a_trainer_in_another_time_namespace_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Its clock is 5 s behind, which could also be a slow hello."""
    async with serving(settings(tmp_path, 1)):
        text = await trainer_output(tmp_path, in_time_namespace(-5, []))
        assert text.endswith("refused\n")
        assert "found one that is 5 s behind it" in text
        assert "must be in one time namespace" in text
        assert (await trainer_output(tmp_path, in_time_namespace(0, []))).endswith("connected\n")


@pytest.mark.parametrize(
    ("hello_ago_s", "expected"),
    [
        (0.0, ""),
        (0.5, ""),
        (29.0, ""),
        (31.0, "behind"),
        (-0.001, "ahead of"),
        pytest.param(1000.0, "", id="an older probe without a time"),
    ],
)
def test_the_hello_shows_the_clock_of_an_invisible_process(hello_ago_s: float, expected: str) -> None:
    now_ns = 1000 * SECOND_NS
    refused = check_clock(UNSEEN, now_ns - int(hello_ago_s * SECOND_NS), now_ns)
    assert (refused is not None) == bool(expected)
    assert refused is None or (refused.reason == CLOCK_MISMATCH and expected in refused.message)


def test_the_kernels_offset_takes_precedence() -> None:
    """The clock is the same, however long the hello has waited."""
    ours = Peer(os.geteuid(), os.getegid(), (), os.getpid(), None)
    assert check_clock(ours, 1, time.monotonic_ns()) is None


# --- Its cgroups --------------------------------------------------------------------------------------------

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
