"""Opening what others may have put there: who opens a FIFO waits for its other end, without a limit."""

import os
import stat
from pathlib import Path


def open_regular(path: Path) -> int:
    """Open a file for reading, and return its descriptor.

    Raises:
        OSError: it can't be read, or is no regular file.
    """
    # A FIFO is opened at once this way, and then refused.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        os.close(file)
        raise OSError(22, f"expected a regular file, found {stat.filemode(found.st_mode)}")
    return file
