"""Real coordinators whose connections to PostgreSQL hang, are cut, or can't be opened."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import psycopg
import pytest
from sqlalchemy.engine import make_url

from benchmarks.load.control import CoordinatorProcess
from perseus.demo.processes import logged
from perseus.job_id import slot_of
from perseus.v1 import job_service_pb2
from tests.ports import free_port
from tests.service.grpc_fakes import connected_to
from tests.service.storage import postgresql
from tests.torture.cut import Cut, way_to

pytestmark = [
    pytest.mark.slow("a coordinator's process, and its end after some time-outs"),
    pytest.mark.timeout(200),
    pytest.mark.skipif(bool(postgresql.MISSING), reason=str(postgresql.MISSING)),
]

FLAGS = ("--member-lease-s", "4", "--shutdown-grace-s", "1")
STORE_FAILED = 3


class Hanging:
    """A coordinator that serves on a database, which can be made to hang."""

    def __init__(self, database: str, way: Cut, process: CoordinatorProcess) -> None:
        self.database = database
        self.way = way
        self.process = process

    def end(self) -> int:
        """Return the exit status; its log has no traceback."""
        status = self.process.wait()
        text = self.process.log.read_text()
        assert "Traceback" not in text, text
        return status


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Hanging]:
    with postgresql.running() as server, ExitStack() as stack:
        database = server.new_database()
        way = stack.enter_context(way_to(server.socket))
        url = make_url(database).set(host="127.0.0.1", port=way.port, query={})
        process = CoordinatorProcess(tmp_path, url.render_as_string(), FLAGS, is_pinned=False)
        process.address = f"127.0.0.1:{free_port()}"
        stack.enter_context(process)
        process.start()
        yield Hanging(database, way, process)
        way.mend()


@pytest.mark.parametrize("is_terminated", [False, True])
def test_it_ends_when_nothing_is_forwarded_any_more(hanging: Hanging, is_terminated: bool) -> None:
    hanging.way.cut()
    if is_terminated:
        os.kill(hanging.process.pid, signal.SIGTERM)
    assert hanging.end() == STORE_FAILED


@pytest.mark.parametrize("name", ["perseus %", ""])
def test_it_ends_on_sigterm_when_a_session_is_frozen(hanging: Hanging, name: str) -> None:
    """Sessions that write, or all but these."""
    with psycopg.connect(hanging.database, autocommit=True) as connection:
        rows = connection.execute(
            "SELECT pid, application_name LIKE 'perseus %' FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        ).fetchall()
        frozen = [pid for pid, is_writer in rows if is_writer is bool(name)]
        assert frozen
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        try:
            if name:
                with suppress(TimeoutError):  # what is to be stored waits
                    asyncio.run(asyncio.wait_for(register(hanging.process.address, "job"), 2.0))
                os.kill(hanging.process.pid, signal.SIGTERM)
            assert hanging.end() == STORE_FAILED
        finally:
            for pid in frozen:
                os.kill(pid, signal.SIGCONT)


def test_all_outlive_a_restart_of_the_server(tmp_path: Path) -> None:
    with postgresql.running() as server, ExitStack() as stack:
        database = server.new_database()
        made = []
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            # Beyond any restart, on a busy machine, too.
            flags = ("--member-lease-s", "60", "--slots", "2")
            process = CoordinatorProcess(tmp_path / name, database, flags, is_pinned=False)
            process.address = f"127.0.0.1:{free_port()}"
            made.append(stack.enter_context(process))
            process.start()
        job_ids = [next(name for name in map(str, range(9)) if slot_of(name, 2) == slot) for slot in range(2)]
        server.stop("fast")
        server.start_again()
        for process in made:
            slot = logged(process.log, "took over the jobs")["slot"]
            asyncio.run(register(process.address, job_ids[slot]))
            assert process.terminate() == 0
            assert "Traceback" not in process.log.read_text()


async def register(address: str, job_id: str) -> None:
    async with connected_to(address) as client:
        await client.register(job_id=job_id)
        with suppress(grpc.aio.AioRpcError):  # the first reads may be refused
            await client.jobs.ListJobs(job_service_pb2.ListJobsRequest())
        await client.jobs.ListJobs(job_service_pb2.ListJobsRequest())


def test_one_that_can_not_open_all_its_connections_takes_no_slot(tmp_path: Path) -> None:
    with postgresql.running() as server, ExitStack() as stack:
        database = server.new_database()
        administrator = stack.enter_context(psycopg.connect(database, autocommit=True))
        administrator.execute("CREATE ROLE limited LOGIN CONNECTION LIMIT 2")
        administrator.execute("GRANT ALL ON SCHEMA public TO limited")
        limited = database.replace("tester@", "limited@")
        process = stack.enter_context(CoordinatorProcess(tmp_path, limited, FLAGS, is_pinned=False))
        process.launch()
        logged(process.log, "the slot is not taken")
        assert administrator.execute("SELECT lease_epoch FROM slots").fetchall() == [(0,)]
        administrator.execute("ALTER ROLE limited CONNECTION LIMIT 10")
        assert logged(process.log, "took over the jobs")["lease_epoch"] == 1
        logged(process.log, "listening")
        assert process.terminate() == 0
