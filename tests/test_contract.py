"""The stable contract: `buf breaking` checks every change against it, and the committed stubs match it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUF = Path(sys.executable).parent / "buf"
PREDICTED = ROOT / "protos" / "contract.binpb"


def breaking(folder: Path) -> str:
    """Return buf's findings on the contract in a folder; empty if it is compatible."""
    found = subprocess.run(
        [BUF, "breaking", "--against", PREDICTED], cwd=folder, capture_output=True, text=True, check=False
    )
    assert bool(found.returncode) == bool(found.stdout), found.stderr
    return found.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    return tmp_path


def change(folder: Path, file: str, pattern: str, replacement: str) -> None:
    path = folder / "protos" / "perseus" / "v1" / file
    text, count = re.subn(pattern, replacement, path.read_text(), count=1)
    assert count == 1
    path.write_text(text)


def test_the_contract_is_compatible(copy: Path) -> None:
    assert breaking(copy) == ""


def test_additions_break_nothing(copy: Path) -> None:
    change(copy, "rank.proto", r"(int32 tensor = 3;)", r"\1\n  // New.\n  int32 novelty = 4;")
    assert breaking(copy) == ""


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (r"  int32 tensor = 3;\n", ""),
        (r"int32 tensor = 3;", "int32 tensor = 4;"),
        (r"int32 tensor = 3;", "int64 tensor = 3;"),
        (r"int32 tensor = 3;", "int32 lane = 3;"),
        (r"  RANK_STATE_LOST = 4;\n", ""),
        (r"RANK_STATE_LOST = 4;", "RANK_STATE_LOST = 6;"),
    ],
    ids=["removed", "renumbered", "retyped", "renamed", "value removed", "value renumbered"],
)
def test_removals_and_changes_fail(copy: Path, pattern: str, replacement: str) -> None:
    change(copy, "rank.proto", pattern, replacement)
    assert "rank.proto" in breaking(copy)


def generated(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.glob("*_pb2*"))}


def test_stubs_match_the_contract(tmp_path: Path) -> None:
    # With the environment of the tests, without installing another one.
    own = [f"VENV={sys.prefix}", f"--assume-old={sys.prefix}/.installed"]
    subprocess.run(["make", "--silent", *own, "protos", f"OUT={tmp_path}"], cwd=ROOT, check=True)
    fresh, committed = generated(tmp_path / "perseus" / "v1"), generated(ROOT / "perseus" / "v1")
    assert fresh.keys() == committed.keys()
    assert [name for name in fresh if fresh[name] != committed[name]] == [], "run `make protos` and commit"
