"""After any process's death the GPU returns to stock without a record. `make torture` kills more."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from perseus.demo.nvml_stub import Locks
from tests.nvml.stack import KILLS, Stack, try_kills

pytestmark = [pytest.mark.slow("real processes train, and are killed"), pytest.mark.timeout(600)]

AT_A_TIME = 3


@pytest.fixture
def stack(tmp_path: Path, stub_library: Path) -> Iterator[Stack]:
    with Stack(tmp_path / "node", stub_library) as stack:
        yield stack


def kill_agent_and_supervisor(stack: Stack) -> None:
    stack.agent.signal(signal.SIGSTOP)  # so that the supervisor neither restores nor notices
    stack.signal_agent(signal.SIGKILL)
    stack.agent.kill()


def test_the_gpu_is_at_stock_after_every_kill(tmp_path: Path, stub_library: Path) -> None:
    outcomes = try_kills(tmp_path, stub_library, list(KILLS), 1, 0, AT_A_TIME)
    assert {name: len(each) for name, each in outcomes.items()} == dict.fromkeys(KILLS, 1)
    assert any(outcome.was_locked for each in outcomes.values() for outcome in each)


def test_after_agent_and_supervisor_are_killed_the_next_agent_restores_and_continues(stack: Stack) -> None:
    stack.start()
    stack.until(stack.is_locked, "a locked clock")
    kill_agent_and_supervisor(stack)
    time.sleep(0.5)
    assert stack.has_record()
    assert stack.is_locked(), "no process is left"
    stack.start_agent()
    stack.until(stack.is_at_stock, "stock")
    stack.until(stack.is_locked, "a clock for the trainer, which has joined again")


def test_restoring_by_hand_to_the_operators_range(stack: Stack) -> None:
    stack.start_coordinator()
    stack.start_agent("--restore-clocks=800,1200")
    stack.start()
    stack.until(stack.is_locked, "a locked clock")
    kill_agent_and_supervisor(stack)
    assert stack.restore() == (0, "GPU GPU-0: restored\n")
    assert Locks.read(stack.gpu_file) == Locks((800, 1200), (0, 0)), (
        "the range of the record, not of the flags"
    )
    assert not stack.has_record()
    assert stack.restore() == (0, "")


def test_an_agent_whose_supervisor_is_killed_restores_and_ends(stack: Stack) -> None:
    stack.start()
    stack.until(stack.is_locked, "a locked clock")
    stack.agent.kill()
    stack.until(stack.is_at_stock, "stock")
    assert stack.trainer.is_running, "training continues"


def test_an_agent_that_blocks_on_its_log_lets_go_of_the_clock(stack: Stack) -> None:
    reading, output = os.pipe()
    stack.start_coordinator()
    stack.start_agent(output=output)
    stack.start()
    stack.until(stack.is_locked, "a locked clock")
    filling = os.open(f"/proc/self/fd/{output}", os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while os.write(filling, bytes(select.PIPE_BUF)):
            pass
    stack.coordinator.kill()  # which the agent logs
    stack.until(stack.is_at_stock, "stock")
    assert stack.agent.wait() == 128 + signal.SIGKILL, "the supervisor saw no beats"
    for descriptor in (reading, filling, output):
        os.close(descriptor)
