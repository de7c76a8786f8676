"""Files that others name are read up to a limit."""

import os
from pathlib import Path

import pytest

from perseus.regular_file import open_regular, read_bounded


def test_a_file_is_read_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5) == b"12345"
    descriptor = open_regular(path)
    assert read_bounded(descriptor, 5) == b"12345"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)  # it is closed
    for larger in (path, Path("/dev/zero")):
        with pytest.raises(OSError, match="expected at most 4 bytes, found more"):
            read_bounded(larger, 4)
