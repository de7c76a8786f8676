"""Opening files that others may have replaced: opening a FIFO would block without a limit."""

import os
import stat
from pathlib import Path


def open_regular(path: Path) -> int:
    """Open a file for reading and return its descriptor.

    Raises:
        OSError: it can't be read or is not a regular file.
    """
    # This opens even a FIFO without blocking; it is then refused.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        os.close(file)
        raise OSError(22, f"expected a regular file, found {stat.filemode(found.st_mode)}")
    return file
