"""Reading files that others name or may have replaced, which need not be what they should be.

Opening a FIFO would block without a limit, and reading a device such as /dev/zero would never end.
"""

import errno
import os
import stat
from pathlib import Path

MAX_FILE_BYTES = 256 * 2**20
MAX_SMALL_FILE_BYTES = 2**20
"""Of settings, certificates and keys."""


def read_bounded(file: Path | int, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return what is in a file; an open one, given by its descriptor, is closed.

    Raises:
        OSError: it can't be read, or is larger.
    """
    with open(file, "rb") as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"expected at most {max_bytes} bytes, found more", str(file))
    return content


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
