"""What all tests have: no coordinator of theirs writes a token into the user's own folder."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _operator_token_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    path: Path = tmp_path_factory.mktemp("tokens") / "operator.token"
    os.environ["PERSEUS_COORDINATOR_OPERATOR_TOKEN_FILE"] = str(path)
