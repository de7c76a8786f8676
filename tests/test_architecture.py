"""Pure modules, each folder's dependencies on other distributions, and those of the base install.

`pyproject.toml` ([tool.importlinter]) defines which packages may import each other, and `make check` checks
it. Its contracts can't express purity, or a list of permitted distributions for a folder.
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

# Modules that read the time, draw random numbers, wait, or reach outside of the process.
IMPURE = frozenset(
    {
        "asyncio", "concurrent", "ctypes", "datetime", "fcntl", "glob", "io", "logging", "mmap",
        "multiprocessing", "os", "pathlib", "queue", "random", "secrets", "select", "selectors", "shutil",
        "signal", "socket", "sqlite3", "subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid",
    }
)  # fmt: skip


@dataclass(frozen=True)
class PackageRules:
    """The imports that a folder's modules may have beside Perseus and the standard library.

    `needs`: modules of other distributions. A pure module uses no IMPURE modules of the standard library, and
    only pure ones of Perseus.
    """

    needs: frozenset[str]
    is_pure: bool


def allowed(*needs: str) -> PackageRules:
    return PackageRules(frozenset(needs), is_pure=False)


def pure(*needs: str) -> PackageRules:
    return PackageRules(frozenset(needs), is_pure=True)


# A module has the rules of the longest matching prefix. There are no default rules: a new folder has to be
# named here.
RULES: Mapping[str, PackageRules] = {
    "perseus": pure(),
    "v1": pure("google", "grpc"),  # its messages are values; its services (`*_pb2_grpc`) are not
    "bundles": pure(),
    "printable": pure(),
    "regular_file": allowed(),
    "release": allowed(),
    "gpu": pure(),
    "job_id": pure(),
    "emulation": allowed(),
    "emulation.physics": pure(),
    "emulation.dynamics": pure(),
    "emulation.serving": allowed("aiohttp", "prometheus_client"),
    "emulation.request_replay": allowed("aiohttp"),
    "rate_limited_log": allowed("structlog"),
    "retry": pure(),
    "clock_skew": pure(),
    "schedule_name": pure(),
    "work_exponent": pure(),
    "logs": allowed("structlog"),
    "background": allowed("structlog"),
    "metrics": pure("prometheus_client"),
    "tls": allowed("google", "grpc", "grpc_status", "pydantic", "structlog"),
    "certificates": allowed("cryptography"),
    "configuration": allowed("pydantic", "pydantic_core", "pydantic_settings"),
    "pictures": allowed("matplotlib"),
    "solver": pure("igraph", "numpy"),
    "solver.study": pure("igraph", "numpy"),
    "serving": pure("numpy"),
    "serving.scrape": pure("prometheus_client"),
    # The coordinator, from the values up to the process.
    "service": pure(),
    "service.domain": pure("google", "numpy", "pydantic"),
    "service.job": pure("google", "pydantic"),
    "service.job.ranks": pure(),
    "service.job.iterations": pure("numpy"),
    "service.job.profiling": pure("numpy"),
    "service.job.statistics": pure("numpy"),
    "service.job.stragglers": pure("numpy"),
    "service.job.planning": pure("numpy"),
    "service.fleet": pure(),
    "service.fleet.power": pure("highspy", "numpy"),
    "service.fleet.signals": pure("numpy"),
    "service.fleet.signal_targets": pure("numpy"),
    "service.signals": allowed("aiohttp"),
    "service.signal_settings": allowed("pydantic"),
    "service.storage": allowed("alembic", "google", "numpy", "pydantic", "sqlalchemy", "structlog"),
    "service.storage.commit_markers": pure(),
    "service.storage.migrations": allowed("alembic", "sqlalchemy"),
    "service.solving": allowed("dask", "distributed", "structlog"),
    "service.solving.fair_queue": pure(),
    "service.shell": allowed("structlog"),
    "service.shell.watch_state": pure(),
    "service.shell.job_clock": pure(),
    "service.shell.quotas": pure(),
    "service.api": allowed("google", "grpc", "grpc_reflection", "grpc_status", "numpy", "structlog"),
    "service.web": allowed("aiohttp", "google", "structlog"),
    "service.settings": allowed("pydantic", "pydantic_settings"),
    "service.listening": allowed("grpc", "structlog"),
    "service.server": allowed("grpc", "grpc_health", "structlog"),
    "service.watchdog": allowed("structlog"),
    # The two processes on a GPU node share only the link.
    "agent.link": pure(),
    # The training process.
    "agent": allowed(),
    "agent.probe": allowed("torch"),
    "agent.torch": allowed("accelerate", "torch"),
    "agent.lightning": allowed("torch"),
    "agent.transformers": allowed("torch", "transformers"),
    "agent.megatron": allowed("megatron", "torch"),
    "agent.deepspeed": allowed("deepspeed", "torch"),
    "agent.torchtitan": allowed("torch", "torchtitan"),
    "agent.vllm": allowed("vllm"),
    # The agent's process.
    "agent.gpu": allowed("pynvml", "structlog"),
    "agent.claims": pure(),
    "agent.clocks": pure(),
    "agent.energy": pure("numpy"),
    "agent.rank": pure("numpy"),
    "agent.restore": allowed("structlog"),
    "agent.stream": allowed("google", "grpc", "grpc_status", "structlog"),
    "agent.sidecar": allowed("pydantic", "pydantic_settings", "structlog"),
    "agent.slurm": allowed(),
    "agent.slurm.job": pure(),
    "grid": allowed("aiomqtt", "google", "grpc", "joserfc", "pydantic", "pydantic_settings", "structlog"),
    "grid.dsx_flex": pure(),
    # Parses and formats times: a calendar, and no clock.
    "grid.contract": allowed("pydantic", "pydantic_core"),
    "simulation": allowed("numpy", "pydantic"),
    "simulation.replay": pure("numpy"),
    "demo": allowed("deepspeed", "google", "grpc", "megatron", "rich", "torch"),
    "demo.nvml_stub": allowed(),
    "doctor": allowed("grpc"),
    "doctor.checks": pure(),
    "cli": allowed("google", "grpc", "grpc_health", "rich", "typer"),
}

# These are only the `__init__` above the packages.
PARENTS = frozenset({"perseus", "agent", "service"})

# A reader of the solver's own file format; and a constant beside code that reads files.
EXCEPTIONS = frozenset(
    {
        ("solver.profile_csv", "io"),
        ("solver.profile_csv", "pathlib"),
        ("solver.profile_csv", "perseus.regular_file"),
        ("doctor.checks", "perseus.tls.files"),
    }
)

# Generated, and checked by `test_contract`.
GENERATED = "v1"


def package_of(module: str) -> str | None:
    """Return the longest name in RULES that a module belongs to, without `perseus.`; None without one."""
    if module in RULES:
        return module
    found = [name for name in RULES if name not in PARENTS and module.startswith(f"{name}.")]
    return max(found, key=len, default=None)


MODULES: Mapping[str, Path] = {
    ".".join(parts) or "perseus": path
    for path in sorted(PACKAGE.rglob("*.py"))
    if (parts := [part for part in path.relative_to(PACKAGE).with_suffix("").parts if part != "__init__"])[:1]
    != [GENERATED]
}


def imports(source: str) -> Iterator[str]:
    """Yield every module that a source imports, at any depth; names from `perseus` are resolved."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner.removeprefix("perseus.") in MODULES else node.module


def violations(module: str, source: str) -> list[str]:
    """Return a module's forbidden imports."""
    name = package_of(module)
    if name is None:
        return [f"perseus.{module} has no rules"]
    allowed = RULES[name]
    found = []
    for imported in imports(source):
        top = imported.partition(".")[0]
        if top == "perseus":
            other = package_of(imported.removeprefix("perseus."))
            is_value = (other is None or RULES[other].is_pure) and not imported.endswith("_pb2_grpc")
            is_fine = not allowed.is_pure or is_value
        elif top in sys.stdlib_module_names:
            is_fine = not allowed.is_pure or top not in IMPURE
        else:
            is_fine = top in allowed.needs
        if not is_fine and (module, imported) not in EXCEPTIONS:
            found.append(imported)
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_keep_the_rules(module: str) -> None:
    assert violations(module, MODULES[module].read_text()) == []


def test_every_rule_has_modules() -> None:
    ruled = {name for module in MODULES if (name := package_of(module)) is not None}
    assert ruled | {GENERATED} == set(RULES)


@pytest.mark.parametrize("part", ["agent", "emulation", "grid", "service", "serving", "solver"])
def test_tests_mirror_the_packages(part: str) -> None:
    folders = [path.relative_to(TESTS) for path in (TESTS / part).rglob("test_*.py")]
    assert folders
    assert [str(folder) for folder in folders if not (PACKAGE / folder).parent.is_dir()] == []


# ---------------------------------------------------------------------- a broken rule would be noticed


@pytest.mark.parametrize("name", [name for name in RULES if name != GENERATED])
def test_a_forbidden_import_is_noticed(name: str) -> None:
    impure = [*sorted(IMPURE), *(f"perseus.{other}" for other in RULES if not RULES[other].is_pure)]
    impure.append("perseus.v1.job_service_pb2_grpc")
    for other_user in ["flask", *(impure if RULES[name].is_pure else [])]:
        assert violations(name, f"def late():\n    import {other_user}\n") == [other_user]


def test_a_folder_without_rules_is_noticed() -> None:
    assert violations("service.cellar.wine", "") == ["perseus.service.cellar.wine has no rules"]


PLANTED = {
    "service/shell/jobs.py": "perseus.cli.jobs",
    "agent/rank/plans.py": "perseus.solver",
    "service/solving/work.py": "perseus.solver.study",
    "service/domain/limits.py": "perseus.service.api.texts",
    "service/web/page_api.py": "perseus.service.job.machine",
    "service/api/paging.py": "perseus.service.fleet.gpus",
    "service/api/memo.py": "perseus.service.storage.schema",
    "service/job/states.py": "perseus.service.job.machine",
    "agent/link/packets.py": "perseus.agent.gpu.executor",
    "agent/sidecar/ranks.py": "perseus.agent.probe.client",
    "agent/probe/client.py": "perseus.agent.gpu.executor",
    "tls/rules.py": "perseus.tls.fields",
}
"""For each contract on imports, in their order, one that breaks it."""


def test_planted_imports_break_each_import_contract(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "perseus", ignore=shutil.ignore_patterns("page", "__pycache__"))
    shutil.copy(PACKAGE.parent / "pyproject.toml", tmp_path)
    for path, imported in PLANTED.items():
        with (tmp_path / "perseus" / path).open("a") as file:
            file.write(f"\n\ndef late():\n    import {imported}\n")
    lint = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    done = subprocess.run(lint, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert f"Contracts: 0 kept, {len(PLANTED)} broken." in done.stdout, done.stdout + done.stderr


# ---------------------------------------------------------------------- extras


# Simulates the base install: the extras' modules can't be found.
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


def test_the_solver_loads_no_network_libraries() -> None:
    script = "import sys, perseus.solver; print(*({'grpc', 'google.protobuf'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


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
