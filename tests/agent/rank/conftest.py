"""Shared fixtures of the tests of a session."""

import pytest

from tests.agent.rank.bench import Bench


@pytest.fixture
def bench() -> Bench:
    """A bench whose rank is accepted."""
    return Bench().accepted()
