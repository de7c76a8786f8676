"""The committed stubs match the contract."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def generated(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.glob("*_pb2*"))}


def test_stubs_match_the_contract(tmp_path: Path) -> None:
    # With the environment of the tests, without installing another one.
    own = [f"VENV={sys.prefix}", f"--assume-old={sys.prefix}/.installed"]
    subprocess.run(["make", "--silent", *own, "protos", f"OUT={tmp_path}"], cwd=ROOT, check=True)
    fresh, committed = generated(tmp_path / "perseus" / "v1"), generated(ROOT / "perseus" / "v1")
    assert fresh.keys() == committed.keys()
    assert [name for name in fresh if fresh[name] != committed[name]] == [], "run `make protos` and commit"
