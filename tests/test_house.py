"""What is pure, what each folder needs of other distributions, and what the base install needs.

Who may import whom is in `pyproject.toml` ([tool.importlinter]), which `make check` checks. No contract can
say there that a folder imports this and nothing else of other distributions, or what is pure.
"""

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "perseus"

# What reads the time, draws by lot, waits, or reaches outside of the process.
IMPURE = frozenset(
    {
        "asyncio", "concurrent", "ctypes", "datetime", "fcntl", "glob", "io", "logging", "mmap",
        "multiprocessing", "os", "pathlib", "queue", "random", "secrets", "select", "selectors", "shutil",
        "signal", "socket", "sqlite3", "subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Room:
    """What the modules of a folder may import beside Perseus and the standard library.

    `needs`: modules of other distributions. A pure one uses nothing of the standard library that is IMPURE,
    and of Perseus only what is pure.
    """

    needs: frozenset[str]
    is_pure: bool


def room(*needs: str) -> Room:
    return Room(frozenset(needs), is_pure=False)


def pure(*needs: str) -> Room:
    return Room(frozenset(needs), is_pure=True)


# A module is in the room of the longest name that begins its own. There is no room for all: a new folder has
# to be named here.
HOUSE: Mapping[str, Room] = {
    "perseus": pure(),
    "v1": pure("google", "grpc"),  # its messages are values; its services (`*_pb2_grpc`) are not
    "printable": pure(),
    "regular_file": room(),
    "gpu": pure(),
    "emulation": room(),
    "emulation.physics": pure(),
    "emulation.dynamics": pure(),
    "rate_limited_log": room("structlog"),
    "retry": pure(),
    "schedule_name": pure(),
    "logs": room("structlog"),
    "metrics": pure("prometheus_client"),
    "tls": room("grpc", "pydantic", "structlog"),
    "certificates": room("cryptography"),
    "configuration": room("pydantic", "pydantic_core", "pydantic_settings"),
    "pictures": room("matplotlib"),
    "solver": pure("igraph", "numpy"),
    "solver.study": pure("igraph", "numpy"),
    # The coordinator, from the values up to the process.
    "service": pure(),
    "service.domain": pure("google", "numpy", "pydantic"),
    "service.job": pure("google", "pydantic"),
    "service.job.ranks": pure(),
    "service.job.iterations": pure("numpy"),
    "service.job.profiling": pure(),
    "service.job.statistics": pure("numpy"),
    "service.job.stragglers": pure("numpy"),
    "service.job.planning": pure("numpy"),
    "service.fleet": pure(),
    "service.fleet.power": pure("highspy", "numpy"),
    "service.fleet.signals": pure("numpy"),
    "service.fleet.pacing": pure("numpy"),
    "service.signals": room("aiohttp"),
    "service.signal_settings": room("pydantic"),
    "service.storage": room("alembic", "google", "numpy", "pydantic", "sqlalchemy"),
    "service.storage.check_words": pure(),
    "service.storage.migrations": room("alembic", "sqlalchemy"),
    "service.solving": room("structlog"),
    "service.solving.fair_queue": pure(),
    "service.shell": room("structlog"),
    "service.shell.watch_state": pure(),
    "service.shell.job_clock": pure(),
    "service.shell.quotas": pure(),
    "service.api": room("google", "grpc", "grpc_reflection", "grpc_status", "numpy", "structlog"),
    "service.web": room("aiohttp", "google", "structlog"),
    "service.settings": room("pydantic", "pydantic_settings"),
    "service.listening": room("grpc", "structlog"),
    "service.server": room("grpc", "grpc_health", "structlog"),
    "service.watchdog": room("structlog"),
    # Both processes on a GPU node meet in the link only.
    "agent.link": pure(),
    # The training process.
    "agent": room(),
    "agent.probe": room("torch"),
    "agent.torch": room("torch"),
    "agent.megatron": room("megatron", "torch"),
    "agent.deepspeed": room("deepspeed", "torch"),
    "agent.torchtitan": room("torch", "torchtitan"),
    # The agent's process.
    "agent.gpu": room("pynvml", "structlog"),
    "agent.claims": pure(),
    "agent.clocks": pure(),
    "agent.energy": pure("numpy"),
    "agent.rank": pure(),
    "agent.restore": room("structlog"),
    "agent.stream": room("google", "grpc", "grpc_status", "structlog"),
    "agent.sidecar": room("pydantic", "pydantic_settings", "pynvml", "structlog"),
    "agent.slurm": room(),
    "agent.slurm.job": pure(),
    "grid": room("aiomqtt", "google", "grpc", "joserfc", "pydantic", "pydantic_settings", "structlog"),
    "grid.dsx_flex": pure(),
    # Reads and writes texts of times: a calendar, and no clock.
    "grid.contract": room("pydantic", "pydantic_core"),
    "simulation": room("numpy", "pydantic"),
    "simulation.replay": pure("numpy"),
    "demo": room("deepspeed", "google", "grpc", "megatron", "rich", "torch"),
    "demo.nvml_stub": room(),
    "doctor": room("grpc"),
    "doctor.checks": pure(),
    "cli": room("google", "grpc", "grpc_health", "pynvml", "rich", "typer"),
}

# These are nothing but the `__init__` that leads to the rooms.
HALLS = frozenset({"perseus", "agent", "service"})

# A reader of the solver's own file format; and a constant that is beside what reads files.
EXCEPTIONS = frozenset({("solver.profile_csv", "pathlib"), ("doctor.checks", "perseus.tls.files")})

# Generated, and checked by `test_stubs`.
GENERATED = "v1"


def room_of(module: str) -> str | None:
    """The room of a module, both without `perseus.` in front; None if it has none."""
    if module in HOUSE:
        return module
    rooms = [name for name in HOUSE if name not in HALLS and module.startswith(f"{name}.")]
    return max(rooms, key=len, default=None)


MODULES: Mapping[str, Path] = {
    ".".join(parts) or "perseus": path
    for path in sorted(PACKAGE.rglob("*.py"))
    if (parts := [part for part in path.relative_to(PACKAGE).with_suffix("").parts if part != "__init__"])[:1]
    != [GENERATED]
}


def imports(source: str) -> Iterator[str]:
    """Every module that a source names in an import, however deep in it; names from `perseus` resolved."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner.removeprefix("perseus.") in MODULES else node.module


def trespasses(module: str, source: str) -> list[str]:
    """What a module imports that its room may not."""
    name = room_of(module)
    if name is None:
        return [f"perseus.{module} is in no room"]
    room = HOUSE[name]
    found = []
    for imported in imports(source):
        top = imported.partition(".")[0]
        if top == "perseus":
            other = room_of(imported.removeprefix("perseus."))
            is_value = (other is None or HOUSE[other].is_pure) and not imported.endswith("_pb2_grpc")
            is_fine = not room.is_pure or is_value
        elif top in sys.stdlib_module_names:
            is_fine = not room.is_pure or top not in IMPURE
        else:
            is_fine = top in room.needs
        if not is_fine and (module, imported) not in EXCEPTIONS:
            found.append(imported)
    return found


@pytest.mark.parametrize("module", MODULES)
def test_doors_stay_closed(module: str) -> None:
    assert trespasses(module, MODULES[module].read_text()) == []


def test_every_room_is_there() -> None:
    lived_in = {name for module in MODULES if (name := room_of(module)) is not None}
    assert lived_in | {GENERATED} == set(HOUSE)


@pytest.mark.parametrize("part", ["agent", "emulation", "grid", "service", "solver"])
def test_tests_mirror_the_rooms(part: str) -> None:
    folders = [path.relative_to(TESTS) for path in (TESTS / part).rglob("test_*.py")]
    assert folders
    assert [str(folder) for folder in folders if not (PACKAGE / folder).parent.is_dir()] == []


# ---------------------------------------------------------------------- a closed door would be noticed


@pytest.mark.parametrize("name", [name for name in HOUSE if name != GENERATED])
def test_whatever_is_planted_in_a_room_is_noticed(name: str) -> None:
    impure = [*sorted(IMPURE), *(f"perseus.{other}" for other in HOUSE if not HOUSE[other].is_pure)]
    impure.append("perseus.v1.job_service_pb2_grpc")
    for stranger in ["flask", *(impure if HOUSE[name].is_pure else [])]:
        assert trespasses(name, f"def late():\n    import {stranger}\n") == [stranger]


def test_a_room_that_nobody_named_is_noticed() -> None:
    assert trespasses("service.cellar.wine", "") == ["perseus.service.cellar.wine is in no room"]


PLANTED = {
    "service/shell/jobs.py": "perseus.cli.jobs",
    "agent/rank/plans.py": "perseus.solver",
    "service/solving/work.py": "perseus.solver.study",
    "service/domain/limits.py": "perseus.service.api.texts",
    "service/web/page_api.py": "perseus.service.job.machine",
    "service/api/paging.py": "perseus.service.fleet.gpus",
    "service/api/kept.py": "perseus.service.storage.schema",
    "service/job/states.py": "perseus.service.job.machine",
    "agent/link/packets.py": "perseus.agent.gpu.lanes",
    "agent/sidecar/ranks.py": "perseus.agent.probe.client",
    "agent/probe/client.py": "perseus.agent.gpu.lanes",
    "tls/rules.py": "perseus.tls.fields",
}
"""For each contract on imports, in their order, one that breaks it."""


def test_what_is_planted_breaks_each_contract_on_imports(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "perseus", ignore=shutil.ignore_patterns("page", "__pycache__"))
    shutil.copy(PACKAGE.parent / "pyproject.toml", tmp_path)
    for path, imported in PLANTED.items():
        with (tmp_path / "perseus" / path).open("a") as file:
            file.write(f"\n\ndef late():\n    import {imported}\n")
    lint = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    done = subprocess.run(lint, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert f"Contracts: 0 kept, {len(PLANTED)} broken." in done.stdout, done.stdout + done.stderr


# ---------------------------------------------------------------------- extras


# Stands in for the base install: the extras' modules can't be found.
WITHOUT_EXTRAS = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {
    "aiohttp", "aiomqtt", "highspy", "igraph", "grpc_health", "grpc_reflection", "joserfc", "matplotlib",
    "prometheus_client",
}:
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
    [
        (["solve", "profile.csv", "--microbatches", "4"], "coordinator"),
        (["coordinator"], "coordinator"),
        (["grid", "new-key", "key.json", "--kid", "k"], "grid"),
    ],
)
def test_command_that_needs_an_extra_names_it(command: list[str], extra: str) -> None:
    call = f"sys.argv = ['perseus', *{command}]\nfrom perseus.cli.main import main\nmain()"
    done = run_without_extras(call)
    assert done.returncode == 1
    assert f"pip install 'perseus-energy[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
