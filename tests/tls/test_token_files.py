"""Clients' tokens, read from files."""

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from perseus.tls.tokens import TokenFileError, read_token


@pytest.mark.parametrize(("mode", "warnings"), [(0o600, 0), (0o640, 0), (0o644, 1)])
def test_a_token_readable_by_all_is_used_with_a_warning(tmp_path: Path, mode: int, warnings: int) -> None:
    path = tmp_path / "token"
    path.write_text("secret\n")
    path.chmod(mode)
    with capture_logs() as logs:
        assert read_token(path) == "secret"
    assert [line["event"] for line in logs] == warnings * ["every user of this machine can read a token"]


def test_a_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token")
    with pytest.raises(TokenFileError, match="token: can't be read: expected a regular file, found prw"):
        read_token(tmp_path / "token")
