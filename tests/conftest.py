"""What holds for every test."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

# How long an example takes is the machine's, and depends on what else runs on it: no test fails for that.
settings.register_profile("perseus", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("perseus")


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command that runs inside a test sends the logs to an output that is gone after it."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(scope="session", autouse=True)
def _operator_token_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No coordinator of a test writes a token into the user's own folder."""
    path: Path = tmp_path_factory.mktemp("tokens") / "operator.token"
    os.environ["PERSEUS_COORDINATOR_OPERATOR_TOKEN_FILE"] = str(path)
