"""The version and the commit in what is built, and builds that are the same twice."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from perseus.release import VERSION, commit_of_checkout, release

ROOT = Path(__file__).parent.parent


def test_a_checkout_has_the_version_and_its_commit() -> None:
    version, _, commit = release().partition("+g")
    assert version == VERSION
    assert commit == commit_of_checkout()


def test_the_chart_is_of_this_release() -> None:
    chart = yaml.safe_load((ROOT / "deploy/helm/perseus/Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


@pytest.mark.slow("builds the distributions twice")
@pytest.mark.skipif(not commit_of_checkout(), reason="needs a git checkout")
def test_two_clones_build_the_same_bytes_with_their_commit(tmp_path: Path) -> None:
    built: list[dict[str, bytes]] = []
    for name, umask in (("one", 0o022), ("two", 0o077)):
        clone = tmp_path / name
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True, umask=umask)
        for path in clone.rglob("*.py"):
            os.utime(path, (len(built) * 1e8, len(built) * 1e8))
        command: list[str | Path] = [
            sys.executable,
            "-m",
            "build",
            "--no-isolation",
            "--outdir",
            tmp_path / f"{name}-dist",
        ]
        subprocess.run(command, cwd=clone, check=True, capture_output=True, umask=umask)
        built.append({each.name: each.read_bytes() for each in (tmp_path / f"{name}-dist").iterdir()})
    assert built[0].keys() == {
        f"perseus_energy-{VERSION}-py3-none-any.whl",
        f"perseus_energy-{VERSION}.tar.gz",
    }
    assert built[0] == built[1]

    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(next((tmp_path / "one-dist").glob("*.whl"))) as wheel:
        wheel.extractall(unpacked)
    code = "from perseus.release import release; print(release())"
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(unpacked)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert printed.stdout.strip() == f"{VERSION}+g{commit_of_checkout()}"
