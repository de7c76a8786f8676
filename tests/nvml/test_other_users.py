"""Attacks as another user of the node, on a real socket: none succeeds or disturbs the owner's training."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from perseus.demo import nvml_stub
from perseus.demo.processes import entries
from perseus.emulation.gpu import EmulatedGpu
from tests.agent.other_users import NOBODY, OWNER, needs_root, passable_folder, start_as
from tests.nvml.stack import MODEL, UUID, Stack
from tests.processes import agent_pid

pytestmark = [pytest.mark.slow("real processes of several users train, and are attacked"), needs_root]

CLOSED_UUID, OPEN_UUID = "GPU-closed", "GPU-open"


@pytest.fixture
def stack(stub_library: Path) -> Iterator[Stack]:
    """A stack with a user's job; all users may open its GPU and an idle one, but not the third."""
    with passable_folder() as folder, Stack(folder / "node", stub_library, trainer_uid=OWNER) as stack:
        for name, uuid, mode in (("gpu-closed", CLOSED_UUID, 0o600), ("gpu-open", OPEN_UUID, 0o666)):
            EmulatedGpu.create(stack.gpu_folder / name, MODEL, uuid).close()
            (stack.gpu_folder / name).chmod(mode)
        nvml_stub.environment(stub_library, stack.gpu_folder)  # creates their device nodes
        yield stack


@pytest.mark.nightly("tests/agent has limits, claims and packets one by one")
def test_another_user_gets_nothing_and_disturbs_nobody(stack: Stack) -> None:
    stack.start_coordinator()
    stack.start_agent("--socket-mode=0666")
    stack.start()
    stack.until(stack.is_locked, "a locked clock")
    before = agent_pid(stack.agent)
    arguments = [str(stack.socket), UUID, CLOSED_UUID, OPEN_UUID, stack.job_id, str(stack.restore_folder)]
    with start_as(NOBODY, "tests.nvml.other_users", "attack", arguments) as process:
        message, _ = process.communicate()
    assert json.loads(message) == {
        "the GPU that is trained on": "GPU_OF_ANOTHER_USER",
        "a GPU whose device is closed": "GPU_NOT_OPENABLE",
        "the owner's rank": "JOB_OF_ANOTHER_USER",
        "another rank of the owner's job": "JOB_OF_ANOTHER_USER",
        "a rank without Hello": "MALFORMED_PACKET",
        "the restore records": "refused",
        "marks without a pause on its own GPU": "accepted",
        "malformed packets": "refused",
    }
    assert agent_pid(stack.agent) == before
    log = entries(stack.agent.log)
    events = [line["event"] for line in log]
    left = [str(line["rank"]) for line in log if line["event"] == "rank left"]
    assert not any(rank.startswith(stack.job_id) for rank in left)
    assert "connection failed" not in events
    assert len(events) < 200, "the log is not filled"
    assert stack.trainer.is_running
    assert "stock" not in stack.trainer.log.read_text()
    if not any("→ stock" in event for event in stack.events()):  # on a busy host it may not be measurable
        stack.until(stack.is_locked, "the owner's clocks, still set")
    assert stack.agent.terminate() == 0
    assert stack.is_at_stock()


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


def test_by_default_another_user_does_not_even_connect(stack: Stack) -> None:
    stack.start_coordinator()
    stack.start_agent()
    with start_as(NOBODY, "tests.nvml.other_users", "try_to_connect", [str(stack.socket)]) as process:
        assert process.communicate()[0] == "refused\n"
