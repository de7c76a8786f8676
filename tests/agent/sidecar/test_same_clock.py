"""A trainer with another monotonic clock is refused at its hello."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perseus.agent.sidecar.peer import CLOCK_MISMATCH, Peer, check_clock
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
    ("hello_ago_s", "is_fine"), [(0.0, True), (0.5, True), (29.0, True), (31.0, False), (-0.001, False)]
)
def test_the_hello_shows_the_clock_of_an_invisible_process(hello_ago_s: float, is_fine: bool) -> None:
    now_ns = 1000 * SECOND_NS
    refused = check_clock(UNSEEN, now_ns - int(hello_ago_s * SECOND_NS), now_ns)
    assert (refused is None) == is_fine
    if refused is not None:
        assert refused.reason == CLOCK_MISMATCH
        assert ("ahead of" if hello_ago_s < 0 else "behind") in refused.message


def test_an_older_probe_without_a_time_is_accepted() -> None:
    assert check_clock(UNSEEN, 0, 1000 * SECOND_NS) is None


def test_the_kernels_offset_takes_precedence() -> None:
    """The clock is the same, however long the hello has waited."""
    ours = Peer(os.geteuid(), os.getegid(), (), os.getpid(), None)
    assert check_clock(ours, 1, time.monotonic_ns()) is None
