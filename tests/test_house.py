"""The doors between the parts of the house: who may import whom, and what the base install may need."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "perseus"

# part → what it must never import.
CLOSED_DOORS = {
    "solver": [
        "grpc", "google", "asyncio", "pynvml", "matplotlib", "typer", "rich", "pydantic", "structlog",
        "perseus.v1", "perseus.service", "perseus.agent", "perseus.demo", "perseus.cli",
    ],
    "agent": [
        "igraph", "matplotlib", "typer", "rich",
        "perseus.solver", "perseus.service", "perseus.demo", "perseus.cli",
    ],
    "service": ["pynvml", "matplotlib", "typer", "rich", "perseus.agent", "perseus.demo", "perseus.cli"],
    "demo": ["perseus.service", "perseus.cli"],
}  # fmt: skip

# State machines and estimators are pure: events and the time come in as arguments, commands go out.
PURE = [
    "agent/rank/session.py",
    "agent/rank/sampling.py",
    "agent/stream/telemetry.py",
    "agent/energy/regression.py",
    "service/job_machine.py",
    "service/stage_profiles.py",
    "service/clock_choice.py",
    "service/profiler.py",
    "service/guard.py",
    "service/straggler_book.py",
    "service/plan_watch.py",
    "service/drift.py",
    "service/operating_point.py",
    "service/iterations.py",
    "service/spans.py",
    "service/stragglers.py",
]
IMPURE = ["asyncio", "grpc", "google", "sqlite3", "socket", "threading", "time", "os", "random", "perseus.v1"]


def imports(path: Path) -> Iterator[str]:
    """Every module that a file names in an import, however deep in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def trespasses(path: Path, banned: list[str]) -> list[str]:
    return [name for name in imports(path) for door in banned if f"{name}.".startswith(f"{door}.")]


@pytest.mark.parametrize("part", CLOSED_DOORS)
def test_closed_doors_stay_closed(part: str) -> None:
    files = sorted((PACKAGE / part).rglob("*.py"))
    assert files, f"perseus/{part} has no modules: is this test looking at the right place?"
    found = {str(path): names for path in files if (names := trespasses(path, CLOSED_DOORS[part]))}
    assert not found


@pytest.mark.parametrize("name", PURE)
def test_state_machines_touch_nothing(name: str) -> None:
    assert not trespasses(PACKAGE / name, IMPURE)


def test_a_closed_door_would_be_noticed(tmp_path: Path) -> None:
    path = tmp_path / "sly.py"
    path.write_text("def late():\n    from perseus import solver\n    import grpc.aio\n")
    assert trespasses(path, ["perseus.solver", "grpc"]) == ["perseus.solver", "grpc.aio"]


# Stands in for the base install: the extras' modules can't be found.
WITHOUT_EXTRAS = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"igraph", "grpc_health", "grpc_reflection", "matplotlib"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


def run_without_extras(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS + code], capture_output=True, text=True, check=False
    )


def test_agent_and_stubs_need_no_extra() -> None:
    done = run_without_extras("import perseus.agent.sidecar.shell, perseus.v1.frontier_service_pb2_grpc")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "extra"),
    [(["solve", "profile.csv", "--microbatches", "4"], "coordinator"), (["coordinator"], "coordinator")],
)
def test_command_that_needs_an_extra_names_it(command: list[str], extra: str) -> None:
    call = f"sys.argv = ['perseus', *{command}]\nfrom perseus.cli.main import main\nmain()"
    done = run_without_extras(call)
    assert done.returncode == 1
    assert f"pip install 'perseus-energy[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
