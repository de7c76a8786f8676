"""The doors of the house: who may import whom, what is pure, and what the base install needs."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
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
    """What the modules of a room may import beside each other and the standard library.

    `knows`: rooms of the house; `needs`: modules of other distributions. A pure room uses nothing of the
    standard library that is IMPURE.
    """

    knows: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    is_pure: bool = False


def room(*knows: str, needs: Iterable[str] = (), is_pure: bool = False) -> Room:
    return Room(frozenset(knows), frozenset(needs), is_pure)


def pure(*knows: str, needs: Iterable[str] = ()) -> Room:
    return room(*knows, needs=needs, is_pure=True)


# A module is in the room of the longest name that begins its own. There is no room for all: a new folder has
# to be named here, and with it whom it may know.
HOUSE: Mapping[str, Room] = {
    "perseus": pure(),
    # The contract: its messages, which are values, and its services (`*_pb2_grpc`).
    "v1": pure(needs=["google"]),
    "v1.services": room("v1", needs=["grpc"]),
    "printable": pure(),
    "regular_file": room(),
    "seldom": pure(),
    "logs": room("printable", needs=["structlog"]),
    # Both ends of the wire.
    "metrics": pure("metrics.distribution", needs=["prometheus_client"]),
    "metrics.distribution": pure(),
    "tls": room("regular_file", needs=["grpc", "pydantic", "structlog"]),
    "certificates": room(needs=["cryptography"]),
    "configuration": room(needs=["pydantic", "pydantic_core", "pydantic_settings"]),
    "pictures": room("solver", needs=["matplotlib"]),
    # Mathematics.
    "solver": pure(needs=["igraph", "numpy"]),
    "solver.study": pure("solver", needs=["igraph", "numpy"]),
    # The coordinator, from the values up to the process.
    "service": pure(),
    "service.domain": pure("solver", "v1", needs=["google", "numpy", "pydantic"]),
    "service.job": pure(),
    "service.job.event_budget": pure("v1"),
    "service.job.journal": pure("service.domain", "service.job.event_budget", "v1", needs=["google"]),
    "service.job.runs": pure(),
    "service.job.states": pure("service.domain"),
    "service.job.ranks": pure("service.domain", "service.job.journal", "v1"),
    "service.job.iterations": pure("service.domain", needs=["numpy"]),
    "service.job.profiling": pure(
        "service.domain", "service.job.journal", "service.job.ranks", "solver", "v1"
    ),
    "service.job.statistics": pure("service.domain", needs=["numpy"]),
    "service.job.stragglers": pure(
        "service.domain", "service.job.journal", "service.job.statistics", "solver", "v1", needs=["numpy"]
    ),
    "service.job.planning": pure(
        "service.domain",
        "service.job.iterations",
        "service.job.journal",
        "service.job.profiling",
        "service.job.ranks",
        "service.job.statistics",
        "service.job.stragglers",
        "solver",
        "v1",
        needs=["numpy"],
    ),
    "service.job.progress": pure(
        "service.domain",
        "service.job.iterations",
        "service.job.journal",
        "service.job.planning",
        "service.job.profiling",
        "service.job.ranks",
        "v1",
    ),
    "service.job.rules": pure("service.job.planning", "service.job.profiling"),
    "service.job.course": pure(
        "service.domain",
        "service.job.iterations",
        "service.job.journal",
        "service.job.planning",
        "service.job.profiling",
        "service.job.progress",
        "service.job.ranks",
        "service.job.rules",
        "service.job.states",
        "service.job.stragglers",
        "solver",
        "v1",
    ),
    "service.job.iteration_judge": pure(
        "service.domain", "service.job.course", "service.job.planning", "service.job.stragglers", "v1"
    ),
    "service.job.views": pure(
        "service.domain", "service.job.course", "service.job.ranks", "service.job.rules", "solver"
    ),
    "service.job.machine": pure(
        "service.domain",
        "service.job.iteration_judge",
        "service.job.planning",
        "service.job.ranks",
        "service.job.recording",
        "service.job.rules",
        "service.job.views",
        "v1",
    ),
    "service.job.recording": pure(
        "service.domain",
        "service.job.planning",
        "service.job.profiling",
        "service.job.rules",
        "solver",
        "v1",
        needs=["google"],
    ),
    "service.job.quarantine": pure(
        "service.domain",
        "service.job.iterations",
        "service.job.journal",
        "service.job.ranks",
        "service.job.rules",
        "solver",
        "v1",
    ),
    "service.fleet": pure("service.domain"),
    "service.fleet.power": pure("service.domain", "solver", needs=["highspy", "numpy"]),
    "service.fleet.signals": pure("service.domain", needs=["numpy"]),
    "service.fleet.pacing": pure("service.domain", "service.fleet.signals", "solver", needs=["numpy"]),
    # Where signals come from: files, and services on the network.
    "service.signals": room(
        "regular_file",
        "service.domain",
        "service.fleet.signals",
        "service.signal_settings",
        "tls",
        needs=["aiohttp"],
    ),
    "service.signals.backoff": pure(),
    "service.signal_settings": room("tls", needs=["pydantic"]),
    # The same decisions, on days that are made up.
    "simulation": room(
        "service.domain",
        "service.fleet.pacing",
        "service.fleet.power",
        "service.fleet.signals",
        "service.signals",
        "simulation.replay",
        "solver",
        needs=["numpy", "pydantic"],
    ),
    "simulation.replay": pure(
        "service.domain",
        "service.fleet.pacing",
        "service.fleet.power",
        "service.fleet.signals",
        "solver",
        needs=["numpy"],
    ),
    "service.storage.check_words": pure(),
    "service.storage": room(
        "service.domain",
        "service.storage.check_words",
        "solver",
        "v1",
        needs=["alembic", "google", "numpy", "pydantic", "sqlalchemy"],
    ),
    "service.storage.migrations": room(needs=["alembic", "sqlalchemy"]),
    # What workers do, and the pools of them.
    "service.solving.fair_queue": pure(),
    "service.solving": room(
        "metrics.distribution",
        "service.domain",
        "service.solving.fair_queue",
        "solver",
        needs=["structlog"],
    ),
    "service.shell.watch_state": pure("service.domain", "v1"),
    "service.shell.job_clock": pure(),
    "service.shell.quotas": pure("service.domain"),
    "service.shell": room(
        "metrics.distribution",
        "service.domain",
        "service.fleet",
        "service.fleet.pacing",
        "service.fleet.power",
        "service.fleet.signals",
        "service.job.machine",
        "service.job.planning",
        "service.job.quarantine",
        "service.job.recording",
        "service.job.rules",
        "service.job.runs",
        "service.shell.job_clock",
        "service.shell.quotas",
        "service.shell.watch_state",
        "service.signals",
        "service.signals.backoff",
        "service.solving",
        "service.storage",
        "solver",
        "v1",
        needs=["structlog"],
    ),
    "service.api": room(
        "seldom",
        "service.domain",
        "service.shell",
        "service.shell.quotas",
        "service.solving",
        "solver",
        "v1",
        "v1.services",
        needs=["google", "grpc", "grpc_reflection", "grpc_status", "numpy", "structlog"],
    ),
    # What is served over HTTP.
    "service.web": room(
        "metrics",
        # It carries the adapters' calls, and says what gRPC says: translation and errors are in one place.
        "service.api",
        "service.domain",
        "service.shell",
        "tls",
        "v1",
        needs=["aiohttp", "google", "structlog"],
    ),
    "service.settings": room(
        "logs", "service.domain", "service.signal_settings", "tls", needs=["pydantic", "pydantic_settings"]
    ),
    "service.listening": room("service.domain", "service.settings", "tls", needs=["grpc", "structlog"]),
    "service.server": room(
        "service.api",
        "service.domain",
        "service.fleet.power",
        "service.job.planning",
        "service.job.profiling",
        "service.job.rules",
        "service.listening",
        "service.settings",
        "service.shell",
        "service.signals",
        "service.solving",
        "service.storage",
        "service.watchdog",
        "service.web",
        "tls",
        "v1",
        "v1.services",
        needs=["grpc", "grpc_health", "structlog"],
    ),
    "service.watchdog": room(needs=["structlog"]),
    # Both processes on a GPU node meet in the link only.
    "agent.link": pure(),
    # The training process.
    "agent": room("agent.link", "agent.probe"),
    "agent.probe": room("agent.link", needs=["torch"]),
    "agent.torch": room("agent.link", "agent.probe", needs=["torch"]),
    "agent.megatron": room("agent.link", "agent.probe", needs=["megatron", "torch"]),
    "agent.deepspeed": room("agent.link", "agent.probe", needs=["deepspeed", "torch"]),
    "agent.torchtitan": room("agent.probe", "agent.torch", needs=["torch", "torchtitan"]),
    # The agent's process.
    "agent.gpu.interface": pure(),
    "agent.gpu.physics": pure("agent.gpu.interface"),
    "agent.gpu.dynamics": pure("agent.gpu.interface", "agent.gpu.physics"),
    "agent.gpu": room(
        "agent.gpu.dynamics", "agent.gpu.interface", "agent.gpu.physics", needs=["pynvml", "structlog"]
    ),
    "agent.claims": pure("agent.link"),
    "agent.clocks": pure(),
    "agent.energy": pure("agent.gpu.interface", needs=["numpy"]),
    "agent.rank": pure("agent.clocks", "agent.energy", "agent.gpu.interface", "agent.link"),
    "agent.restore": room("agent.gpu", "agent.gpu.interface", needs=["structlog"]),
    "agent.stream": room(
        "agent.link",
        "agent.rank",
        "printable",
        "seldom",
        "tls",
        "v1",
        "v1.services",
        needs=["google", "grpc", "grpc_status", "structlog"],
    ),
    "agent.sidecar": room(
        "agent.claims",
        "agent.clocks",
        "agent.energy",
        "agent.gpu",
        "agent.gpu.interface",
        "agent.link",
        "agent.rank",
        "agent.restore",
        "agent.stream",
        "logs",
        "metrics",
        "metrics.distribution",
        "regular_file",
        "seldom",
        "tls",
        needs=["pydantic", "pydantic_settings", "pynvml", "structlog"],
    ),
    # Doors for the grid: clients of the coordinator, which know nothing of the service.
    "grid.dsx_flex": pure(),
    # Reads and writes texts of times: a calendar, and no clock.
    "grid.contract": room("grid.dsx_flex", needs=["pydantic", "pydantic_core"]),
    "grid": room(
        "grid.contract",
        "grid.dsx_flex",
        "logs",
        "tls",
        "v1",
        "v1.services",
        needs=["aiomqtt", "google", "grpc", "joserfc", "pydantic", "pydantic_settings", "structlog"],
    ),
    "agent.slurm.job": pure(),
    # What a batch system runs on the node, before and after a job.
    "agent.slurm": room(
        "agent.claims",
        "agent.gpu",
        "agent.gpu.interface",
        "agent.link",
        "agent.restore",
        "agent.sidecar",
        "agent.slurm.job",
        "regular_file",
    ),
    # What needs no cluster to be seen: emulated GPUs in real processes, real agents, a real coordinator.
    "demo": room(
        "agent.gpu",
        "agent.gpu.interface",
        "agent.gpu.physics",
        "agent.link",
        "agent.probe",
        "certificates",
        "demo.nvml_stub",
        "perseus",
        "pictures",
        "printable",
        "solver",
        "tls",
        "v1",
        "v1.services",
        needs=["deepspeed", "google", "grpc", "megatron", "rich", "torch"],
    ),
    "demo.nvml_stub": room(),
    # Nobody imports the command line, and it may import everybody.
    # What is wrong, and what to do.
    "doctor": room(
        "agent.gpu",
        "agent.link",
        "agent.restore",
        "agent.sidecar",
        "doctor.checks",
        "tls",
        "v1",
        "v1.services",
        needs=["grpc"],
    ),
    "doctor.checks": pure("tls"),
    "cli": room(
        "agent.gpu",
        "agent.gpu.interface",
        "agent.link",
        "agent.restore",
        "agent.sidecar",
        "agent.slurm",
        "agent.slurm.job",
        "certificates",
        "configuration",
        "demo",
        "demo.nvml_stub",
        "doctor",
        "doctor.checks",
        "grid",
        "logs",
        "metrics",
        "perseus",
        "pictures",
        "printable",
        "service.api",
        "service.domain",
        "service.job.machine",
        "service.job.quarantine",
        "service.job.recording",
        "service.server",
        "service.settings",
        "service.solving",
        "service.storage",
        "simulation",
        "simulation.replay",
        "solver",
        "solver.study",
        "tls",
        "v1",
        "v1.services",
        needs=["google", "grpc", "grpc_health", "pynvml", "rich", "typer"],
    ),
}

# These are nothing but the `__init__` that leads to the rooms.
HALLS = frozenset({"perseus", "agent", "service", "service.job"})

# Readers of the solver's own file format.
READS_FILES = frozenset({"solver.profile_csv"})

# Generated, and checked by `test_stubs`.
GENERATED = frozenset({"v1", "v1.services"})


def room_of(module: str) -> str | None:
    """The room of a module, both without `perseus.` in front; None if it has none."""
    if module in HOUSE:
        return module
    if module.startswith("v1.") and module.endswith("_pb2_grpc"):
        return "v1.services"
    rooms = [name for name in HOUSE if name not in HALLS and module.startswith(f"{name}.")]
    return max(rooms, key=len, default=None)


MODULES: Mapping[str, Path] = {
    ".".join(parts) or "perseus": path
    for path in sorted(PACKAGE.rglob("*.py"))
    if (parts := [part for part in path.relative_to(PACKAGE).with_suffix("").parts if part != "__init__"])[:1]
    != ["v1"]
}


def imports(source: str) -> Iterator[str]:
    """Every module that a source names in an import, however deep in it; names from `perseus` resolved."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                path = PACKAGE.parent / inner.replace(".", "/")
                is_module = path.is_dir() or path.with_suffix(".py").exists()
                yield inner if node.module.startswith("perseus") and is_module else node.module


def own(name: str) -> str | None:
    """A module of ours without `perseus.` in front; None if it is not ours."""
    return name.removeprefix("perseus.") if f"{name}.".startswith("perseus.") else None


def trespasses(module: str, source: str) -> list[str]:
    """What a module imports that its room may not."""
    name = room_of(module)
    if name is None:
        return [f"perseus.{module} is in no room"]
    room = HOUSE[name]
    found = []
    for imported in imports(source):
        if (inner := own(imported)) is not None:
            other = room_of(inner)
            if other != name and other not in room.knows:
                found.append(imported)
        elif (top := imported.partition(".")[0]) in sys.stdlib_module_names:
            if room.is_pure and top in IMPURE and not (module in READS_FILES and top == "pathlib"):
                found.append(imported)
        elif top not in room.needs:
            found.append(imported)
    return found


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        inner = {name for imported in imports(source) if (name := own(imported)) is not None}
        graph[module] = inner & sources.keys() - {module}
    return graph


def check_no_circle(graph: Mapping[str, Iterable[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports go in a circle: {' → '.join(error.args[1])}")


@pytest.mark.parametrize("module", MODULES)
def test_doors_stay_closed(module: str) -> None:
    assert trespasses(module, MODULES[module].read_text()) == []


def test_every_room_is_there() -> None:
    lived_in = {name for module in MODULES if (name := room_of(module)) is not None}
    assert lived_in | GENERATED == set(HOUSE)


def test_modules_import_in_no_circle() -> None:
    check_no_circle(import_graph({module: path.read_text() for module, path in MODULES.items()}))


def test_rooms_know_each_other_in_no_circle() -> None:
    check_no_circle({name: room.knows for name, room in HOUSE.items()})


@pytest.mark.parametrize("part", ["agent", "grid", "service", "solver"])
def test_tests_mirror_the_rooms(part: str) -> None:
    folders = [path.relative_to(TESTS) for path in (TESTS / part).rglob("test_*.py")]
    assert folders
    assert [str(folder) for folder in folders if not (PACKAGE / folder).parent.is_dir()] == []


# ---------------------------------------------------------------------- a closed door would be noticed


@pytest.mark.parametrize("name", [name for name in HOUSE if name not in GENERATED])
def test_whatever_is_planted_in_a_room_is_noticed(name: str) -> None:
    strangers = [f"perseus.{other}" for other in HOUSE if other not in HOUSE[name].knows | {name}]
    strangers += ["flask", *(sorted(IMPURE) if HOUSE[name].is_pure else [])]
    for stranger in strangers:
        assert trespasses(name, f"def late():\n    import {stranger}\n") == [stranger]


def test_a_pure_room_may_know_the_contracts_messages_and_never_its_services() -> None:
    source = "from perseus.v1 import event_pb2, job_service_pb2_grpc"
    assert trespasses("service.job.journal", source) == ["perseus.v1.job_service_pb2_grpc"]


def test_a_room_that_nobody_named_is_noticed() -> None:
    assert trespasses("service.cellar.wine", "") == ["perseus.service.cellar.wine is in no room"]


def test_a_circle_is_noticed() -> None:
    first, second = "service.job.journal", "service.domain.commands"
    sources = {first: f"import perseus.{second}", second: f"def late():\n    import perseus.{first}"}
    with pytest.raises(pytest.fail.Exception, match=r"in a circle: .*service\.job\.journal"):
        check_no_circle(import_graph(sources))


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
