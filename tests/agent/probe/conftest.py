"""Shared fixtures of the tests of probes and attachments."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from perseus.agent.link.packets import Reply
from perseus.agent.probe.client import Probe
from tests.agent.marks_stub import MarksStub
from tests.agent.probe.agent_stub import AgentStub, connect


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentStub]:
    stub = AgentStub(tmp_path / "agent.sock", [Reply(True)])
    yield stub
    stub.close()


@pytest.fixture
def probe(agent: AgentStub) -> Iterator[Probe]:
    """Return a probe whose hello the agent has answered."""
    with closing(connect(agent.path)) as probe:
        agent.answered()
        yield probe


@pytest.fixture
def marks() -> MarksStub:
    return MarksStub()
