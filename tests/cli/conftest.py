"""Fixtures for tests of several commands."""

import importlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from perseus.demo.cluster import Cluster
from perseus.demo.workload import DEMO
from tests.cli.prepared import PreparedCoordinator

PROFILE = """stage,instruction,frequency,time,energy
0,forward,1000,0.1,30
0,forward,800,0.12,25
0,backward,1000,0.2,60
0,backward,800,0.24,50
"""


@pytest.fixture(scope="session", autouse=True)
def _commands_are_imported() -> None:
    """Import the commands beforehand: their imports take seconds, which no test should be charged for."""
    for module in ("perseus.agent.sidecar.shell", "perseus.service.server", "perseus.solver"):
        importlib.import_module(module)


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment of an operator of a coordinator without jobs."""
    run_dir = tmp_path_factory.mktemp("coordinator")
    with Cluster(DEMO, run_dir, run_dir / "logs") as cluster:
        address = cluster.start_coordinator()
        yield {**cluster.security.of_operator(), "PERSEUS_COORDINATOR": address}


@pytest.fixture(scope="session")
def _served() -> Iterator[PreparedCoordinator]:
    with PreparedCoordinator() as prepared:
        yield prepared


@pytest.fixture
def prepared(_served: PreparedCoordinator) -> PreparedCoordinator:
    """A coordinator without answers yet, and without requests."""
    _served.answers, _served.requests = {}, []
    return _served


@pytest.fixture
def full_device(tmp_path: Path) -> Path:
    """A device that is always full; root, who could replace /dev/full by mistake, gets another one."""
    if os.geteuid() != 0:
        return Path("/dev/full")
    path = tmp_path / "full"
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 7))
        path.open("wb").close()
    except OSError as error:
        pytest.skip(f"no device can be made here: {error}")
    return path


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    """A profile of one stage that can be solved."""
    path = tmp_path / "profile.csv"
    path.write_text(PROFILE)
    return path
