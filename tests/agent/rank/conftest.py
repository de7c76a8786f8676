"""What the tests of a session share."""

import pytest

from tests.agent.rank.bench import Bench


@pytest.fixture
def bench() -> Bench:
    """One whose rank is accepted."""
    return Bench().accepted()
