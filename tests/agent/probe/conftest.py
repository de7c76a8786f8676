"""Shared fixtures of the tests of probes and attachments."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from perseus.agent.link.packets import Reply
from tests.agent.marks_stub import MarksStub
from tests.agent.probe.agent_stub import AgentStub


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentStub]:
    stub = AgentStub(tmp_path / "agent.sock", [Reply(True)])
    yield stub
    stub.close()


@pytest.fixture
def marks() -> MarksStub:
    return MarksStub()
