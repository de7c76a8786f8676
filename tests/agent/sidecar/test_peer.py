"""Who has connected, as the kernel says; a trainer with another monotonic clock is refused at its hello."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perseus.agent.sidecar.peer import (
    CLOCK_MISMATCH,
    Peer,
    UnknownPeerError,
    _opened_by_number,
    check_clock,
    identify,
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
        assert (await trainer_output(tmp_path, [])).endswith("connected\n")


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
