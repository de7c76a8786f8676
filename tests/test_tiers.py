"""Forbidden behaviour of tests fails, and long tests are listed: run pytest on such tests, with shorter
limits."""

from pathlib import Path

import pytest

LIMITS = """
from tests import leaks, tiers
leaks.TIMEOUT_S, tiers.MAX_REFERENCES, tiers.MAX_WAIT_S = 0.2, 20, 1.0
"""

TESTS = """
import asyncio, socket, subprocess, threading, time
import grpc
import pytest
from tests import tiers
from tests.ports import free_port

kept = []

def test_nothing():
    pass

def test_thread():
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()

def test_process():
    kept.append(subprocess.Popen(["sleep", "60"]))

def test_file():
    kept.append(open(__file__))

async def test_task():
    kept.append(asyncio.create_task(asyncio.sleep(60)))

def test_busy():
    for _ in range(40):
        tiers.reference_loop_s()

def test_waiting():
    time.sleep(1.1)

def test_own_clock(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 1e9)

@pytest.fixture
def dear():
    time.sleep(1.1)

def test_dear_fixture(dear):
    pass

@pytest.fixture(scope="module")
def shared():
    time.sleep(1.1)
    server = subprocess.Popen(["sleep", "60"])
    yield
    server.kill()
    server.wait()

def test_shared_fixture(shared):
    pass

@pytest.fixture(scope="module")
def servers():
    servers = [subprocess.Popen(["sleep", "60"])]
    yield servers
    servers[0].kill()
    servers[0].wait()

def test_shared_server_started_anew(servers):
    servers[0].kill()
    servers[0].wait()
    servers[0] = subprocess.Popen(["sleep", "60"])

@pytest.mark.slow("waits")
def test_marked():
    time.sleep(1.1)

@pytest.mark.parametrize("number", range(2))
def test_port(number):
    socket.create_server(("127.0.0.1", 50051))

@pytest.mark.parametrize("number", range(2))
async def test_port_of_grpc(number):
    grpc.aio.server().add_insecure_port("127.0.0.1:50051")

@pytest.mark.parametrize("number", range(2))
def test_own_ports(number):
    with socket.create_server(("127.0.0.1", free_port())), socket.create_server(("127.0.0.1", 0)):
        pass
"""

SHARED_PORT = "SharedPortError: expected port 0, or one from tests.ports.free_port(), found 50051"
FAILURES = {
    "test_thread": "left behind: thread 'Thread",
    "test_process": "left behind: process",
    "test_file": "left behind: file",
    "test_task": "left unfinished: <Task pending",
    "test_port[0]": SHARED_PORT,
    "test_port[1]": SHARED_PORT,
    "test_port_of_grpc[0]": SHARED_PORT,
    "test_port_of_grpc[1]": SHARED_PORT,
}
LONG = {"test_busy", "test_waiting", "test_dear_fixture"}


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("COLUMNS", "1000")
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function")
    return pytester


PLUGINS = ("-p", "tests.leaks", "-p", "tests.ports", "-p", "tests.tiers")


@pytest.mark.slow("starts pytest, and long tests take their time")
@pytest.mark.parametrize("processes", ["0", "2"])
def test_leaks_and_shared_ports_fail_and_long_tests_are_listed(run: pytest.Pytester, processes: str) -> None:
    run.makeconftest(LIMITS)
    run.makepyfile(TESTS)
    result = run.runpytest_subprocess(*PLUGINS, "-rfE", "--times", "--numprocesses", processes)
    found: dict[str, str] = {}
    for line in result.outlines:
        if line.startswith(("FAILED ", "ERROR ")):
            test, _, reason = line.partition("::")[2].partition(" - ")
            # A failed test may also leave behind objects that it had no time to close.
            found.setdefault(test, "")
            found[test] += reason
    assert found.keys() == FAILURES.keys()
    for test, reason in FAILURES.items():
        assert reason in found[test], test
    listed = [line for line in result.outlines if "× allowed processor time" in line]
    assert {line.rpartition("::")[2] for line in listed} == LONG


@pytest.mark.parametrize("marker", ["slow", "slow()", "slow('')", "slow(3)", "nightly"])
def test_a_slow_or_nightly_test_has_a_reason(run: pytest.Pytester, marker: str) -> None:
    run.makepyfile(f"import pytest\n@pytest.mark.{marker}\ndef test_it(): pass")
    result = run.runpytest_inprocess("-p", "tests.tiers")
    name = marker.partition("(")[0]
    result.stderr.fnmatch_lines([f'*expected {name}("why"), found {name}*'])
