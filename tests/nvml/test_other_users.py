"""Attacks as another user of the node, on a real socket: none succeeds or disturbs the owner's training."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perseus.agent.link.packets import encode
from perseus.agent.sidecar.local import BURST_BYTES, HELLO_BYTES, MAX_CONNECTIONS_PER_USER, USER_BYTES_PER_S
from perseus.demo import nvml_stub
from perseus.demo.processes import entries
from perseus.emulation.gpu import EmulatedGpu
from tests.agent.other_users import NOBODY, OWNER, needs_root, passable_folder, start_as
from tests.nvml.other_users import marks
from tests.nvml.stack import MODEL, UUID, Stack
from tests.processes import agent_pid

pytestmark = pytest.mark.slow("real processes of several users train, and are attacked")

CONNECTION_COUNT = 300
PACKET_COUNT = 2000
FLOOD_S = 3.0
CLOSED_UUID, OPEN_UUID = "GPU-closed", "GPU-open"
_SLACK = 1.5
"""On top of the bytes read in a time: sockets buffer some, too."""


@pytest.fixture
def stack(stub_library: Path) -> Iterator[Stack]:
    with passable_folder() as folder, other_users_stack(folder, stub_library, trainer_uid=OWNER) as stack:
        yield stack


def other_users_stack(folder: Path, library: Path, *, trainer_uid: int) -> Stack:
    """A stack with a user's job; all users may open its GPU and an idle one, but not the third."""
    stack = Stack(folder / "node", library, trainer_uid=trainer_uid)
    for name, uuid, mode in (("gpu-closed", CLOSED_UUID, 0o600), ("gpu-open", OPEN_UUID, 0o666)):
        EmulatedGpu.create(stack.gpu_folder / name, MODEL, uuid).close()
        (stack.gpu_folder / name).chmod(mode)
    nvml_stub.environment(library, stack.gpu_folder)  # creates their device nodes
    return stack


@needs_root
@pytest.mark.nightly("floods; tests/agent has its limits, claims and packets one by one")
def test_another_user_gets_nothing_and_disturbs_nobody(stack: Stack) -> None:
    attack_and_check(stack, CONNECTION_COUNT, PACKET_COUNT, FLOOD_S)


def attack_and_check(
    stack: Stack, connection_count: int, packet_count: int, flood_s: float
) -> dict[str, Any]:
    """Attack a job with set clocks as another user; AssertionError if any attempt succeeds.

    Returns the `other_users.Attempts` as a dictionary.
    """
    stack.start_coordinator()
    stack.start_agent("--socket-mode=0666")
    stack.start()
    stack.until(stack.is_locked, "a locked clock")
    before = agent_pid(stack.agent)
    arguments = [str(stack.socket), UUID, CLOSED_UUID, OPEN_UUID, stack.job_id, str(stack.restore_folder)]
    counts = [str(connection_count), str(packet_count), str(flood_s)]
    with start_as(NOBODY, "tests.nvml.other_users", "attack", [*arguments, *counts]) as process:
        message, _ = process.communicate()
    done: dict[str, Any] = json.loads(message)
    assert done["claims"] == {
        "the GPU that is trained on": "GPU_OF_ANOTHER_USER",
        "a GPU whose device is closed": "GPU_NOT_OPENABLE",
        "the owner's rank": "JOB_OF_ANOTHER_USER",
        "another rank of the owner's job": "JOB_OF_ANOTHER_USER",
        "a rank without Hello": "MALFORMED_PACKET",
    }
    assert done["records"] == "refused"
    assert done["connection_count"] == connection_count
    assert done["held_connection_count"] <= MAX_CONNECTIONS_PER_USER
    assert done["packet_count"] >= packet_count
    assert done["accepted_count"] == 0
    max_bytes = BURST_BYTES + USER_BYTES_PER_S * flood_s
    assert 0 < done["hello_count"] <= _SLACK * max_bytes / HELLO_BYTES
    assert 0 < done["mark_count"] <= _SLACK * max_bytes / len(encode(marks(0)[0]))
    assert agent_pid(stack.agent) == before
    log = entries(stack.agent.log)
    events = [line["event"] for line in log]
    assert not [
        line for line in log if line["event"] == "rank left" and str(line["rank"]).startswith(stack.job_id)
    ]
    assert "connection failed" not in events
    assert len(events) < 200, "the log is not filled"
    assert stack.trainer.is_running
    assert "stock" not in stack.trainer.log.read_text()
    if not any("→ stock" in event for event in stack.events()):  # on a busy host it may not be measurable
        stack.until(stack.is_locked, "the owner's clocks, still set")
    assert stack.agent.terminate() == 0
    assert stack.is_at_stock()
    return done


@needs_root
def test_an_idle_gpu_can_not_be_withheld_from_its_owner(stack: Stack) -> None:
    stack.start_coordinator()
    stack.start_agent("--socket-mode=0666")
    with start_as(NOBODY, "tests.nvml.other_users", "squat", [str(stack.socket), UUID]) as squatter:
        assert squatter.stdout is not None
        assert squatter.stdout.readline() == "squatting\n", "nobody else is there yet"
        stack.start()
        assert squatter.stdout.readline() == "GPU_OF_ANOTHER_USER\n"
    stack.until(stack.is_locked, "the owner's clocks set")
    served = [line for line in entries(stack.agent.log) if line["event"] == "rank served"]
    assert str(served[-1]["rank"]).startswith(stack.job_id)
    assert [line["user"] for line in served] == ["nobody", str(OWNER)]


@needs_root
def test_by_default_another_user_does_not_even_connect(stack: Stack) -> None:
    stack.start_coordinator()
    stack.start_agent()
    with start_as(NOBODY, "tests.nvml.other_users", "try_to_connect", [str(stack.socket)]) as process:
        assert process.communicate()[0] == "refused\n"
