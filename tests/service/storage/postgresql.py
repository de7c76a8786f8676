"""A PostgreSQL server of our own, from the programs that Debian's package installs."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg

from perseus.demo.processes import until
from tests.processes import is_gone

_PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4]))

MISSING = None if _PROGRAMS else "no PostgreSQL in /usr/lib/postgresql (see tests/service/storage/install)"
"""The reason why there can be no server; None if there can."""


class Server:
    """A server on a Unix socket; every test gets a new database."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._programs = _PROGRAMS[-1].parent
        self.data = folder / "data"

    @property
    def socket(self) -> Path:
        return self._folder / ".s.PGSQL.5432"

    def url(self, database: str) -> str:
        return f"postgresql://tester@/{database}?host={self._folder}"

    def new_database(self, encoding: str = "UTF8") -> str:
        """Create a database, and return its URL."""
        name = f"test_{uuid.uuid4().hex}"
        kind = f"ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}" {kind}'.encode())
        return self.url(name)

    def start(self) -> None:
        self._run(self._programs / "initdb", "-D", self.data, "-U", "tester", "--auth=trust", "--no-sync")
        self.start_again()

    def start_again(self) -> None:
        # Nothing here outlives the machine: fsync would not protect against a killed server.
        options = "-c fsync=off -c full_page_writes=off -c autovacuum=off "
        options += f"-c listen_addresses='' -c unix_socket_directories='{self._folder}' -c max_connections=20"
        log = self._folder / "log"
        self._run(self._programs / "pg_ctl", "-D", self.data, "-l", log, "-w", "-o", options, "start")

    def stop(self, mode: str = "immediate") -> None:
        """Stop it; `immediate` simulates a crash."""
        self._run(self._programs / "pg_ctl", "-D", self.data, "-m", mode, "-w", "stop")

    def kill(self) -> None:
        """Send SIGKILL to the server; its workers don't outlive it."""
        pid = int((self.data / "postmaster.pid").read_text().split()[0])
        workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        processes = [pid, *map(int, workers)]
        for each in processes:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        until(lambda: all(map(is_gone, processes)), "the end of the server's processes")
        # Until its parent has waited for the dead process, its locks would seem to be held.
        for lock in (self.data / "postmaster.pid", *self._folder.glob(".s.PGSQL.*.lock")):
            lock.unlink(missing_ok=True)

    def _run(self, *command: object) -> None:
        # It refuses to run as root. A program changes the user: for `user=`, `subprocess` would fork this
        # whole process, with gRPC's threads in it.
        as_user = "setpriv --reuid=nobody --regid=nogroup --clear-groups" if os.getuid() == 0 else ""
        done = subprocess.run(
            [*as_user.split(), *map(str, command)],
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode:
            log = self._folder / "log"
            raise RuntimeError(f"{command}: {log.read_text() if log.exists() else done.returncode}")


@contextmanager
def running() -> Iterator[Server]:
    """Run a server for the length of the block."""
    # Not in pytest's folders: other users can't enter these, and they are too long for a socket's name.
    folder = Path(tempfile.mkdtemp(prefix="perseus-pg-"))
    if os.getuid() == 0:
        os.chown(folder, _unprivileged(), -1)
    server = Server(folder)
    try:
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unprivileged() -> int:
    return pwd.getpwnam("nobody").pw_uid
