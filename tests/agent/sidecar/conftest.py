"""Fixtures for the tests of a running agent: its GPU, coordinators, and all of them as a node."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM
from tests.agent.coordinator_stub import CoordinatorStub, Inbox
from tests.agent.sidecar.training import ORDER, UUID, Node, Start, Trainer


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[EmulatedGpu]:
    (tmp_path / "gpus").mkdir()
    gpu = EmulatedGpu.create(tmp_path / "gpus" / "0", A100_SXM, UUID)
    yield gpu
    Trainer.stop_all()
    gpu.close()


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts coordinators, and stops those that still run at the test's end."""
    coordinators: list[CoordinatorStub] = []

    async def start(inbox: Inbox, port: int = 0) -> CoordinatorStub:
        coordinator = CoordinatorStub(inbox, ORDER)  # type: ignore[abstract] # it serves RegisterJob only
        coordinators.append(coordinator)
        await coordinator.start(port)
        return coordinator

    yield start
    for coordinator in coordinators:
        await coordinator.stop()


@pytest.fixture
async def node(tmp_path: Path, gpu: EmulatedGpu, start: Start) -> Node:
    """A node whose coordinator serves; its agent does not yet."""
    return Node(tmp_path, gpu, await start(Inbox()), start)
