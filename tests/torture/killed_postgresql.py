"""A PostgreSQL server that is killed while a coordinator uses it."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from tests.service.storage import postgresql

_LIMIT_S = 30.0


class KilledServer:
    """A server, as `tests.torture.coordinator.DatabaseServer` says."""

    def __init__(self, server: postgresql.Server) -> None:
        self._server = server

    def kill(self) -> None:
        """Send SIGKILL to the server; its workers don't outlive it."""
        pid = int((self._server.data / "postmaster.pid").read_text().split()[0])
        workers = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        for each in (pid, *workers):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        ends_s = time.monotonic() + _LIMIT_S
        while any(_is_alive(each) for each in (pid, *workers)) and time.monotonic() < ends_s:
            time.sleep(0.01)
        # Until its parent has waited for the dead process, its locks would seem to be held.
        folder = self._server.data
        for lock in (folder / "postmaster.pid", *folder.parent.glob(".s.PGSQL.*.lock")):
            lock.unlink(missing_ok=True)

    def start(self) -> None:
        """Start it again, and wait until it answers."""
        self._server.start_again()


def _is_alive(pid: int) -> bool:
    """Whether it runs; a zombie doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
