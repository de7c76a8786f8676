"""What holds for every test."""

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command that runs inside a test sends the logs to an output that is gone after it."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
