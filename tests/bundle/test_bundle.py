"""The offline bundle of `make dist`, installed and run as on a node without an index."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

DIST = Path(__file__).parents[2] / "dist"
BUNDLES = [*DIST.glob("perseus-energy-*.tar.gz")]

pytestmark = [
    pytest.mark.slow("installs into environments of its own"),
    pytest.mark.skipif(len(BUNDLES) != 1, reason="needs the bundle of `make dist`"),
    pytest.mark.timeout(300),
]

# Nothing is to be had from elsewhere, wherever pip may look.
_NO_NETWORK = {
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_RETRIES": "0",
    "no_proxy": "*",
}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    with tarfile.open(BUNDLES[0]) as archive:
        archive.extractall(folder, filter="data")
    (inside,) = folder.iterdir()
    return inside


def install(unpacked: Path, what: str, into: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [unpacked / "install", what, into],
        env={"PATH": os.environ["PATH"], "PYTHON": sys.executable, **_NO_NETWORK},
        capture_output=True,
        text=True,
        check=False,
    )


def perseus(into: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [into / "bin" / "perseus", *arguments],
        env={"PATH": os.environ["PATH"], "HOME": str(into), **environment},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def warned(into: Path) -> str:
    """What is said where the interpreter is in a home, which the units keep services from."""
    interpreter = Path(sys.executable).resolve()
    if not interpreter.is_relative_to("/root") and not interpreter.is_relative_to("/home"):
        return ""
    return f"install: warning: {into} runs {interpreter}, where services can't reach it"


def test_a_node_has_the_agent_and_no_solver(unpacked: Path, tmp_path: Path) -> None:
    done = install(unpacked, "agent", tmp_path / "venv")
    assert done.returncode == 0
    assert done.stderr.partition(": for those")[0] == warned(tmp_path / "venv")
    assert done.stdout.startswith("perseus ")
    restored = perseus(tmp_path / "venv", "agent", "--restore", "--restore-folder", str(tmp_path / "restore"))
    assert restored.returncode == 0, restored.stderr
    refused = perseus(tmp_path / "venv", "coordinator")
    assert refused.returncode == 1
    assert "perseus-energy[coordinator]" in refused.stderr


def test_a_coordinator_serves_and_is_upgraded_in_place(unpacked: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    for _ in range(2):
        done = install(unpacked, "coordinator", venv)
        assert done.returncode == 0
        assert done.stderr.partition(": for those")[0] == warned(venv)
    made = perseus(venv, "certificates", "authority", "--folder", str(tmp_path / "ca"))
    assert made.returncode == 0, made.stderr
    database = tmp_path / "jobs.db"
    token = tmp_path / "operator.token"
    command: list[str | Path] = [
        venv / "bin" / "perseus",
        *["coordinator", "--listen=127.0.0.1:0", "--log-format=json"],
        *[f"--database={database}", f"--operator-token-file={token}"],
    ]
    process = subprocess.Popen(
        command,
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        lines = (json.loads(line) for line in process.stdout if line.startswith("{"))
        address = next(str(line["address"]) for line in lines if line["event"] == "listening")
        asked = perseus(venv, "health", PERSEUS_COORDINATOR=address, PERSEUS_TOKEN_FILE=str(token))
        assert (asked.returncode, asked.stdout.strip()) == (0, "SERVING")
    finally:
        process.terminate()
        process.communicate(timeout=30)
    assert process.returncode == 0


def test_what_is_no_bundle_is_said_in_a_line(unpacked: Path, tmp_path: Path) -> None:
    done = install(unpacked, "everything", tmp_path / "venv")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "install: expected coordinator or agent, found 'everything'\n"
    (tmp_path / "install").write_bytes((unpacked / "install").read_bytes())
    (tmp_path / "install").chmod(0o755)
    done = install(tmp_path, "agent", tmp_path / "venv")
    assert done.returncode == 1
    assert done.stderr.startswith("install: expected wheels/ beside this script")


def test_the_bundle_brings_units_and_slurms_scripts(unpacked: Path) -> None:
    names = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert {
        "perseus-agent.service",
        "perseus-coordinator.service",
        "perseus-coordinator.sysusers",
        "slurm/prolog",
        "slurm/epilog",
        "prometheus/perseus-rules.yml",
    } <= names
    assert os.access(unpacked / "slurm" / "epilog", os.X_OK)


def test_the_bundle_names_all_that_it_brings_and_its_licences(unpacked: Path) -> None:
    wheels = {path.name.split("-")[0].lower() for path in (unpacked / "wheels").glob("*.whl")}
    bill = json.loads((unpacked / "perseus-energy.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    named = {each["name"].replace("-", "_").lower(): each for each in bill["components"]}
    assert named.keys() == wheels
    without = {path.name.split("-")[0].lower() for path in (unpacked / "licences").iterdir()} ^ wheels
    assert all(named[name]["licenses"] for name in without), without
    (igraph,) = (unpacked / "licences").glob("igraph-*/LICENSE")
    assert "GNU GENERAL PUBLIC LICENSE" in igraph.read_text()
    assert "https://pypi.org/project/igraph/" in (unpacked / "NOTICE").read_text()
